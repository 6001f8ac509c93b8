"""A drafter's blocks: the parts whose activations may be forgotten, and which torch.compile is worth it for."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.heads.draft_model import DraftModel, layer_lists
from draftsmith.heads.hydra import HydraHead
from draftsmith.heads.medusa import ResidualBlock
from draftsmith.heads.mlp_speculator import SpeculatorStep

OWN = (LlamaMLP, HydraHead, ResidualBlock, SpeculatorStep)
"""Of the drafters with layers of their own. Attention is none: it remembers the keys of earlier steps, which would be
remembered twice, and that memory cannot be given back."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, or the outermost blocks of a drafter."""
    if isinstance(model, DraftModel):
        model = model.model
    if isinstance(model, PreTrainedModel):
        return [layer for name in layer_lists(model) for layer in model.get_submodule(name)]
    found = {name: module for name, module in model.named_modules() if isinstance(module, OWN)}
    return [block for name, block in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def recompute_activations(model: nn.Module) -> None:
    """Keep only what goes into each block for the backward pass (Chen et al. 2016, arXiv:1604.06174): less memory, one
    more forward pass of the blocks, the same gradients."""
    for block in blocks_of(model):
        block.forward = _recomputed(block.forward)


def compile_blocks(model: nn.Module) -> None:
    """Let torch.compile make kernels of each block, for any batch and length, when it first runs."""
    for block in blocks_of(model):
        block.compile(dynamic=True)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return again
