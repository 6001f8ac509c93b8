"""What each token may look at: bool masks for chains, trees and rows of different length, sliding windows included."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.errors import ConfigError

# Shapes: B rows, Q tokens fed, S slots of the cache.


@dataclass(frozen=True)
class Attention:
    """How a model's layers attend, and the form in which it takes a mask of our own."""

    window: int | None
    """Tokens that sliding layers see, the query itself included; None without such layers."""
    mixed: bool
    """Some layers slide and some see everything: the model takes one mask for each kind."""
    additive: bool
    """Eager attention adds the mask to the scores; sdpa takes bool."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Attention":
        """Read it off a model's text config; ConfigError for an implementation that takes no masks of ours."""
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
        """The `attention_mask` argument: [B, 1, Q, S], or one for each kind of layer.

        `visible_BQS` bool: what a query may look at but for the window; positions in tokens from the text's start.
        """
        full = self.plain(visible_BQS, dtype)
        if self.window is None:
            return full
        near_BQS = positions_BQ[:, :, None] - positions_BS[:, None] < self.window
        sliding = self.plain(visible_BQS & near_BQS, dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self.mixed else sliding

    def plain(self, mask_BQS: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, S] in the form that the attention takes; right for every layer while no window is full."""
        mask = mask_BQS[:, None]
        if not self.additive:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _all_slide(config: PreTrainedConfig) -> bool:
    """Configs without `layer_types`: every layer slides, unless the model says that it does not use its window."""
    return getattr(config, "use_sliding_window", True)


def chain_mask(start: int, count: int, device: torch.device) -> Tensor:
    """[1, count, start + count] bool: `count` tokens in a row behind `start` that they all see."""
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril_(start)[None]
