"""The whole target on the device of each process, and the interface of all placements."""

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError

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
