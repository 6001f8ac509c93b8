"""The target's layers in host memory, each copied to the device while it computes."""

import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from draftsmith.heads.hidden_states import layers_of
from draftsmith.train.placement.plain import Plain, decoder_layers, move_the_rest


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
