"""How a run is launched: engine, processes, device and precision."""

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill.load_target import bf16_is_fast
from draftsmith.errors import ConfigError
from draftsmith.train.preflight import require_divisible
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import DEEPSPEED

FSDP, MEGATRON = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"
PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
TRACKER_FOLDER = "tracker"
"""Folder of the tracker's files in the run's folder."""


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Return accelerate's `Accelerator` for the engine that the process was launched with.

    accelerate's own mixed precision stays off: `autocast` does the same under every engine, with float32 weights.

    Raises:
        ConfigError: before processes connect, for an engine or engine options that the recipe does not support.
    """
    require_divisible(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    options: dict[str, Any] = {"cpu": _on_cpu()}
    if _enabled(MEGATRON):
        raise ConfigError(f"{MEGATRON}=true; expected DDP, FSDP2 or DeepSpeed")
    if _enabled(PARALLELISM):  # its methods replace the attention of transformers' models, which drafters do not use
        raise ConfigError(
            f"{PARALLELISM}=true (accelerate's parallelism_config); expected it unset: target.tensor_parallel divides "
            "a target, and train.sequence_parallel a text"
        )
    if _enabled(DEEPSPEED):
        options = _deepspeed(recipe)
    elif int(os.environ.get(ACCUMULATION, "1")) != 1:
        raise ConfigError(
            f"accelerate's gradient_accumulation_steps={os.environ[ACCUMULATION]}; expected it unset: the recipe has "
            f"train.gradient_accumulation={recipe.train.gradient_accumulation}"
        )
    if _enabled(FSDP):
        options["fsdp_plugin"] = _fsdp(recipe)
    group = InitProcessGroupKwargs(timeout=timedelta(minutes=recipe.train.timeout_minutes))
    if _enabled(DEEPSPEED) and _on_cpu():  # accelerate ignores DeepSpeed with cpu=True, and processes need a backend
        group.backend = "gloo"
    accelerator = Accelerator(
        mixed_precision="no",
        log_with=None if recipe.tracker == "none" else recipe.tracker,
        project_dir=str(folder / TRACKER_FOLDER),
        # Gradients are views of the buffers that are reduced: DDP would hold a second copy of them.
        kwargs_handlers=[group, DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        **options,
    )
    require_divisible(recipe, accelerator.num_processes)  # launchers other than torchrun set other variables
    if _enabled(DEEPSPEED):
        unset_hf_deepspeed_config()  # or transformers would shard the target under ZeRO-3 while it is loaded
    if _enabled(FSDP) and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate would silently run DDP on a CPU, though everything that it does for FSDP2 works there.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    return accelerator


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in the recipe's precision: bf16 products of float32 weights, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision(recipe) == "bf16")


def precision(recipe: Recipe) -> str:
    """Return 'bf16' or 'no'; 'auto' depends on the machine."""
    if recipe.train.mixed_precision != "auto":
        return recipe.train.mixed_precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bf16" if bf16_is_fast(device) else "no"


def _enabled(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _on_cpu() -> bool:
    """Return whether this is one of several processes on a machine without accelerators."""
    return "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def _deepspeed(recipe: Recipe) -> dict[str, Any]:
    """Return the keyword arguments of `Accelerator` under DeepSpeed."""
    from draftsmith.train.deepspeed import make_plugin  # DeepSpeed is an extra

    options: dict[str, Any] = {"deepspeed_plugin": make_plugin(recipe, precision(recipe))}
    if "LOCAL_RANK" not in os.environ or _enabled("ACCELERATE_USE_CPU"):  # accelerate would silently run without it
        raise ConfigError(
            f"{DEEPSPEED}=true without ranks, or with use_cpu; expected `accelerate launch`, use_cpu: false"
        )
    return options


def _fsdp(recipe: Recipe) -> FullyShardedDataParallelPlugin:
    """Return accelerate's plugin for FSDP2; ConfigError for options that the training loop does not support."""
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ConfigError(f"fsdp_version={plugin.fsdp_version}; expected 2")
    if plugin.cpu_ram_efficient_loading:  # transformers would leave the target empty on all processes but one
        raise ConfigError("fsdp_cpu_ram_efficient_loading=true; expected false: every process makes the same drafter")
    wrapped = plugin.transformer_cls_names_to_wrap or plugin.min_num_params
    if wrapped:
        raise ConfigError(
            f"FSDP is to wrap {wrapped}; expected fsdp_auto_wrap_policy: NO_WRAP: objectives read the drafter's "
            "weights outside its modules, so that it is gathered as a whole around each step"
        )
    if recipe.cotrain is not None:
        raise ConfigError(
            "cotrain under FSDP2; expected DDP or one process: adapters inside the target are not sharded"
        )
    return plugin
