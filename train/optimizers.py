"""Optimizers of a drafter and schedules of the learning rate, by name.

Importing this module does not import torch: recipes are checked against the names in `OPTIMIZERS` and `SCHEDULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from draftsmith.heads.base import TrainableDrafter
    from draftsmith.heads.initial_weights import InputScales

Optimizers = list["torch.optim.Optimizer"]
Sizes = dict["Tensor", "InputScales"]
"""The sizes of the inputs of some weights of a drafter."""
BETAS = (0.9, 0.95)
"""AdamW's."""
MEASURED_TOTAL = 64.0
"""Sum of the absolute inputs of an lm_head on the targets for which Muon's rates were measured: 54 to 100."""


@dataclass(frozen=True)
class Trained:
    """The weights of a drafter that are trained, and the values of the recipe that every optimizer reads."""

    weights: list[nn.Parameter]
    matrices: list[nn.Parameter]
    """Those of `weights` that are matrices inside the layers."""
    sizes: Sizes = field(default_factory=dict)
    """The sizes of the inputs of some weights, which scale their updates, so that one rate suits inputs of any size."""
    weight_decay: float = 0.0
    dtype: torch.dtype | None = None
    """Dtype of Muon's matrix products; None: float32."""

    @classmethod
    def of(cls, drafter: TrainableDrafter, **values: Any) -> Trained:
        weights = [weight for weight in drafter.parameters() if weight.requires_grad]
        outside = {id(weight) for weight in drafter.outside_layers()}
        return cls(weights, [w for w in weights if w.ndim == 2 and id(w) not in outside], **values)


def muon(of: Trained) -> Optimizers:
    """Muon for the matrices inside the layers and AdamW for the rest, as Muon's authors recommend."""
    import torch

    from draftsmith.distill.muon import Muon

    made: Optimizers = []
    if of.matrices:
        plain = [weight for weight in of.matrices if weight not in of.sizes]
        groups: list[dict[str, Any]] = [{"params": plain}] if plain else []
        groups += [{"params": [w], "columns": of.sizes[w].columns_F} for w in of.matrices if w in of.sizes]
        made.append(Muon(groups, lr=0.0, weight_decay=of.weight_decay, dtype=of.dtype or torch.float32))
    taken = {id(weight) for weight in of.matrices}
    rest = [weight for weight in of.weights if id(weight) not in taken]
    return made + _adamw(of, rest, MEASURED_TOTAL)


def adamw(of: Trained) -> Optimizers:
    """AdamW for all weights."""
    return _adamw(of, of.weights, None)


OPTIMIZERS: dict[str, Callable[[Trained], Optimizers]] = {"adamw": adamw, "muon": muon}
"""Functions by the names that `train.optimizer` accepts. They return optimizers with a rate of 0, which every step sets
to the run's rate, times a group's `ratio` if it has one."""


def adapters_optimizer(adapters: nn.ParameterList, ratio: float) -> torch.optim.Optimizer:
    """Return the AdamW of adapters on the target, at `ratio` times the drafter's rate."""
    from torch.optim import AdamW

    group = {"params": list(adapters), "ratio": ratio}
    return AdamW([group], lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)


def _adamw(of: Trained, weights: list[nn.Parameter], ordinary: float | None) -> Optimizers:
    """Return the AdamW of some weights, none without any.

    A step of AdamW moves each value of a weight by up to the rate, hence an output by up to the rate times `total`.

    The fused AdamW needs no memory beside the moments; an accelerator's default, which updates lists of tensors, needs
    that of the weights.

    Args:
        ordinary: the sum of a weight's absolute inputs at which the rate holds; None: the number of its inputs, since
            alone AdamW's rates fall with the width.
    """
    from torch.optim import AdamW

    if not weights:
        return []
    plain = [weight for weight in weights if weight not in of.sizes]
    groups: list[dict[str, Any]] = [{"params": plain}] if plain else []
    for weight in weights:
        if weight in of.sizes:
            sizes = of.sizes[weight]
            share = min(1.0, (ordinary or len(sizes.columns_F)) / max(sizes.total, 1e-9))
            groups.append({"params": [weight], "ratio": share})
    return [AdamW(groups, lr=0.0, betas=BETAS, weight_decay=of.weight_decay, fused=True)]


class Schedule(NamedTuple):
    """The rate of a step relative to the peak, and its description in the first line of a run."""

    share: Callable[[float, float], float]
    """Function of two shares of steps that have been taken: of those after the warm-up, and of those of the decay (the
    last `train.decay_fraction` of all)."""
    described: str
    """`{decay}` stands for the number of steps of the decay."""


SCHEDULES = {
    "cosine": Schedule(lambda done, _: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)), "cosine to a tenth"),
    "linear": Schedule(lambda done, _: 1 - done, "linear to zero"),
    # Hägele et al. 2024, arXiv:2405.18392, section 3: 1 - sqrt.
    "wsd": Schedule(lambda _, decayed: 1 - math.sqrt(decayed), "constant, over the last {decay} steps to zero"),
    "constant": Schedule(lambda *_: 1.0, "constant"),
}
"""By the names that `train.schedule` accepts."""
