"""Counting the floating-point operations of products of matrices, on tensors with data or without."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

ATEN = torch.ops.aten


class Operations(TorchDispatchMode):
    """While it is entered, `total` grows by two for every multiplication with an addition.

    torch's FlopCounterMode cannot follow gradients that are taken in a forward pass, as objectives here take them, and
    does not know attention as it is computed on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = operation(*arguments, **(options or {}))
        kind = operation._overloadpacket
        if kind is ATEN._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*_every_head(arguments[:3]))
        elif kind is ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += sdpa_backward_flop_count(*_every_head(arguments[:4]))
        elif kind in flop_registry:
            self.total += flop_registry[kind](*arguments, **(options or {}), out_val=result)
        return result


def _every_head(tensors: tuple) -> list[tuple[int, ...]]:
    """Return the shapes [B, heads, T, d] with the query's heads throughout: torch 2.11 counts no shared keys."""
    heads = max(tensor.shape[1] for tensor in tensors)
    return [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors]
