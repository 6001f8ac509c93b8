"""T5's relative position bias for trees and ragged rows.

A T5 layer derives the distance between two tokens from their places in the cache. Siblings of a tree stand side by
side there although they have the same position in the text, so the bias is computed here from true positions and
handed to the layer through its own `position_bias` argument.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from draftsmith.errors import ConfigError


def biased_layers(decoder: nn.Module) -> list[nn.Module]:
    """Self-attention layers that own a table of relative biases; T5 has one. ConfigError for layers unlike T5's."""
    layers = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
    for layer in layers:
        takes = inspect.signature(layer.forward).parameters
        if "position_bias" not in takes or "bidirectional" not in inspect.signature(_bucket(layer)).parameters:
            raise ConfigError(
                f"model_type={decoder.config.model_type!r} computes its relative positions from places in the cache; "
                "expected layers that take a position_bias, as T5's do"
            )
    return layers


def _bucket(layer: nn.Module) -> Callable[..., Tensor]:
    return layer._relative_position_bucket


@contextmanager
def true_positions(layers: list[nn.Module], positions_BQ: Tensor, positions_BS: Tensor) -> Iterator[None]:
    """While it is open, `layers` see tokens where `positions_BQ` and `positions_BS` say that they are."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs["position_bias"] = _bias(layer, positions_BS[:, None] - positions_BQ[:, :, None])
        return args, kwargs

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bias(layer: nn.Module, distance_BQS: Tensor) -> Tensor:
    """[B, heads, Q, S] from the layer's own buckets and table."""
    buckets_BQS = _bucket(layer)(
        distance_BQS,
        bidirectional=False,
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
    )
    return layer.relative_attention_bias(buckets_BQS).permute(0, 3, 1, 2)
