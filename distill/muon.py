"""The optimizer Muon: momentum with orthogonalised updates, so that a weight learns equally fast in all directions.

Keller Jordan et al., 2024 (kellerjordan.github.io/posts/muon); the step is sized like Adam's as in Liu et al. 2025
(arXiv:2502.16982). Within a few hundred steps it reaches a much lower loss than AdamW.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.lora import like, whole

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients of the authors: after five rounds all singular values lie in about 0.7 to 1.2."""


def orthogonalised(matrices: Tensor, rounds: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return matrices [N, rows, columns] with the same singular vectors and singular values close to 1."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for the 2-D weights inside the blocks; use AdamW for embeddings and gains.

    Args:
        parameters: weights or groups of them. A group's `columns` [columns] are the sizes of the inputs of its weight,
            which is then updated as if each input were divided by its size and the weight multiplied by it.
        dtype: of the matrix products; bf16 is precise enough and fast where the hardware has it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # takes no closure
        """Update all parameters once; those of equal shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                # Sharded parameters are gathered: a matrix is orthogonalised as a whole, on every process.
                momenta = torch.stack([whole(self._momentum(parameter, group["momentum"])) for parameter in parameters])
                columns = group.get("columns", 1.0)
                updates = orthogonalised(momenta / columns, dtype=group["dtype"]) / columns
                # An orthogonal update has RMS 1/sqrt(longer side); this brings it to the 0.2 that is usual for Adam.
                scale = 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(like(update, parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return the Nesterov momentum: the running mean of gradients, one step ahead."""
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        gradient = parameter.grad
        assert gradient is not None, "step leaves out parameters without a gradient"
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)
