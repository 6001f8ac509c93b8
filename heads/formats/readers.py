"""The layouts in which drafters of other projects are read; all drafters are imported with this file.

`config.json` and the names of the tensors identify the layout of a folder.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.errors import removed
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.formats import blocks, eagle_layouts, medusa_layouts, speculators
from draftsmith.heads.formats.published import LARGE, Published, Recorded, read_tensors, unknown_keys
from draftsmith.heads.model_config import text_config

Reader = Callable[[Published], TrainableDrafter]

SPECULATORS: dict[str, Reader] = {
    "dflash": blocks.read_speculators_block,
    "dflash2": blocks.read_speculators_block,
    "dspark": blocks.read_speculators_block,
    "eagle3": eagle_layouts.read_eagle3,
    "mtp": speculators.read_mtp,
    "peagle": eagle_layouts.read_eagle3,
}
"""Readers of the layout of vLLM's speculators, by `speculators_model_type`."""
ARCHITECTURES: dict[str, Reader] = {
    "DFlash2DraftModel": blocks.read_zlab,
    "DFlashDraftModel": blocks.read_zlab,
    "DSparkDraftModel": blocks.read_deepspec,
    "Eagle3LlamaForCausalLM": eagle_layouts.read_eagle3,
    "LiLiCorrDraftModel": blocks.read_zlab,
    "LlamaEagle3DraftModel": eagle_layouts.read_automodel_eagle3,
    "LlamaForCausalLMEagle3": eagle_layouts.read_eagle3,
    "MuseGlimmerAssistantModel": blocks.read_muse_glimmer,
    "Qwen3DFlash2DraftModel": blocks.read_zlab,
    "Qwen3DFlashDraftModel": blocks.read_zlab,
    "Qwen3DSparkModel": blocks.read_deepspec,
    "Qwen3Eagle3Model": eagle_layouts.read_deepspec_eagle3,
    "QwenDFlashDraftModel": blocks.read_zlab,
}
"""Readers of flat layouts, by the class that config.json names."""
OF_DRAFTERS = re.compile(r"DraftModel$|Eagle|DSpark")
"""Names of classes of drafters, which are not read as language models."""


def read_published(folder: Path, config: dict[str, Any], target: PreTrainedModel) -> TrainableDrafter | None:
    """Return the drafter in `folder`, not attached yet, or None where the layout is not recognised.

    Args:
        config: content of its config.json.

    Raises:
        ConfigError: for a drafter that does not fit `target` or that has an unsupported option.
    """
    published = Published(folder, Recorded(config), {}, target, text_config(target))
    read = _reader(published)
    if read is None:
        return None
    published.tensors = read_tensors(folder)
    if not published.tensors:
        raise published.refusal("no *.safetensors in the folder", "weights in such files: pickled ones are not read")
    published.allow("logit_scale", config.get("logit_scale", 1.0), (1.0,))
    with torch.no_grad():
        drafter = read(published)
    drafter.draft_length_hint = published.draft_length(drafter.max_draft_length or LARGE)
    drafter.unstated = tuple(published.unstated)
    drafter.unread_keys = unknown_keys(config, published.config.read)
    if "speculators_model_type" in config:
        drafter.shared_tensors = tuple(sorted(published.shared))
    return drafter


def _reader(published: Published) -> Reader | None:
    """Return the reader of the folder's layout; None for an unknown one."""
    config, kind = published.config, published.config.get("speculators_model_type")
    if kind is not None:
        return SPECULATORS[published.allow("speculators_model_type", kind, tuple(SPECULATORS))]
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return medusa_layouts.read_medusa
    if "hydra_head_arch" in config or "hydra_num_heads" in config:
        raise removed("drafter.type=hydra", f"drafter={published.folder}: ")
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if name == "MLPSpeculatorPreTrainedModel":
        raise removed("drafter.type=mlp_speculator", f"drafter={published.folder}: ")
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    parts = {tensor.split(".")[0] for tensor in read_tensors(published.folder, names_only=True)}
    if "midlayer" in parts:
        return eagle_layouts.read_eagle3
    if {"fc", "layers"} <= parts and "norm" not in parts:
        return eagle_layouts.read_eagle1
    if OF_DRAFTERS.search(name) or (not name and ("fc" in parts or "dflash_config" in config)):
        raise published.refusal(f"a {name}" if name else "no architectures", f"one of {', '.join(ARCHITECTURES)}")
    return None
