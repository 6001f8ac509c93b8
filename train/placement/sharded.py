"""The target's layers in shards over all processes (FSDP2)."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import rotary_switch
from draftsmith.train.placement.plain import Plain, decoder_layers


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
