"""Blocks of drafters and of models: recomputed in the backward pass, or compiled one by one."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftsmith.heads.flat_rows import again_reading


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Store only each block's inputs for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    This takes less memory and one more forward pass of the blocks; gradients stay the same.
    """
    for block in blocks:
        block.forward = _recomputed(block.forward)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block with torch.compile when it first runs, for any batch size and length."""
    for block in blocks:
        block.compile(dynamic=True)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=again_reading, **options)

    return again
