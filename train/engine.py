"""The training engine for a single process, DDP and FSDP2; deepspeed.py overrides it for DeepSpeed.

An engine runs optimizer steps. It gathers sharded parameters and re-shards them, for checkpoints, which are the same
under all engines, and for decoding with the drafter.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from draftsmith.heads.lora import like, whole
from draftsmith.train.checkpoints import TrainState, check_shapes, trained
from draftsmith.train.optimizers import Optimizers


class Engine:
    """One process, DDP or FSDP2. Parameters are tensors, or under FSDP2 DTensors that hold a shard."""

    def __init__(self, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers, clip_norm: float) -> None:
        self._accelerator, self._step, self._clip_norm = accelerator, step, clip_norm
        self.module, *self.optimizers = accelerator.prepare(step, *optimizers)
        """The step module as wrapped by the engine, and the optimizers, whose learning rates the loop sets."""
        self._plain = [optimizer.optimizer for optimizer in self.optimizers]

    def part(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of forward and backward pass of a part of a batch; the last one reduces the gradients."""
        return nullcontext() if last else self._accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over the processes and summed over the parts of a batch."""
        self._accelerator.backward(loss)

    def step(self) -> float:
        """Clip the gradients, step the optimizers and clear the gradients; return the norm before clipping.

        A norm that is not finite changes no weight.
        """
        norm = self._accelerator.clip_grad_norm_(list(self.module.parameters()), self._clip_norm)
        assert norm is not None, "accelerate returns none under DeepSpeed only"
        norm = float(whole(norm))
        for optimizer in self.optimizers:
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        return norm

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this context every process holds the drafter's whole weights; all processes must enter it."""
        # Whole tensors replace the shards; FSDP's own unsharding would end at a state_dict.
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
        """Return whole tensors, on the main process only; all processes must call it."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        main = self._accelerator.is_main_process
        for name, parameter in trained(self._step).items():
            sharded: dict[str, Tensor] = {"": parameter}
            for optimizer in self._plain:
                sharded |= optimizer.state.get(parameter, {})
            # One at a time, so that a process which keeps none holds at most one whole tensor.
            gathered = {key: _on_main(value, main) for key, value in sharded.items()}
            values = {key: value for key, value in gathered.items() if value is not None}
            if main:
                weights[name], moments[name] = values.pop(""), values
        return TrainState(weights, moments)

    def load(self, state: TrainState) -> None:
        """Set weights and moments from such a state, the same on all processes.

        Raises:
            ValueError, KeyError: for a state that does not fit, before anything is changed.
        """
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
                        key: value.to(parameter.device)
                        if key == "step"
                        else like(value.to(parameter.device), parameter)
                        for key, value in moments.items()
                    }

    def finite(self) -> bool:
        """Return whether all weights are finite, on all processes."""
        whole = all(bool(self._shard(parameter).isfinite().all()) for parameter in trained(self._step).values())
        wrong = torch.tensor([float(not whole)], device=self._accelerator.device)
        return not float(reduced(self._accelerator, wrong))

    @staticmethod
    def _shard(parameter: Tensor) -> Tensor:
        """Return this process's shard of a parameter, or all of one that is not sharded."""
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def reduced(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """Return the sum of `tensor` over all processes."""
    total = accelerator.reduce(tensor, "sum")
    assert isinstance(total, Tensor)
    return total


def _on_main(value: Tensor, main: bool) -> Tensor | None:
    """Return the whole tensor on the CPU of the main process, None on the others; all processes must call it."""
    gathered = whole(value.detach())
    return gathered.cpu().contiguous() if main else None
