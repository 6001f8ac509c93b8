"""Drafters as other engines read them: one file a family of layouts, each the inverse of heads/published.py."""

from collections.abc import Callable

from draftsmith.hub.layouts.custom_generate import write_custom_generate
from draftsmith.hub.layouts.draft_model import write_for_sglang, write_for_transformers, write_for_vllm
from draftsmith.hub.layouts.eagle import write_eagle1, write_eagle1_for_sglang, write_eagle3, write_eagle3_for_sglang
from draftsmith.hub.layouts.layout import Serving, Source
from draftsmith.hub.layouts.medusa import write_medusa, write_medusa_for_vllm
from draftsmith.hub.layouts.speculators import (
    write_dflash_speculator,
    write_eagle3_speculator,
    write_mtp_speculator,
    write_peagle_speculator,
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
