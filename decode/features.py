"""What a target's layers put out during a forward pass, for drafters that read more than its final state."""

import weakref

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.draft_model import layers_name
from draftsmith.heads.drafter import FINAL

# Shapes: B rows, Q tokens fed, F features a position.


class Features:
    """Keeps the outputs of chosen layers of each pass, at no cost, as long as it lives.

    Args:
        layers: see `Needs.layers`.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...]) -> None:
        require_layers(model, layers)
        self._layers = layers
        self._seen: dict[int, Tensor] = {}
        blocks = model.get_submodule(layers_name(model)) if set(layers) - {FINAL} else []
        for layer in set(layers):
            module = model.base_model if layer == FINAL else blocks[layer - 1]
            weakref.finalize(self, module.register_forward_hook(_keeping(self._seen, layer)).remove)

    def take(self) -> Tensor:
        """[B, Q, F] of the last pass, the layers side by side in the order that was asked for."""
        return torch.cat([self._seen[layer] for layer in self._layers], -1)


def _keeping(seen: dict[int, Tensor], layer: int) -> object:
    def keep(_: nn.Module, arguments: tuple, output: object) -> None:
        state = getattr(output, "last_hidden_state", output)
        seen[layer] = state[0] if isinstance(state, tuple) else state

    return keep


def require_layers(model: nn.Module, layers: tuple[int, ...]) -> None:
    """ConfigError unless `model` is decoder-only and has these layers."""
    if not layers:
        return
    if model.config.is_encoder_decoder:
        raise ConfigError(f"model_type={model.config.model_type!r}; expected a decoder-only target for these features")
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    wrong = [layer for layer in layers if layer != FINAL and not 1 <= layer <= depth]
    if wrong:
        raise ConfigError.of("drafter layers", list(layers), f"1 to {depth}, which is what the target has")
