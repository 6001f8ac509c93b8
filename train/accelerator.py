"""What depends on how a run is launched: which engine on how many processes, on what machine, in what precision."""

import os
import shutil
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from transformers.integrations import unset_hf_deepspeed_config

from draftsmith.distill.embedded.training import bf16_is_fast
from draftsmith.errors import ConfigError
from draftsmith.train.recipe import DEEPSPEED, Recipe
from draftsmith.train.trackers import TRACKER_FOLDER

FSDP, MEGATRON = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """accelerate, for the engine that it was launched with.

    Its own mixed precision stays off: `autocast` does the same under every engine, and weights stay float32.

    Raises:
        ConfigError: before processes meet, for an engine or options of it that the recipe cannot run with.
    """
    require_divisible(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    options: dict[str, Any] = {"cpu": _on_cpu()}
    if _asked(MEGATRON):
        raise ConfigError(f"{MEGATRON}=true; expected DDP, FSDP2 or DeepSpeed")
    if _asked(DEEPSPEED):
        options = _deepspeed(recipe)
    elif int(os.environ.get(ACCUMULATION, "1")) != 1:
        raise ConfigError(
            f"accelerate's gradient_accumulation_steps={os.environ[ACCUMULATION]}; expected it unset: the recipe has "
            f"train.gradient_accumulation={recipe.train.gradient_accumulation}"
        )
    if _asked(FSDP):
        options["fsdp_plugin"] = _fsdp(recipe)
    group: dict[str, Any] = {"timeout": timedelta(minutes=recipe.train.timeout_minutes)}
    if _asked(DEEPSPEED) and _on_cpu():  # with cpu=True accelerate forgets DeepSpeed, without a backend the processes
        group["backend"] = "gloo"
    accelerator = Accelerator(
        mixed_precision="no",
        log_with=None if recipe.tracker == "none" else recipe.tracker,
        project_dir=str(folder / TRACKER_FOLDER),
        kwargs_handlers=[InitProcessGroupKwargs(**group)],
        **options,
    )
    require_divisible(recipe, accelerator.num_processes)  # other launchers than torchrun say it in other variables
    if _asked(DEEPSPEED):
        unset_hf_deepspeed_config()  # or under ZeRO-3 transformers would cut the target up while it is loaded
    if _asked(FSDP) and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate would quietly run DDP there, though all that it does for FSDP2 works on a CPU.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    return accelerator


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager:
    """The recipe's precision for a forward pass: bf16 products of float32 weights, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision(recipe) == "bf16")


def precision(recipe: Recipe) -> str:
    """'bf16' or 'no'; 'auto' asks the machine."""
    if recipe.train.mixed_precision != "auto":
        return recipe.train.mixed_precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bf16" if bf16_is_fast(device) else "no"


def require_divisible(recipe: Recipe, processes: int) -> None:
    """ConfigError for a global batch that the processes and accumulation steps cannot share evenly."""
    parts = processes * recipe.train.gradient_accumulation
    if recipe.train.batch_size % parts:
        raise ConfigError(
            f"train.batch_size={recipe.train.batch_size}; expected a multiple of {parts} = {processes} processes x "
            f"gradient_accumulation={recipe.train.gradient_accumulation}"
        )


def require_compiler(recipe: Recipe) -> None:
    """ConfigError where torch.compile would find out in the first step that it has nothing to compile with."""
    found = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl") if name and shutil.which(name)]
    if recipe.train.compile and not found:
        raise ConfigError(
            "train.compile=True without a C++ compiler; expected one (g++ or CXX), or train.compile=false"
        )


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _on_cpu() -> bool:
    """Whether this is one of several processes on a machine without accelerators, which accelerate has to be told."""
    return "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def _deepspeed(recipe: Recipe) -> dict[str, Any]:
    """What `Accelerator` is given under DeepSpeed."""
    from draftsmith.train.deepspeed import make_plugin  # DeepSpeed is an extra

    options: dict[str, Any] = {"deepspeed_plugin": make_plugin(recipe, precision(recipe))}
    if "LOCAL_RANK" not in os.environ or _asked("ACCELERATE_USE_CPU"):  # accelerate would quietly go without it
        raise ConfigError(
            f"{DEEPSPEED}=true without ranks, or with use_cpu; expected `accelerate launch`, use_cpu: false"
        )
    return options


def _fsdp(recipe: Recipe) -> FullyShardedDataParallelPlugin:
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ConfigError(f"fsdp_version={plugin.fsdp_version}; expected 2")
    if plugin.cpu_ram_efficient_loading:  # transformers would leave the target empty on all processes but one
        raise ConfigError("fsdp_cpu_ram_efficient_loading=true; expected false: every process makes the same drafter")
    if plugin.transformer_cls_names_to_wrap or plugin.min_num_params:
        named = plugin.transformer_cls_names_to_wrap or plugin.min_num_params
        raise ConfigError(
            f"FSDP is to wrap {named}; expected fsdp_auto_wrap_policy: NO_WRAP: objectives read the drafter's weights "
            "outside its modules, so that it is gathered as a whole around each step"
        )
    if recipe.cotrain is not None:
        raise ConfigError(
            "cotrain under FSDP2; expected DDP or one process: adapters inside the target are not sharded"
        )
    return plugin
