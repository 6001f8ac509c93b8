"""The launch of a run: checks of this machine, the accelerator and the engine, and the context that its parts share."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Timer, current_thread, main_thread
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill.chat_template import template_text
from draftsmith.distill.conversation import EmptyConversation, conversation, require_most
from draftsmith.distill.data_section import SELF, require_client, sources_of
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError, reason_of
from draftsmith.names import EMBEDDED, prompts_look_local
from draftsmith.provenance import has_cxx_compiler
from draftsmith.train.engine import Engine
from draftsmith.train.optimizers import Optimizers
from draftsmith.train.placement import Plain, placement_of
from draftsmith.train.process import LaunchVariables, launch_variables
from draftsmith.train.progress import TRACKER_FOLDER, Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import DEEPSPEED, TrainSection
from draftsmith.train.step import autocast, precision

FSDP = "ACCELERATE_USE_FSDP"
WAIT = timedelta(days=1)
"""How long a process waits for the others, which may be sampling, downloading or evaluating, before the run fails."""
ANNOUNCED_AFTER = 10.0
"""Seconds after which a process that waits for the others to connect prints that."""


@dataclass(frozen=True)
class RunContext:
    """A recipe and the processes that run it."""

    recipe: Recipe
    accelerator: Accelerator
    console: Console
    placement: Plain
    """Where the target's layers are stored."""

    @classmethod
    def of(cls, recipe: Recipe, accelerator: Accelerator) -> Self:
        """Build the context of `recipe`, with a console and a target placement for this process."""
        return cls(recipe, accelerator, Console(accelerator.is_main_process), placement_of(recipe.target, accelerator))

    @property
    def text_share(self) -> tuple[int, int]:
        """The number of shares that a batch is divided into, and the place of this process's."""
        together, accelerator = self.recipe.train.sequence_parallel, self.accelerator
        return accelerator.num_processes // together, accelerator.process_index // together


KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
"""Number of kernels that oneDNN keeps for bf16 on a CPU, read before the first one runs. Its default, 1,024, is no use
where every batch has shapes of its own: after 26 steps, kernels took 170 MiB."""


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Return accelerate's `Accelerator` for the engine that the process was launched with.

    accelerate's own mixed precision stays off: `autocast` does the same under every engine, with float32 weights.

    Raises:
        ConfigError: before processes connect, for an engine or engine options that the recipe does not support.
    """
    launched = launch_variables()
    recipe.require_divisible(launched.processes)
    os.environ.setdefault(*KERNELS)
    on_cpu = launched.address is not None and not torch.accelerator.is_available()
    options: dict[str, Any] = {"cpu": on_cpu}
    if _enabled(DEEPSPEED):
        options = _deepspeed(recipe, launched)
    if _enabled(FSDP):
        options["fsdp_plugin"] = _fsdp(recipe)
    group = InitProcessGroupKwargs(timeout=WAIT)
    if _enabled(DEEPSPEED) and on_cpu:  # accelerate ignores DeepSpeed with cpu=True, and processes need a backend
        group.backend = "gloo"
    with _connecting(launched):
        accelerator = Accelerator(
            mixed_precision="no",
            log_with=None if recipe.tracker == "none" else recipe.tracker,
            project_dir=str(folder / TRACKER_FOLDER),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loop accumulates
            # Gradients are views of the buffers that are reduced: DDP would hold a second copy of them.
            kwargs_handlers=[group, DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            **options,
        )
    recipe.require_divisible(accelerator.num_processes)  # launchers other than torchrun set other variables
    if _enabled(DEEPSPEED):
        unset_hf_deepspeed_config()  # or transformers would shard the target under ZeRO-3 while it is loaded
    if _enabled(FSDP) and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate would silently run DDP on a CPU, though everything that it does for FSDP2 works there.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    return accelerator


def unused_settings(train: TrainSection) -> list[str]:
    """Return a line for each setting of accelerate's launch or config file in whose place the recipe's is used."""
    environment = os.environ
    given = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    parts = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")  # DeepSpeed's may be 'auto'
    own, lines = precision(train), []
    if given not in ("no", own):
        used = f"train.mixed_precision={train.mixed_precision}" + f", here {own}" * (train.mixed_precision == "auto")
        lines.append(f"launch: mixed_precision={given} is not used; the recipe has {used}")
    if parts.isdecimal() and int(parts) not in (1, train.gradient_accumulation):
        used = f"train.gradient_accumulation={train.gradient_accumulation}"
        lines.append(f"launch: gradient_accumulation_steps={parts} is not used; the recipe has {used}")
    return lines


def _enabled(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


@contextmanager
def _connecting(launched: LaunchVariables) -> Iterator[None]:
    """Print what this process waits for if the others take long to connect inside the context, and let Ctrl-C end it.

    torch's own wait ignores Ctrl-C until `WAIT` has passed.
    """
    if launched.address is None:
        yield
        return
    line = (
        f"rank {launched.rank}: waiting for all of WORLD_SIZE={launched.processes} processes at {launched.address} "
        "(MASTER_ADDR, MASTER_PORT); if an earlier launch set these variables, press Ctrl-C and unset them"
    )
    timer = Timer(ANNOUNCED_AFTER, partial(print, line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if current_thread() is main_thread() else None
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={launched.address}: processes cannot connect there ({reason_of(error)}); "
            "expected a launcher's address, or these variables unset to train in one process"
        ) from error
    finally:
        timer.cancel()
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _deepspeed(recipe: Recipe, launched: LaunchVariables) -> dict[str, Any]:
    """Return the keyword arguments of `Accelerator` under DeepSpeed."""
    from draftsmith.train.deepspeed import make_plugin  # DeepSpeed is an extra

    options: dict[str, Any] = {"deepspeed_plugin": make_plugin(recipe, launched.processes)}
    if launched.address is None or _enabled("ACCELERATE_USE_CPU"):  # accelerate would silently run without it
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


def make_engine(recipe: Recipe, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers) -> Engine:
    """Hand `step`, under the recipe's autocast, and its optimizers to the engine that accelerate was launched with."""
    inner = step.forward

    def forward(*arguments: Any) -> Any:
        with autocast(recipe.train, accelerator.device):
            return inner(*arguments)

    step.forward = forward
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from draftsmith.train.deepspeed import ZeroEngine  # DeepSpeed is an extra

        return ZeroEngine(accelerator, step, optimizers)
    return Engine(accelerator, step, optimizers, recipe.train.clip_norm)


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
    for source in (*recipe.data.sources, *sources_of(recipe.evaluation.prompts)):
        if source.prompts not in (EMBEDDED, SELF):
            _require_readable(str(source.prompts), source.subset, source.split)


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


def _require_readable(source: str, subset: str | None, split: str) -> None:
    """Read every row of a local file of prompts; data sets on the Hub are checked when they are downloaded."""
    if Path(source).expanduser().exists() or prompts_look_local(source):
        rows, faulty, last = 0, 0, None
        for place, row in read_source(source, subset, split):
            rows += 1
            try:
                conversation(place, row)
            except EmptyConversation:  # left out, and counted, when the data are read
                pass
            except ConfigError as error:
                faulty, last = faulty + 1, error
        require_most(rows, faulty, last)
