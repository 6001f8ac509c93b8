"""Self-speculation: the target's own first layers and its lm_head, as a draft model without a weight of its own.

    committed tokens ──▶ layer 1 … layer k ──▶ norm ──▶ lm_head ──▶ d1 ──▶ d2 ──▶ …

How well that agrees depends on the target; models trained for early exit (LayerSkip, Elhoushi et al. 2024,
arXiv:2404.16710) agree far better than others.
"""

from copy import copy, deepcopy
from typing import ClassVar

from torch import nn

from draftsmith.errors import ConfigError
from draftsmith.heads.draft_model import DraftModel, layers_name


class EarlyExit(DraftModel):
    """A draft model that shares the target's modules; only the list of layers is shorter."""

    type: ClassVar[str] = "early-exit"

    def __init__(self, target: nn.Module, *, layers: int | None = None) -> None:
        if target.config.is_encoder_decoder:
            raise ConfigError(f"model_type={target.config.model_type!r}; expected a decoder-only target for early exit")
        depth = target.config.num_hidden_layers
        layers = max(1, depth // 4) if layers is None else layers
        if not 1 <= layers < depth:
            raise ConfigError.of("layers", layers, f"1 to {depth - 1}, fewer than the target has")
        super().__init__(first_layers(target, layers))
        self.layers = layers


def first_layers(target: nn.Module, count: int) -> nn.Module:
    """`target` with its first `count` layers only. Every module below is the target's own, not a copy."""
    config = deepcopy(target.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    return _shortened(target, layers_name(target).split("."), config, count)


def _shortened(module: nn.Module, path: list[str], config: object, count: int) -> nn.Module:
    """A shallow copy of `module` in which the list of layers at `path` ends after `count`."""
    if not path:
        return nn.ModuleList(list(module)[:count])
    clone = copy(module)
    clone._modules = dict(module._modules)
    if "config" in clone.__dict__:
        clone.config = config
    clone._modules[path[0]] = _shortened(module._modules[path[0]], path[1:], config, count)
    return clone
