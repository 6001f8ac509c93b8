"""The launch of a run: checks of the machine before anything is loaded, accelerate's set-up, and the run's context."""

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill.chat_template import template_text
from draftsmith.distill.data_section import SELF, require_client
from draftsmith.distill.load_target import bf16_is_fast
from draftsmith.distill.sources import EmptyConversation, conversation, read_source
from draftsmith.errors import ConfigError
from draftsmith.names import EMBEDDED, prompts_look_local
from draftsmith.provenance import has_cxx_compiler
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import DEEPSPEED
from draftsmith.train.target_placement import Placement

FSDP = "ACCELERATE_USE_FSDP"
TRACKER_FOLDER = "tracker"
"""Folder of the tracker's files in the run's folder."""


@dataclass(frozen=True)
class RunContext:
    """A recipe and the processes that run it."""

    recipe: Recipe
    accelerator: Accelerator
    console: Console
    placement: Placement
    """Where the target's layers are stored."""

    @classmethod
    def of(cls, recipe: Recipe, accelerator: Accelerator) -> Self:
        """Build the context of `recipe`, with a console and a target placement for this process."""
        return cls(recipe, accelerator, Console(accelerator.is_main_process), Placement(recipe, accelerator))

    @property
    def text_share(self) -> tuple[int, int]:
        """The number of shares that a batch is divided into, and the place of this process's."""
        together, accelerator = self.recipe.train.sequence_parallel, self.accelerator
        return accelerator.num_processes // together, accelerator.process_index // together


def preflight(recipe: Recipe, *, training: bool) -> None:
    """Check that this machine has the files, packages and tools that the recipe names.

    `training`: also what only the training loop uses, the tracker and a compiler.

    Raises:
        ConfigError: for a package or compiler that is missing, and for a missing or malformed file.
    """
    if training:
        _require_tracker(recipe.tracker)
        _require_compiler(recipe)
    if recipe.data.server is not None:
        require_client()
    recipe.require_paths()
    if recipe.target.quantization is not None:
        from draftsmith.distill.quantization import require_quantization

        require_quantization(recipe.target.quantization, recipe.target.dtype)
    if recipe.data.chat_template is not None:
        template_text(recipe.data.chat_template)
    for source in (recipe.data.prompts, recipe.evaluation.prompts):
        if source not in (None, EMBEDDED, SELF):
            _require_readable(source)


def require_divisible(recipe: Recipe, processes: int) -> None:
    """Raise ConfigError for a batch or processes that the recipe cannot divide evenly."""
    together = {
        "target.tensor_parallel": recipe.target.tensor_parallel,
        "train.sequence_parallel": recipe.train.sequence_parallel,
    }
    for key, size in together.items():
        if processes % size:
            raise ConfigError(f"{key}={size} with processes={processes}; expected a divisor of the number of processes")
    shares = processes // recipe.train.sequence_parallel
    parts = shares * recipe.train.gradient_accumulation
    if recipe.train.batch_size % parts:
        of = "" if shares == processes else f" / sequence_parallel={recipe.train.sequence_parallel}"
        raise ConfigError(
            f"train.batch_size={recipe.train.batch_size}; expected a multiple of {parts} = {processes} processes{of} x "
            f"gradient_accumulation={recipe.train.gradient_accumulation}"
        )


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Return accelerate's `Accelerator` for the engine that the process was launched with.

    accelerate's own mixed precision stays off: `autocast` does the same under every engine, with float32 weights.

    Raises:
        ConfigError: before processes connect, for an engine or engine options that the recipe does not support.
    """
    require_divisible(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    options: dict[str, Any] = {"cpu": _on_cpu()}
    if _enabled(DEEPSPEED):
        options = _deepspeed(recipe)
    if _enabled(FSDP):
        options["fsdp_plugin"] = _fsdp(recipe)
    group = InitProcessGroupKwargs(timeout=timedelta(minutes=recipe.train.timeout_minutes))
    if _enabled(DEEPSPEED) and _on_cpu():  # accelerate ignores DeepSpeed with cpu=True, and processes need a backend
        group.backend = "gloo"
    accelerator = Accelerator(
        mixed_precision="no",
        log_with=None if recipe.tracker == "none" else recipe.tracker,
        project_dir=str(folder / TRACKER_FOLDER),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loop accumulates
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


def _require_tracker(tracker: str) -> None:
    """Raise ConfigError when the tracker's package is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(f"tracker={tracker} is not installed; expected none, or: pip install '.[{tracker}]'")


def _require_compiler(recipe: Recipe) -> None:
    """Raise ConfigError where torch.compile would fail in the first step for want of a C++ compiler."""
    if recipe.train.compile and not has_cxx_compiler():
        raise ConfigError(
            "train.compile=True without a C++ compiler; expected one (g++ or CXX), or train.compile=false"
        )


def _require_readable(source: str) -> None:
    """Read every row of a local file of prompts; data sets on the Hub are checked when they are downloaded."""
    if Path(source).expanduser().exists() or prompts_look_local(source):
        for place, row in read_source(source):
            with suppress(EmptyConversation):  # left out, and counted, when the data are read
                conversation(place, row)


def _enabled(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _on_cpu() -> bool:
    """Return whether this is one of several processes on a machine without accelerators."""
    return "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def _deepspeed(recipe: Recipe) -> dict[str, Any]:
    """Return the keyword arguments of `Accelerator` under DeepSpeed."""
    from draftsmith.train.deepspeed import make_plugin  # DeepSpeed is an extra

    options: dict[str, Any] = {"deepspeed_plugin": make_plugin(recipe)}
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
