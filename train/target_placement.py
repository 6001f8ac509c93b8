"""Where the frozen target is stored: whole on every process; its layers in host memory, each copied to the device
while it computes (`target.offload`); with one byte a number (`target.quantization`); sharded over all processes
(`target.sharded`); or divided among the processes of a group, which compute together (`target.tensor_parallel`).

A sharded layer is gathered while it computes, which is a collective operation. In training steps all processes run the
target together. In sampling, caching and evaluation each process runs it for its own share. So every forward pass
begins with a count of the processes that compute, and processes that wait in `meet` take part until there are none.

A group of tensor parallelism samples, caches and evaluates as one: all its processes do the same, and its first one
writes.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import layers_of
from draftsmith.provenance import model_fingerprints
from draftsmith.train.recipe import Recipe

if TYPE_CHECKING:  # sampling imports the whole decoder, which only some recipes need
    from draftsmith.distill.regeneration import Share
    from draftsmith.distill.tensor_parallel import GroupTeacher


class Placement:
    """Places the target's layers as the recipe says; the target is whole until `place` is called."""

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
