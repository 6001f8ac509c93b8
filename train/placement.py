"""Where the frozen target's weights are stored while a run trains, samples, caches and evaluates.

plain      the whole target on the device of each process
offloaded  layers in host memory, each copied to the device while it computes (`target.offload`)
quantized  matrices with one byte a number (`target.quantization`)
sharded    a shard of each layer on each process (`target.sharded`)
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.distill.quantization import quantize
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import layers_of
from draftsmith.heads.model_config import rotary_switch

if TYPE_CHECKING:  # sampling imports the whole decoder, which only some recipes need
    from draftsmith.distill.regeneration import Share


class Plain:
    """Each process has the whole target; other placements override what differs."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._device = accelerator, accelerator.device

    @property
    def load_to(self) -> torch.device:
        """Device to load the target to; `place` distributes it from there."""
        return self._device

    def place(self, model: PreTrainedModel) -> None:
        """Distribute the layers; embeddings, norms and lm_head, which drafters read, stay whole on the device.

        Raises:
            ConfigError: for a target that cannot be placed in this way.
        """

    @property
    def share(self) -> "Share":
        """This process's share of work for which processes run the target by themselves."""
        from draftsmith.distill.regeneration import Share

        return Share(self._accelerator.process_index, self._accelerator.num_processes, self.meet)

    def meet(self) -> None:
        """Wait for all processes; those that wait take part in the forward passes of the others where needed."""
        self._accelerator.wait_for_everyone()


def decoder_layers(model: PreTrainedModel, key: str) -> nn.ModuleList:
    """Return the layers of a decoder-only target; ConfigError naming `key` for other targets and quantised weights."""
    layers = getattr(model.base_model, "layers", getattr(model.base_model, "h", None))
    floating = all(weight.is_floating_point() for weight in model.parameters())
    if model.config.is_encoder_decoder or not isinstance(layers, nn.ModuleList) or not floating:
        raise ConfigError(
            f"target.{key}=True with {type(model).__name__}; expected a decoder-only model with a list of layers "
            "and floating-point weights"
        )
    return layers


def move_the_rest(model: PreTrainedModel, layers: list[nn.Module], device: torch.device) -> None:
    """Move everything outside of `layers` to `device`."""
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        if module in inside:
            continue
        for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            value.data = value.data.to(device)


class Offloaded(Plain):
    """The layers stay in host memory."""

    @property
    def load_to(self) -> torch.device:
        return torch.device("cpu")

    def place(self, model: PreTrainedModel) -> None:
        decoder_layers(model, "offload")
        offload(model, self._device)


def offload(model: PreTrainedModel, device: torch.device) -> None:
    """Copy each layer of `model`, which is in host memory, to `device` while it computes."""
    layers = layers_of(model)
    move_the_rest(model, layers, device)
    for layer in layers:
        cpu_offload(layer, device)


class Quantized(Plain):
    """The layers are loaded to host memory, and quantized one by one on the device."""

    def __init__(self, accelerator: Accelerator, kind: str) -> None:
        super().__init__(accelerator)
        self._kind = kind

    @property
    def load_to(self) -> torch.device:
        return torch.device("cpu")

    def place(self, model: PreTrainedModel) -> None:
        quantize(model, self._kind, self._device)
        move_the_rest(model, layers_of(model), self._device)


class Sharded(Plain):
    """Each process has a shard of each layer, which is gathered while the layer computes.

    Gathering is a collective operation. In training steps all processes run the target together. In sampling, caching
    and evaluation each process runs it for its own share. So every forward pass begins with a count of the processes
    that compute, and processes that wait in `meet` take part until there are none.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._layers: list[FSDPModule] = []

    @property
    def load_to(self) -> torch.device:
        return torch.device("cpu")

    def place(self, model: PreTrainedModel) -> None:
        if (switch := rotary_switch(model.config)) is not None:
            raise ConfigError(
                f"target.sharded=True with rotary frequencies that change at {switch}: processes would read texts in "
                "different numbers of passes; expected target.sharded=false"
            )
        mesh = init_device_mesh(self._device.type, (self._accelerator.num_processes,))
        for layer in decoder_layers(model, "sharded"):
            # By default FSDP does not re-shard the outermost module.
            self._layers.append(fully_shard(layer, mesh=mesh, reshard_after_forward=True))
        nn.Module.to(model, self._device)
        self._gather_all()  # outside of inference mode, which would make the buffers unusable outside of it
        model.base_model.register_forward_pre_hook(self._announce)

    def meet(self) -> None:
        while self._layers and self._count(here=False):
            self._gather_all()
        super().meet()

    def _announce(self, *_: object) -> None:
        self._count(here=True)

    def _count(self, here: bool) -> int:
        """Return the number of processes about to run the target; `here`: this one is."""
        count = torch.tensor(float(here), device=self._device)
        dist.all_reduce(count)
        return int(count)

    def _gather_all(self) -> None:
        for layer in self._layers:
            layer.unshard()
            layer.reshard()


def placement_of(settings: TargetSection, accelerator: Accelerator) -> Plain:
    """Return the placement that the recipe's section `target` asks for, which names at most one."""
    if settings.offload:
        return Offloaded(accelerator)
    if settings.quantization is not None:
        return Quantized(accelerator, settings.quantization)
    if settings.sharded and accelerator.num_processes > 1:
        return Sharded(accelerator)
    return Plain(accelerator)
