"""What the loop asks of the engine that accelerate was launched with: one process, DDP and FSDP2 here, DeepSpeed in
train/deepspeed.py.

An engine says how a step is taken, and turns what it keeps in shards into whole tensors and back: for checkpoints,
which are the same under all engines, and for decoding with the drafter.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from draftsmith.heads.lora import like, whole
from draftsmith.train.accelerator import autocast
from draftsmith.train.checkpoint import TrainState, check_shapes, trained
from draftsmith.train.recipe import Recipe

Optimizers = list[torch.optim.Optimizer]


class Engine(Protocol):
    module: nn.Module
    """The step module as the engine calls it."""
    optimizers: Optimizers
    """Whose rates the loop sets."""

    def part(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of one part of a batch; gradients are exchanged behind the last one."""

    def backward(self, loss: Tensor) -> None:
        """The engine averages gradients over the processes, and sums them over the parts."""

    def step(self) -> float:
        """Clip, take the optimizers' step, drop the gradients. Returns the gradient's norm before it was clipped; one
        that is no finite number changes nothing."""

    def gathered(self) -> AbstractContextManager:
        """While it is entered, on all processes, the drafter's weights are whole on each of them, for decoding."""

    def state(self) -> TrainState:
        """Whole tensors, on the main process; all processes have to call it."""

    def load(self, state: TrainState) -> None:
        """Take such a state; all processes have to be given it. ValueError or KeyError before anything is changed."""

    def finite(self) -> bool:
        """Whether all weights are finite numbers."""


def make_engine(recipe: Recipe, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers) -> Engine:
    """Hands `step` and its optimizers to accelerate."""
    inner = step.forward

    def forward(*arguments: Any) -> Any:
        with autocast(recipe, accelerator.device):
            return inner(*arguments)

    step.forward = forward
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from draftsmith.train.deepspeed import ZeroEngine

        return ZeroEngine(accelerator, step, optimizers)
    return TorchEngine(accelerator, step, optimizers, recipe.train.clip_norm)


class TorchEngine:
    """One process, DDP or FSDP2, which differ in what a parameter is: a tensor, or a DTensor with a shard of it."""

    def __init__(self, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers, clip_norm: float) -> None:
        self._accelerator, self._step, self._clip_norm = accelerator, step, clip_norm
        self.module, *self.optimizers = accelerator.prepare(step, *optimizers)
        self._plain = [optimizer.optimizer for optimizer in self.optimizers]

    def part(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self._accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def step(self) -> float:
        norm = float(whole(self._accelerator.clip_grad_norm_(self.module.parameters(), self._clip_norm)))
        for optimizer in self.optimizers:
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        return norm

    @contextmanager
    def gathered(self) -> Iterator[None]:
        # Whole tensors take the place of the shards, rather than FSDP's own unsharding: it would end at a state_dict.
        shards = [
            (module, name, parameter)
            for module in self._step.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(parameter, DTensor)
        ]
        gathered: dict[DTensor, nn.Parameter] = {}
        for module, name, shard in shards:
            if shard not in gathered:
                gathered[shard] = nn.Parameter(whole(shard.detach()), requires_grad=shard.requires_grad)
            setattr(module, name, gathered[shard])
        try:
            yield
        finally:
            for module, name, shard in shards:
                setattr(module, name, shard)

    def state(self) -> TrainState:
        weights, moments = {}, {}
        main = self._accelerator.is_main_process
        for name, parameter in trained(self._step).items():
            values = {"": parameter}
            for optimizer in self._plain:
                values |= optimizer.state.get(parameter, {})
            # One at a time, so that no more than one is whole where it is not kept.
            values = {key: _on_main(value, main) for key, value in values.items()}
            if main:
                weights[name], moments[name] = values.pop(""), values
        return TrainState(weights, moments)

    def load(self, state: TrainState) -> None:
        parameters = trained(self._step)
        check_shapes(state, {name: parameter.shape for name, parameter in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(like(state.weights[name].to(parameter.device), parameter))
        names = {parameter: name for name, parameter in parameters.items()}
        for optimizer in self._plain:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                moments = state.moments.get(names[parameter])
                if moments:
                    optimizer.state[parameter] = {
                        key: value if key == "step" else like(value.to(parameter.device), parameter)
                        for key, value in moments.items()
                    }

    def finite(self) -> bool:
        found = [bool(local(parameter).isfinite().all()) for parameter in trained(self._step).values()]
        return all_finite(self._accelerator, found)


def local(parameter: Tensor) -> Tensor:
    """What this process holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def all_finite(accelerator: Accelerator, found: list[bool]) -> bool:
    """Whether all processes found nothing but finite numbers in what they hold."""
    wrong = torch.tensor([float(not all(found))], device=accelerator.device)
    return not float(accelerator.reduce(wrong, "sum"))


def _on_main(value: Tensor, main: bool) -> Tensor | None:
    gathered = whole(value.detach())
    return gathered.cpu().contiguous() if main else None
