"""Linear layers on CPUs whose weights oneDNN has laid out before, for passes over a few tokens.

A product of a few tokens with a weight in rows is computed from a copy of the weight in blocks, which is made again in
every pass and takes longer than the product itself: SmolLM2-135M in float32 takes 1.9 times as long for 5 tokens as for
one, and 1.3 times with `pack_weights` (one core without AVX-512, docs/benchmarks.md). A pass over one token, or over a
whole prompt, takes as long as before.
"""

import platform
from typing import Any

import psutil
import torch
from torch import Tensor, nn

LEAST = 2**17
"""Weights of the smallest layer that gains: a call takes 20 microseconds longer."""
TOKENS = 8
"""Tokens of a pass that the layout is chosen for; layouts for 4 and for 16 are as fast."""


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its weight, which passes without gradients use.

    The copy follows no later change of the weight. Moved, cast and copied layers have none, and compute as before.
    """

    packed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the product [..., out_features], rounded in another order than that of `nn.Linear`."""
        if self.packed is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}


def pack_weights(model: nn.Module) -> int:
    """Lay out the weights of a model's linear layers in float32 on an x86 CPU; return how many bytes the copies take.

    Layers of other dtypes and devices, subclasses of `nn.Linear` and small layers stay as they are, and all do where
    the copies would take more than half of the free memory. The layers become `PackedLinear`, and the model's
    parameters, their names and `state_dict` do not change.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear and _gains(module.weight)]
    size = sum(layer.weight.nbytes for layer in layers)
    if size > psutil.virtual_memory().available / 2:
        return 0
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), TOKENS)
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)
        layer.packed = packed
    return size


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST
