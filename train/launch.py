"""The launch of a run: checks of the machine, accelerate's set-up, and where the target is placed."""

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill.chat_template import template_text
from draftsmith.distill.data_section import SELF, require_client
from draftsmith.distill.load_target import LoadedTarget, bf16_is_fast
from draftsmith.distill.sources import EmptyConversation, conversation, read_source
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import layers_of
from draftsmith.names import EMBEDDED, prompts_look_local
from draftsmith.provenance import has_cxx_compiler, model_fingerprints
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import DEEPSPEED

if TYPE_CHECKING:  # sampling imports the whole decoder, which only some recipes need
    from draftsmith.distill.regeneration import Share
    from draftsmith.distill.tensor_parallel import GroupTeacher

FSDP = "ACCELERATE_USE_FSDP"
WAIT = timedelta(days=1)
"""How long a process waits for the others, which may be sampling, downloading or evaluating, before the run fails."""
TRACKER_FOLDER = "tracker"
"""Folder of the tracker's files in the run's folder."""


class Placement:
    """Where the frozen target is stored; it is whole until `place` is called.

    Whole on every process; its layers in host memory, each copied to the device while it computes (`target.offload`);
    with one byte a number (`target.quantization`); sharded over all processes (`target.sharded`); or divided among the
    processes of a group, which compute together (`target.tensor_parallel`).

    A sharded layer is gathered while it computes, which is a collective operation. In training steps all processes run
    the target together. In sampling, caching and evaluation each process runs it for its own share. So every forward
    pass begins with a count of the processes that compute, and processes that wait in `meet` take part until there are
    none. A group of tensor parallelism samples, caches and evaluates as one: all its processes do the same, and its
    first one writes.
    """

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        self._accelerator, self._offload = accelerator, recipe.target.offload
        self._quantization = recipe.target.quantization
        self._sharded = recipe.target.sharded and accelerator.num_processes > 1
        self._layers: list[FSDPModule] = []
        self._together = recipe.target.tensor_parallel
        self._group: dist.ProcessGroup | None = None

    @property
    def load_to(self) -> torch.device:
        """Device to load the target to; `place` distributes it from there."""
        later = self._sharded or self._offload or self._quantization is not None
        return torch.device("cpu") if later else self._accelerator.device

    @property
    def share(self) -> "Share":
        """This process's share of work for which processes run the target by themselves, or with their group."""
        from draftsmith.distill.regeneration import Share

        group, place = divmod(self._accelerator.process_index, self._together)
        return Share(group, self._accelerator.num_processes // self._together, self.meet, writes=place == 0)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true for a process of this one's group; all of them must call it."""
        if self._group is None:
            return flag
        count = torch.tensor(float(flag), device=self._accelerator.device)
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def teacher(self, online: OnlineTeacher) -> "OnlineTeacher | GroupTeacher":
        """Return the teacher of training steps, in which each process has its own rows."""
        if self._group is None:
            return online
        from draftsmith.distill.tensor_parallel import GroupTeacher

        return GroupTeacher(online, self._group)

    def place(self, target: LoadedTarget) -> None:
        """Distribute the layers; embeddings, norms and lm_head, which drafters read, stay whole on the device.

        Sharding needs several processes; with one, the target stays whole.

        Raises:
            ConfigError: for a target without a list of layers, or quantised weights.
        """
        model = target.model
        # Of the target itself, while all weights are here: drafters are for it, not for its rounded or adapted weights.
        vars(model)["draftsmith_fingerprints"] = model_fingerprints(model)
        if self._together > 1:  # it was loaded in parts
            from draftsmith.distill.tensor_parallel import group_of

            self._group = group_of(model)
            model.base_model.register_forward_pre_hook(self._require_same_input, with_kwargs=True)
        if self._quantization is not None:
            from draftsmith.distill.quantization import quantize

            quantize(model, self._quantization, self._accelerator.device)
            self._move_the_rest(model, layers_of(model))
        if not self._sharded and not self._offload:
            return
        layers = getattr(model.base_model, "layers", getattr(model.base_model, "h", None))
        plain = all(weight.is_floating_point() for weight in model.parameters())
        if model.config.is_encoder_decoder or not isinstance(layers, nn.ModuleList) or not plain:
            key = "offload" if self._offload else "sharded"
            raise ConfigError(
                f"target.{key}=True with {type(model).__name__}; expected a decoder-only model with a list of layers "
                "and floating-point weights"
            )
        if self._offload:
            self.offload(model)
        else:
            self._shard(model, layers)

    def offload(self, model: PreTrainedModel) -> None:
        """Copy each layer of `model`, which is in host memory, to the device while it computes."""
        layers = layers_of(model)
        self._move_the_rest(model, layers)
        for layer in layers:
            cpu_offload(layer, self._accelerator.device)

    def _move_the_rest(self, model: PreTrainedModel, layers: list[nn.Module]) -> None:
        """Move everything outside of `layers` to the device."""
        inside = {module for layer in layers for module in layer.modules()}
        for module in model.modules():
            if module in inside:
                continue
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                value.data = value.data.to(self._accelerator.device)

    def _shard(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        device = self._accelerator.device
        mesh = init_device_mesh(device.type, (self._accelerator.num_processes,))
        for layer in layers:
            # By default FSDP does not re-shard the outermost module.
            self._layers.append(fully_shard(layer, mesh=mesh, reshard_after_forward=True))
        nn.Module.to(model, device)
        self._gather_all()  # outside of inference mode, which would make the buffers unusable outside of it
        model.base_model.register_forward_pre_hook(self._announce)

    def meet(self) -> None:
        """Wait for all processes, and take part in gathering layers until no process runs the target."""
        while self._layers and self._count(here=False):
            self._gather_all()
        self._accelerator.wait_for_everyone()

    def _announce(self, *_: object) -> None:
        self._count(here=True)

    def _require_same_input(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        from draftsmith.distill.tensor_parallel import require_same_input

        assert self._group is not None, "the hook is added with the group"
        read = arguments[0] if arguments else options.get("input_ids")
        require_same_input(options["inputs_embeds"] if read is None else read, self._group)

    def _count(self, here: bool) -> Tensor:
        """Return the number of processes about to run the target; `here`: this one is."""
        count = torch.tensor(float(here), device=self._accelerator.device)
        dist.all_reduce(count)
        return count

    def _gather_all(self) -> None:
        for layer in self._layers:
            layer.unshard()
            layer.reshard()


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


KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
"""Number of kernels that oneDNN keeps for bf16 on a CPU, read before the first one runs. Its default, 1,024, is no use
where every batch has shapes of its own: after 26 steps, kernels took 170 MiB."""


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Return accelerate's `Accelerator` for the engine that the process was launched with.

    accelerate's own mixed precision stays off: `autocast` does the same under every engine, with float32 weights.

    Raises:
        ConfigError: before processes connect, for an engine or engine options that the recipe does not support.
    """
    require_divisible(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    os.environ.setdefault(*KERNELS)
    options: dict[str, Any] = {"cpu": _on_cpu()}
    if _enabled(DEEPSPEED):
        options = _deepspeed(recipe)
    if _enabled(FSDP):
        options["fsdp_plugin"] = _fsdp(recipe)
    group = InitProcessGroupKwargs(timeout=WAIT)
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
