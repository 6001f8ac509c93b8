"""Where the frozen target lies: whole on every process; its layers in the host's memory, from which each is moved to
the device while it computes (`target.offload`); or its layers in shards over all processes (`target.sharded`).

A sharded layer is gathered for as long as it computes, which every process has to take part in. Training steps do it
together. Sampling, caching states and evaluation are done by each process on its own, for as long as its share takes;
so every forward pass begins with a count of who computes, and whoever waits in `meet` gathers along until nobody does.
"""

import torch
from accelerate import Accelerator, cpu_offload
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.provenance import model_fingerprints
from draftsmith.train.recipe import Recipe


class Placement:
    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        """Whole until `place` is called.

        Raises:
            ConfigError: for a recipe whose target cannot be sharded.
        """
        if recipe.target.sharded and recipe.cotrain is not None:
            raise ConfigError(
                "target.sharded=True with cotrain; expected false: adapters are trained inside the target"
            )
        if recipe.target.offload and (recipe.target.sharded or recipe.cotrain is not None):
            other = "target.sharded=True" if recipe.target.sharded else "cotrain"
            raise ConfigError(f"target.offload=True with {other}; expected one of the two")
        self._accelerator, self._offload = accelerator, recipe.target.offload
        self._sharded = recipe.target.sharded and accelerator.num_processes > 1
        self._layers: list[nn.Module] = []

    @property
    def load_to(self) -> torch.device:
        """The device that the target is loaded to; it moves on from there."""
        return torch.device("cpu") if self._sharded or self._offload else self._accelerator.device

    def place(self, target: LoadedTarget) -> None:
        """Put the layers where the recipe wants them; embeddings, norms and lm_head, which drafters read, stay whole.

        Shards need several processes; one has all of it.

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
        model.draftsmith_fingerprints = model_fingerprints(model)  # as long as all of it is here
        if self._offload:
            self._put_off(model, layers)
        else:
            self._shard(model, layers)

    def _put_off(self, model: nn.Module, layers: nn.ModuleList) -> None:
        device, inside = self._accelerator.device, set(layers.modules())
        for module in model.modules():
            if module in inside:
                continue
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                value.data = value.data.to(device)
        for layer in layers:
            cpu_offload(layer, device)

    def _shard(self, model: nn.Module, layers: nn.ModuleList) -> None:
        device = self._accelerator.device
        mesh = init_device_mesh(device.type, (self._accelerator.num_processes,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # by default the outermost module is not
        model.to(device)
        self._layers = list(layers)
        self._gather_all()  # outside of inference mode, or what is gathered into could not be used outside of it
        model.base_model.register_forward_pre_hook(self._announce)

    def meet(self) -> None:
        """Wait for all processes, and gather layers with those that still compute."""
        while self._layers and self._count(here=False):
            self._gather_all()
        self._accelerator.wait_for_everyone()

    def _announce(self, *_: object) -> None:
        self._count(here=True)

    def _count(self, here: bool) -> Tensor:
        """How many processes are about to run the target, this one among them or not."""
        count = torch.tensor(float(here), device=self._accelerator.device)
        torch.distributed.all_reduce(count)
        return count

    def _gather_all(self) -> None:
        for layer in self._layers:
            layer.unshard()
            layer.reshard()
