"""DeepSpeed's ZeRO-2 and ZeRO-3: the recipe's values in its config, and its shards as whole tensors and back.

ZeRO-2 keeps moments and gradients in shards, ZeRO-3 the weights too. Below it, float32 weights in one AdamW.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, HfDeepSpeedConfig
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.train.checkpoint import TrainState, check_shapes, trained
from draftsmith.train.engine import Optimizers, all_finite
from draftsmith.train.recipe import Recipe

CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, by the names that torch gives them."""
OTHER_SOURCES = {
    "optimizer": "train.optimizer",
    "scheduler": "train.learning_rate and train.warmup_fraction",
    "torch_autocast": "train.mixed_precision",
}


def make_plugin(recipe: Recipe, precision: str) -> DeepSpeedPlugin:
    """DeepSpeed's config with the recipe's values; `precision`: 'no' or 'bf16', which autocast sees to.

    Raises:
        ConfigError: where config and recipe contradict each other, or for a recipe that ZeRO cannot train.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what DeepSpeed calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU it would be compiled; gloo does the same
    processes, parts = int(os.environ.get("WORLD_SIZE", "1")), recipe.train.gradient_accumulation
    micro = recipe.train.batch_size // (processes * parts)
    asked = _asked()
    check_config(asked, recipe, precision, micro)
    if recipe.train.optimizer != "adamw":
        raise ConfigError(
            f"train.optimizer={recipe.train.optimizer!r} under DeepSpeed; expected 'adamw': it shards flat vectors, "
            "and Muon needs whole matrices"
        )
    if recipe.cotrain is not None:
        raise ConfigError("cotrain under DeepSpeed; expected DDP or one process: it takes a second optimizer")
    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    config = plugin.deepspeed_config
    zero = config["zero_optimization"]
    if zero.get("stage") not in (2, 3):
        raise ConfigError(f"deepspeed zero_optimization.stage={zero.get('stage')}; expected 2 or 3, or another engine")
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]  # sizes that accelerate would derive from a hidden size; DeepSpeed has its own
    zero["memory_efficient_linear"] = False  # it would put a linear layer of its own into the target, too
    config |= {
        "train_batch_size": recipe.train.batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": recipe.train.clip_norm,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled, and is another AdamW
    }
    return plugin


def check_config(asked: dict[str, Any], recipe: Recipe, precision: str, micro: int) -> None:
    """ConfigError with both values where DeepSpeed's config says something else than the recipe."""
    train = recipe.train
    expected = {
        "train_batch_size": ("train.batch_size", train.batch_size, train.batch_size),
        "train_micro_batch_size_per_gpu": ("train.batch_size", train.batch_size, micro),
        "gradient_accumulation_steps": ("train.gradient_accumulation", *[train.gradient_accumulation] * 2),
        "gradient_clipping": ("train.clip_norm", train.clip_norm, train.clip_norm),
        "bf16.enabled": ("train.mixed_precision", train.mixed_precision, precision == "bf16"),
        "fp16.enabled": ("train.mixed_precision", train.mixed_precision, False),
    }
    for key, (ours, value, wanted) in expected.items():
        section, _, name = key.rpartition(".")
        given = (asked.get(section) or {}).get(name) if section else asked.get(name)
        if given not in (None, "auto", wanted):
            raise ConfigError(
                f"deepspeed {key}={given!r}, but the recipe has {ours}={value!r}; expected {wanted!r} or 'auto'"
            )
    for key, ours in OTHER_SOURCES.items():
        if asked.get(key):
            raise ConfigError(f"deepspeed {key}={json.dumps(asked[key])}; expected none, the recipe has {ours}")


def _asked() -> dict[str, Any]:
    """What DeepSpeed's config file says, or else accelerate's own options."""
    file = os.environ.get(CONFIG_FILE, "none")
    if file != "none":
        try:
            return HfDeepSpeedConfig(file).config
        except ValueError as error:
            raise ConfigError(f"deepspeed_config_file={file} cannot be read; expected JSON") from error
    asked: dict[str, Any] = {}
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":  # which accelerate also says where nobody has asked for it
        asked["gradient_accumulation_steps"] = int(steps) if steps.isdigit() else steps
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    asked["gradient_clipping"] = clipping if clipping in ("auto", "none") else float(clipping)
    return asked


class ZeroEngine:
    """See `Engine`. Weights and moments are reached through the accessors that DeepSpeed documents."""

    def __init__(self, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers) -> None:
        self._accelerator, self._step = accelerator, step
        (optimizer,) = optimizers
        self.module, prepared = accelerator.prepare(step, optimizer)
        self.optimizers = [prepared]
        self._zero = self.module.optimizer
        self._sharded = self.module.zero_optimization_stage() == 3
        if self._sharded:
            # Its hooks gather module by module, but objectives read weights outside of modules: see `part`.
            self._zero.parameter_offload.destroy()

    def part(self, last: bool) -> AbstractContextManager:
        self.module.set_gradient_accumulation_boundary(last)
        return self.gathered()

    def backward(self, loss: Tensor) -> None:
        # Past accelerate, which would take the step in here, before anybody has seen the loss.
        self.module.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        self.module.step()  # leaves out the update when the norm is not finite
        return float(self.module.get_global_grad_norm())

    def gathered(self) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters(list(self._step.parameters()), enabled=self._sharded)

    def state(self) -> TrainState:
        weights, moments = {}, {}
        main, count = self._accelerator.is_main_process, self._count()
        for name, parameter in trained(self._step).items():
            weight = safe_get_full_fp32_param(parameter).cpu()
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
            raise ValueError("moments that are not of one AdamW")
        with self._written():
            for name, parameter in parameters.items():
                parameter.data.copy_(state.weights[name])
        if counts:
            self._make_moments(counts[0])
        for name, parameter in parameters.items():
            safe_set_full_fp32_param(parameter, state.weights[name])
            for key in MOMENTS if counts else ():
                safe_set_full_optimizer_state(parameter, state.moments[name][key], key)

    def finite(self) -> bool:
        held = [parameter.ds_tensor if self._sharded else parameter for parameter in trained(self._step).values()]
        return all_finite(self._accelerator, [bool(shard.isfinite().all()) for shard in held])

    @contextmanager
    def _written(self) -> Iterator[None]:
        """While it is entered, weights may be written, the same on all processes."""
        parameters = list(self._step.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=self._sharded):
            yield

    def _flats(self) -> list[Tensor]:
        """This process's shards of the weights, one behind the other, as AdamW sees them."""
        return self._zero.fp32_partitioned_groups_flat if self._sharded else self._zero.single_partition_of_fp32_groups

    def _count(self) -> Tensor | None:
        """Steps that AdamW has taken; None before the first one."""
        found = [self._zero.optimizer.state[flat] for flat in self._flats() if flat in self._zero.optimizer.state]
        return found[0]["step"].cpu() if found and found[0] else None

    def _make_moments(self, count: float) -> None:
        """What AdamW would make in its first step, so that there is something to write into."""
        for flat in self._flats():
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            self._zero.optimizer.state[flat] = {"step": torch.tensor(count), **moments}
        if not self._sharded:
            self._zero._lazy_init_hp_params_optimizer_state()


def _moment(parameter: nn.Parameter, key: str) -> Tensor:
    return safe_get_full_optimizer_state(parameter, key).cpu()
