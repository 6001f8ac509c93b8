"""The layouts of other projects by name: the writer of each format, and the reader of a published folder.

`config.json` and the names of the tensors identify the layout of a folder; only safetensors weights are read.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.formats.blocks import read_deepspec, read_speculators_block, read_zlab
from draftsmith.heads.formats.common import Serving, Source
from draftsmith.heads.formats.eagle import read_deepspec_eagle3, read_eagle1, read_eagle3
from draftsmith.heads.formats.medusa import read_medusa
from draftsmith.heads.formats.published import LARGE, Published, read_tensors
from draftsmith.heads.formats.speculators import read_mtp
from draftsmith.heads.formats.token_heads import read_fms, read_hydra
from draftsmith.heads.model_config import text_config

FORMATS = ("vllm", "sglang", "gguf", "eagle", "medusa", "native", "transformers")


def _writer(function: str) -> Callable[[Source[Any]], Serving]:
    """Return the writer that an entry of `DRAFTERS` names."""
    file, name = function.split(".")
    return getattr(import_module(f"draftsmith.heads.formats.{file}"), name)


LAYOUTS: dict[str, dict[str, Callable[[Source[Any]], Serving]]] = {
    format: {kind: _writer(entry.exports[format]) for kind, entry in DRAFTERS.items() if format in entry.exports}
    for format in FORMATS
}
"""By format and type of drafter, the function that writes it."""

Reader = Callable[[Published], TrainableDrafter]
SPECULATORS: dict[str, Reader] = {
    "dflash": read_speculators_block,
    "dspark": read_speculators_block,
    "eagle3": read_eagle3,
    "mtp": read_mtp,
    "peagle": read_eagle3,
}
"""Readers of the layout of vLLM's speculators, by `speculators_model_type`."""
ARCHITECTURES: dict[str, Reader] = {
    "DFlashDraftModel": read_zlab,
    "DSparkDraftModel": read_deepspec,
    "Eagle3LlamaForCausalLM": read_eagle3,
    "LlamaForCausalLMEagle3": read_eagle3,
    "MLPSpeculatorPreTrainedModel": read_fms,
    "Qwen3DSparkModel": read_deepspec,
    "Qwen3Eagle3Model": read_deepspec_eagle3,
    "QwenDFlashDraftModel": read_zlab,
}
"""Readers of flat layouts, by the class that config.json names."""
UNREAD = {
    "DFlash2DraftModel": "its layers have convolutions, and a selector chooses among candidates",
    "DominoDraftModel": "a recurrent network corrects its logits by the tokens before",
    "Eagle3DeepseekV2ForCausalLM": "its layer has latent attention",
    "EagleDeepseekV3ForCausalLM": "its layer has latent attention",
    "Gemma4DSparkModel": "its layers scale embeddings and norm values",
    "Gemma4Eagle3Model": "its layers scale embeddings and norm values",
    "PEagleDraftModel": "SpecForge's config.json does not say how many tokens it drafts",
    "QwenDFlareDraftModel": "its layers mix the target's layers, with keys and values of their own for them",
}
"""Classes that no drafter here can represent, and the reason."""
UNREAD_SPECULATORS = {
    "dflash2": UNREAD["DFlash2DraftModel"],
    "xpress": "a network refines the logits of a block in several passes",
}
"""Types of speculators 0.9.0 that no drafter here can represent, and the reason."""


def read_published(folder: Path, config: dict[str, Any], target: PreTrainedModel) -> TrainableDrafter | None:
    """Return the drafter in `folder`, not attached yet, or None where the layout is not recognised.

    Args:
        config: content of its config.json.

    Raises:
        ConfigError: for a drafter that does not fit `target` or that has an unsupported option.
    """
    published = Published(folder, config, {}, target, text_config(target))
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
    if "speculators_model_type" in config:
        drafter.shared_tensors = tuple(sorted(published.shared))
    return drafter


def _reader(published: Published) -> Reader | None:
    """Return the reader of the folder's layout."""
    config, kind = published.config, published.config.get("speculators_model_type")
    if reason := UNREAD_SPECULATORS.get(str(kind)):
        said = f"speculators_model_type={kind!r} in config.json ({reason})"
        raise published.refusal(said, f"one of {', '.join(SPECULATORS)}")
    if kind is not None:
        return SPECULATORS[published.allow("speculators_model_type", kind, tuple(SPECULATORS))]
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return read_medusa
    if "hydra_head_arch" in config or "hydra_num_heads" in config:
        return read_hydra
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if name in UNREAD:
        raise published.refusal(f"a {name} ({UNREAD[name]})", f"one of {', '.join(ARCHITECTURES)}")
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    parts = {name.split(".")[0] for name in read_tensors(published.folder, names_only=True)}
    if "midlayer" in parts:
        return read_eagle3
    return read_eagle1 if {"fc", "layers"} <= parts and "norm" not in parts else None
