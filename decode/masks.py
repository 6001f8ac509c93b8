"""Attention masks for chains, trees and rows of different length, with or without sliding windows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.errors import ConfigError

# Shapes: B rows, Q tokens fed, S slots of the cache.


@dataclass(frozen=True)
class Attention:
    """The kinds of attention layers of a model, and the form in which it accepts a custom mask."""

    window: int | None
    """Number of tokens that sliding layers attend to, including the query; None without such layers."""
    mixed: bool
    """The model has sliding and full layers, and takes one mask for each kind."""
    additive: bool
    """The mask is added to the attention scores (eager) instead of bool (sdpa)."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Attention":
        """Read the values from a model's text config; ConfigError for implementations without custom masks."""
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ConfigError(
                f"attn_implementation={implementation!r}; expected 'sdpa' or 'eager': others take no tree mask"
            )
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        slides = window is not None and ("sliding_attention" in kinds if kinds else _all_slide(config))
        return cls(
            window=window if slides else None,
            mixed=slides and kinds is not None and "full_attention" in kinds,
            additive=implementation == "eager",
        )

    def prepared(self, visible_BQS: Tensor, positions_BQ: Tensor, positions_BS: Tensor, dtype: torch.dtype) -> Any:
        """Return the `attention_mask` argument: [B, 1, Q, S], or one mask for each kind of layer.

        `visible_BQS`, bool: the slots that each query attends to before the window is applied. Positions count the
        tokens from the start of the text.
        """
        full = self.plain(visible_BQS, dtype)
        if self.window is None:
            return full
        near_BQS = positions_BQ[:, :, None] - positions_BS[:, None] < self.window
        sliding = self.plain(visible_BQS & near_BQS, dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding

    def plain(self, mask_BQS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, 1, Q, S] in the model's form; valid for all layers while no window is exceeded."""
        mask = mask_BQS[:, None]
        if not self.additive:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _all_slide(config: PreTrainedConfig) -> bool:
    """Return whether all layers slide in a config without `layer_types`: unless `use_sliding_window` is False."""
    return getattr(config, "use_sliding_window", True)


def chain_mask(start: int, count: int, device: torch.device) -> Tensor:
    """Return the causal mask of `count` tokens after `start` visible ones: bool [1, count, start + count]."""
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril_(start)[None]
