"""DeepSpeed's ZeRO-2 and ZeRO-3: its config with the recipe's values, and the engine that gathers and re-shards.

ZeRO-2 shards moments and gradients, ZeRO-3 also the weights. Weights are float32, with one AdamW.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.train.checkpoints import TrainState, check_shapes, trained
from draftsmith.train.engine import Engine
from draftsmith.train.optimizers import Optimizers
from draftsmith.train.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments under torch's names."""
OURS = ("optimizer", "scheduler", "torch_autocast")
"""Sections of DeepSpeed's config that are left out: the recipe has optimizer, rates and precision."""


def make_plugin(recipe: Recipe, processes: int) -> DeepSpeedPlugin:
    """Return DeepSpeed's config, in which the recipe's values replace those of the file; autocast sets the precision.

    Raises:
        ConfigError: for another stage than 2 or 3, and for a recipe that ZeRO cannot train.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # caused by DeepSpeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled on a CPU; gloo does the same
    parts = recipe.train.gradient_accumulation
    micro = recipe.train.batch_size // (processes * parts)
    if recipe.train.optimizer != "adamw":
        raise ConfigError(
            f"train.optimizer={recipe.train.optimizer!r} under DeepSpeed; expected 'adamw': it shards flat vectors, "
            "and Muon needs whole matrices"
        )
    if recipe.cotrain is not None:
        raise ConfigError("cotrain under DeepSpeed; expected DDP or one process: it needs a second optimizer")
    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    config: dict[str, Any] = plugin.deepspeed_config
    zero = config["zero_optimization"]
    if zero.get("stage") not in (2, 3):
        raise ConfigError(f"deepspeed zero_optimization.stage={zero.get('stage')}; expected 2 or 3, or another engine")
    for key in OURS:
        config.pop(key, None)
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]  # accelerate would derive these sizes from a hidden size; DeepSpeed has defaults
    zero["memory_efficient_linear"] = False  # it would also replace linear layers of the target
    if not torch.accelerator.is_available():
        # DeepSpeed before 0.19.8 waits for the last weight only; gloo may finish the others later (their PR 8539).
        zero["stage3_allgather_sequential"] = True
    config |= {
        "train_batch_size": recipe.train.batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": recipe.train.clip_norm,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled, and its AdamW is another one
    }
    return plugin


class ZeroEngine(Engine):
    """DeepSpeed's engine. Weights and moments are read and written with the functions that DeepSpeed documents."""

    def __init__(self, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers) -> None:
        self._accelerator, self._step = accelerator, step
        self.module, *self.optimizers = accelerator.prepare(step, *optimizers)
        self._zero = self.module.optimizer
        self._sharded = self.module.zero_optimization_stage() == 3
        if self._sharded:
            # Its hooks gather weights module by module, but objectives read them outside modules: see `part`.
            self._zero.parameter_offload.destroy()

    def part(self, last: bool) -> AbstractContextManager:
        self.module.set_gradient_accumulation_boundary(last)
        return self.gathered()

    def backward(self, loss: Tensor) -> None:
        # Not through accelerate, which would step the optimizer here, before the loss has been checked.
        self.module.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        self.module.step()  # skips the update when the norm is not finite
        return float(self.module.get_global_grad_norm())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with deepspeed.zero.GatheredParameters(list(self._step.parameters()), enabled=self._sharded):
            yield

    def state(self) -> TrainState:
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        main, count = self._accelerator.is_main_process, self._count()
        if count is not None:
            self._link_moments()
        for name, parameter in trained(self._step).items():
            weight = _on_cpu(safe_get_full_fp32_param(parameter))
            values = {} if count is None else {key: _moment(parameter, key) for key in MOMENTS}
            if main:
                weights[name] = weight
                moments[name] = values if count is None else {"step": count.clone(), **values}
        return TrainState(weights, moments)

    def load(self, state: TrainState) -> None:
        parameters = trained(self._step)
        check_shapes(state, {name: getattr(p, "ds_shape", p.shape) for name, p in parameters.items()})
        moments = [state.moments[name] for name in parameters] if state.moments else []
        counts = [float(values["step"]) for values in moments]
        if len(set(counts)) > 1 or any(set(values) != {"step", *MOMENTS} for values in moments):
            raise ValueError("the moments do not belong to one AdamW")
        with self._writable():
            for name, parameter in parameters.items():
                parameter.data.copy_(state.weights[name])
        if counts:
            self._make_moments(counts[0])
        for name, parameter in parameters.items():
            safe_set_full_fp32_param(parameter, state.weights[name])
            for key in MOMENTS if counts else ():
                safe_set_full_optimizer_state(parameter, state.moments[name][key], key)

    @staticmethod
    def _shard(parameter: Tensor) -> Tensor:
        return getattr(parameter, "ds_tensor", parameter)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Gather the weights, to be changed in the same way on all processes, and shard them again at the end."""
        parameters = list(self._step.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=self._sharded):
            yield

    def _flats(self) -> list[Tensor]:
        """Return this process's shards of the weights, flat and concatenated, as AdamW holds them."""
        return self._zero.fp32_partitioned_groups_flat if self._sharded else self._zero.single_partition_of_fp32_groups

    def _count(self) -> Tensor | None:
        """Return the number of steps that AdamW has taken; None before the first one."""
        states = [self._zero.optimizer.state[flat] for flat in self._flats() if flat in self._zero.optimizer.state]
        return states[0]["step"].cpu() if states and states[0] else None

    def _make_moments(self, count: float) -> None:
        """Allocate the moments as AdamW's first step would, so that they can be set."""
        for flat in self._flats():
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.tensor(count, device=flat.device), **moments}
        self._link_moments()

    def _link_moments(self) -> None:
        """Let DeepSpeed's functions find the moments of all groups.

        DeepSpeed 0.19.8's ZeRO-2 steps one group after the other and links all moments once, after the first group's
        first step, when the other groups have none yet.
        """
        if not self._sharded:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _moment(parameter: nn.Parameter, key: str) -> Tensor:
    """Return the whole moment of a parameter, on the CPU; all processes must call it."""
    return _on_cpu(safe_get_full_optimizer_state(parameter, key))


def _on_cpu(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "DeepSpeed returns none for parameters that it does not train"
    return tensor.cpu()
