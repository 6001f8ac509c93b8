"""The layouts in which drafters are written for other projects; all drafters are imported with this file."""

from collections.abc import Callable
from typing import Any

from draftsmith.heads.configs import DRAFTERS, DrafterSection
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.formats import (
    blocks,
    eagle_layouts,
    llama_cpp,
    medusa_layouts,
    native_mtp,
    speculators,
    transformers,
)
from draftsmith.heads.formats.common import Serving, Source


def _for_transformers(source: Source[DFlash]) -> Serving:
    """Write a block drafter as a model of transformers where the target's family has one, otherwise with code."""
    return (
        blocks.write_muse_glimmer(source)
        if blocks.fits_muse_glimmer(source)
        else transformers.write_custom_generate(source)
    )


LAYOUTS: dict[str, dict[str, Callable[[Source[Any]], Serving]]] = {
    "vllm": {
        "draft_model": transformers.write_for_vllm,
        "medusa": medusa_layouts.write_medusa_for_vllm,
        "eagle3": speculators.write_eagle3_speculator,
        "peagle": speculators.write_peagle_speculator,
        "dflash": blocks.write_dflash_for_vllm,
    },
    "sglang": {
        "draft_model": transformers.write_for_sglang,
        "eagle": eagle_layouts.write_eagle1_for_sglang,
        "hass": eagle_layouts.write_eagle1_for_sglang,
        "eagle3": eagle_layouts.write_eagle3_for_sglang,
        "dflash": blocks.write_dflash_for_sglang,
    },
    "gguf": {
        "draft_model": llama_cpp.write_draft_model,
        "eagle3": llama_cpp.write_eagle3,
        "dflash": llama_cpp.write_dflash,
    },
    "native": {"mtp": native_mtp.write_native},
    "transformers": {
        **dict.fromkeys(DRAFTERS, transformers.write_custom_generate),
        "draft_model": transformers.write_for_transformers,
        "dflash": _for_transformers,
    },
}
"""By format and type of drafter, the function that writes it."""


def unserved(section: DrafterSection) -> str | None:
    """Return a note on a new drafter that no engine serves but transformers; None for others."""
    own = section.type == "mtp" and getattr(section, "init", None) != "native"
    if not own and any(section.type in layout for name, layout in LAYOUTS.items() if name != "transformers"):
        return None
    instead = "; engines serve the target's own module, drafter.init=native, where it has one" if own else ""
    what = "an MTP module that the target does not ship" if own else f"a drafter of type {section.type}"
    return f"{what} is served by transformers alone (draftsmith export --format transformers){instead}"
