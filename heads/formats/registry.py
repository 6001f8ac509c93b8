"""The formats that each drafter can be exported to, by name."""

from collections.abc import Callable

from draftsmith.heads.formats.common import Serving, Source
from draftsmith.heads.formats.eagle import write_eagle1, write_eagle1_for_sglang, write_eagle3, write_eagle3_for_sglang
from draftsmith.heads.formats.medusa import write_medusa, write_medusa_for_vllm
from draftsmith.heads.formats.speculators import (
    write_dflash_speculator,
    write_eagle3_speculator,
    write_mtp_speculator,
    write_peagle_speculator,
)
from draftsmith.heads.formats.transformers import (
    write_custom_generate,
    write_for_sglang,
    write_for_transformers,
    write_for_vllm,
)

HEADS_ANYWHERE = ("medusa", "hydra", "mlp_speculator", "eagle", "hass", "eagle3", "mtp", "peagle", "dflash")

LAYOUTS: dict[str, dict[str, Callable[[Source], Serving]]] = {
    "vllm": {
        "draft_model": write_for_vllm,
        "medusa": write_medusa_for_vllm,
        "eagle3": write_eagle3_speculator,
        "mtp": write_mtp_speculator,
        "peagle": write_peagle_speculator,
        "dflash": write_dflash_speculator,
    },
    "sglang": {
        "draft_model": write_for_sglang,
        "eagle": write_eagle1_for_sglang,
        "hass": write_eagle1_for_sglang,
        "eagle3": write_eagle3_for_sglang,
    },
    "eagle": {"eagle": write_eagle1, "hass": write_eagle1, "eagle3": write_eagle3},
    "medusa": {"medusa": write_medusa},
    "transformers": {"draft_model": write_for_transformers} | dict.fromkeys(HEADS_ANYWHERE, write_custom_generate),
}
"""By format and type of drafter, what writes it."""
