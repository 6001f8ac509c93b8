"""A transformers KV cache with preallocated storage, whose end is a number that can be moved back."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import ConfigError


class PointerLayer(CacheLayerMixin):
    """One layer's keys and values, [B, heads, max_length, head_dim], the first `length` of them valid."""

    is_sliding = False
    is_croppable = True

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(B, heads, self.max_length, head_dim)
        self.values = value_states.new_empty(B, value_states.shape[1], self.max_length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind the valid positions, in place; return views of all that is valid now."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length

    def crop(self, max_length: int) -> None:
        self.length = min(self.length, max_length)


class PointerCache(Cache):
    """A cache that appends in place and rolls back by moving one number per layer.

    transformers' `DynamicCache` copies all keys and values at every step; this one copies only the new ones.
    """

    def __init__(self, config: PreTrainedConfig, max_length: int) -> None:
        text_config = config.get_text_config(decoder=True)
        refuse_unsupported_attention(text_config, max_length)
        super().__init__(layers=[PointerLayer(max_length) for _ in range(text_config.num_hidden_layers)])

    @property
    def length(self) -> int:
        """Valid positions."""
        return self.layers[0].length

    def rollback(self, length: int) -> None:
        """Forget positions from `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)


def refuse_unsupported_attention(config: PreTrainedConfig, max_length: int) -> None:
    """ConfigError for a model whose layers do not all see the whole text, which this cache assumes."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = layer_types - {"full_attention", "sliding_attention"}
    if others:
        raise ConfigError(
            f"model_type={config.model_type!r} has layers of type {sorted(others)}; expected full attention only"
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types if hasattr(config, "layer_types") else window is not None
    if slides and window is not None and window < max_length:
        raise ConfigError(
            f"model_type={config.model_type!r} attends to a sliding window of {window} tokens, fewer than the "
            f"{max_length} of prompt + max_new_tokens; expected a text that fits the window"
        )


def causal_mask(start: int, count: int, device: torch.device) -> Tensor | None:
    """[1, 1, count, start + count] bool, True where a query may look, for `count` tokens behind `start` cached ones.

    None for a single token, which sees everything, and for a prefill, where transformers needs no mask either.
    Otherwise transformers would build this mask by itself in every forward, which costs as much as a small layer.
    """
    if count == 1 or start == 0:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril_(start)[None, None]


def context_limit(model: nn.Module) -> int | None:
    """The most positions that `model` was built for; None when its config names no limit."""
    config = model.config.get_text_config(decoder=True)
    for key in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, key, None)
        if limit:
            return int(limit)
    return None
