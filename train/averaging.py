"""The exponential moving average of the trained weights, `train.average`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftsmith.train.checkpoint import TrainState, trained


class WeightAverage:
    """The average of a module's trained weights, whole, on the processes that evaluate.

    The weights count as decay * average + (1 - decay) * weights after each step, where the decay of step t, counted
    from 0, is at most (1 + t) / (10 + t), so that the first steps do not keep the initial weights.
    """

    def __init__(self, module: nn.Module, decay: float, kept: bool) -> None:
        """`kept`: whether this process evaluates; the others keep no average."""
        self._module, self._decay, self._kept = module, decay, kept
        self.weights: dict[str, Tensor] = {}
        """Averages by name of the weight; empty before the first step."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Count the weights after `step`; to be called while the module holds whole weights."""
        if not self._kept:
            return
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, weight in trained(self._module).items():
            if name in self.weights:
                self.weights[name].lerp_(weight, 1 - decay)
            else:
                self.weights[name] = weight.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in place of the weights, which the module must hold as a whole, until the context ends."""
        weights = trained(self._module)
        own = {name: weight.data for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data = self.weights[name]
        try:
            yield
        finally:
            for name, weight in weights.items():
                weight.data = own[name]

    def load(self, state: TrainState) -> None:
        """Set the averages to those of a checkpoint; of one without averages, to its weights.

        Raises:
            KeyError: on all processes, for averages of another module.
        """
        stored = state.average or state.weights
        weights = {name: stored[name].to(weight.device) for name, weight in trained(self._module).items()}
        self.weights = weights if self._kept else {}
