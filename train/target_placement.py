"""Where the frozen target is stored: whole on every process; its layers in host memory, each copied to the device
while it computes (`target.offload`); or its layers sharded over all processes (`target.sharded`).

A sharded layer is gathered while it computes, which is a collective operation. In training steps all processes run the
target together. In sampling, caching and evaluation each process runs it for its own share. So every forward pass
begins with a count of the processes that compute, and processes that wait in `meet` take part until there are none.
"""

import torch
from accelerate import Accelerator, cpu_offload
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.provenance import model_fingerprints
from draftsmith.train.recipe import Recipe


class Placement:
    """Places the target's layers as the recipe says; the target is whole until `place` is called."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        self._accelerator, self._offload = accelerator, recipe.target.offload
        self._sharded = recipe.target.sharded and accelerator.num_processes > 1
        self._layers: list[FSDPModule] = []

    @property
    def load_to(self) -> torch.device:
        """Device to load the target to; `place` distributes it from there."""
        return torch.device("cpu") if self._sharded or self._offload else self._accelerator.device

    def place(self, target: LoadedTarget) -> None:
        """Distribute the layers; embeddings, norms and lm_head, which drafters read, stay whole on the device.

        Sharding needs several processes; with one, the target stays whole.

        Raises:
            ConfigError: for a target without a list of layers, or quantised weights.
        """
        if not self._sharded and not self._offload:
            return
        model = target.model
        layers = getattr(model.base_model, "layers", getattr(model.base_model, "h", None))
        plain = all(weight.is_floating_point() for weight in model.parameters())
        if model.config.is_encoder_decoder or not isinstance(layers, nn.ModuleList) or not plain:
            key = "offload" if self._offload else "sharded"
            raise ConfigError(
                f"target.{key}=True with {type(model).__name__}; expected a decoder-only model with a list of layers "
                "and floating-point weights"
            )
        vars(model)["draftsmith_fingerprints"] = model_fingerprints(model)  # while all weights are here
        if self._offload:
            self._offload_layers(model, layers)
        else:
            self._shard(model, layers)

    def _offload_layers(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        device, inside = self._accelerator.device, set(layers.modules())
        for module in model.modules():
            if module in inside:
                continue
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                value.data = value.data.to(device)
        for layer in layers:
            cpu_offload(layer, device)

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

    def _count(self, here: bool) -> Tensor:
        """Return the number of processes about to run the target; `here`: this one is."""
        count = torch.tensor(float(here), device=self._accelerator.device)
        torch.distributed.all_reduce(count)
        return count

    def _gather_all(self) -> None:
        for layer in self._layers:
            layer.unshard()
            layer.reshard()
