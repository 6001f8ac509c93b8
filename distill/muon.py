"""Muon: momentum whose update matrices are made orthogonal, so that every direction of a weight learns at one speed.

Keller Jordan et al., 2024 (kellerjordan.github.io/posts/muon); the step is sized like Adam's as in Liu et al. 2025
(arXiv:2502.16982). With only a few hundred steps to learn in, it reaches a far lower loss than AdamW.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.heads.lora import like, whole

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients of the authors: after five rounds all singular values lie in about 0.7 to 1.2."""


def orthogonalised(matrices: Tensor, rounds: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, rows, columns] -> the same, singular values moved close to 1 and singular vectors kept."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For the 2-D weights inside the blocks; embeddings and gains belong to AdamW.

    Args:
        dtype: of the matrix products; bf16 is precise enough and fast where the hardware has it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # takes no closure
        """One update of all parameters; those of equal shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                # What is in shards is gathered: a matrix is made orthogonal as a whole, on every process.
                momenta = torch.stack([whole(self._momentum(parameter, group["momentum"])) for parameter in parameters])
                updates = orthogonalised(momenta, dtype=group["dtype"])
                # An orthogonal update has RMS 1/sqrt(longer side); this brings it to the 0.2 that is usual for Adam.
                scale = 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(like(update, parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the running mean of gradients, looked at one step ahead."""
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        gradient = parameter.grad
        assert gradient is not None, "step leaves out parameters without a gradient"
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)
