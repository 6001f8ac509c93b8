"""Attention of verification passes: masks, none for chains, and key/value heads that are never expanded.

transformers' sdpa function expands grouped key/value heads whenever it is given a mask, and a pass over several draft
tokens after a cache needs a mask there. `attend` is registered beside it and used by the models' attention layers while
this package runs a pass: `implementation` changes the name in the model's configs and changes it back.

    query  [B, K * G, Q, D]  ->  [B, K, G * Q, D]     the G query heads of a key/value head become more queries of it
    key    [B, K, S, D]                               as the cache holds it
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Parents
from draftsmith.heads.model_config import NO_CONTEXT, SPECIAL_ATTENTION, configs_of, implementation, text_config
from draftsmith.heads.rows import Counts, upload

# Shapes: B rows, K key/value heads, G query heads for each of them, Q queries, S slots, D head size.

GROUPED = "draftsmith"
"""Name of `attend` among the attention implementations of transformers."""
MOST_GROUPED = 128
"""Most queries that are grouped; beyond, the repeated mask costs more than the expanded keys and values."""

Passes = Literal["grouped", "masked", "native", "copied"]
"""How a model is run: with `attend` and the decoder's masks; with transformers' own attention function and the
decoder's masks; or as in `generate`, with masks that the model makes itself, which suits chains only. Of the latter,
"native" has the decoder's cache, and "copied" the model's own, see `RecomputingPasses`."""
WITH_ROLLBACK: tuple[Passes, ...] = ("grouped", "masked", "native")
"""Those with the decoder's cache."""
_PASSES: "WeakKeyDictionary[PreTrainedModel, Passes]" = WeakKeyDictionary()


def chain_marker(width: int, device: torch.device) -> Tensor:
    """Return a mask without columns, [1, 1, Q, 0]: for `attend`, each query sees all slots up to its own.

    The queries are the last slots. Other functions raise an error for such a mask, where None would give wrong scores.
    """
    return torch.empty(1, 1, width, 0, dtype=torch.bool, device=device)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output [B, Q, K * G, D], like transformers' sdpa function, without expanded heads.

    The mask may be a `chain_marker`, or that of the last slots only; no query sees the slots before them.
    """
    (B, heads, Q, _), (_, K, S, _) = query.shape, key.shape
    mask, is_chain = attention_mask, attention_mask is not None and attention_mask.shape[-1] == 0
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    plain = query.device.type in ("cpu", "cuda")
    for name in SPECIAL_ATTENTION:  # in every layer of every pass, so not `all` of a generator
        plain = plain and options.get(name) is None
    if is_chain and plain and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # FlashAttention aligns its causal mask with the last key and reads grouped heads.
        bias = causal_lower_right(Q, S)
        out = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale, enable_gqa=heads > K)
        return out.transpose(1, 2).contiguous(), None
    if is_chain:
        build = _lower_right if torch.compiler.is_compiling() else _same_lower_right
        mask = build(Q, S, query.dtype, query.device)
    elif mask is not None and mask.shape[-1] < S:
        key, value = (x[:, :, S - mask.shape[-1] :] for x in (key, value))
    if (mask is None and Q > 1) or not plain or Q > MOST_GROUPED:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if heads > K:
        query = query.reshape(B, K, -1, query.shape[-1])
        mask = None if mask is None else mask.repeat(1, 1, heads // K, 1)
    out = scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    if heads > K:
        out = out.reshape(B, heads, Q, -1)
    return out.transpose(1, 2).contiguous(), None


def _lower_right(width: int, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [1, 1, Q, S] of a chain; only its last Q columns mask anything."""
    mask_QS = torch.zeros(width, slots, dtype=dtype, device=device)
    mask_QS[:, slots - width :] = torch.full((width, width), -torch.inf, dtype=dtype, device=device).triu_(1)
    return mask_QS[None, None]


_same_lower_right = lru_cache(maxsize=1)(_lower_right)
"""All layers of a pass use the same; a compiled graph computes it once, and dynamo warns of a cache."""


AttentionInterface.register(GROUPED, attend)
AttentionMaskInterface.register(GROUPED, sdpa_mask)  # as with sdpa, for callers outside this package


def passes_of(model: PreTrainedModel) -> Passes:
    """Return the attention of `model`: that of `run_with`, else grouped where layers choose a function by name."""
    chosen = _PASSES.get(model, "grouped")
    # An indexer's choice becomes a mask only with transformers' own functions; `attend` would not be told of it.
    indexed = "indexed_attention" in (getattr(text_config(model), "layer_types", None) or ())
    if chosen == "grouped" and (indexed or not getattr(model, "_supports_attention_backend", False)):
        return "masked"
    return chosen


def run_with(model: PreTrainedModel, passes: Passes) -> None:
    """Run `model` this way from now on."""
    _PASSES[model] = passes


# Masks for chains, trees and rows of different length, with or without sliding windows.

FULL = frozenset({"full_attention", "hybrid", "indexed_attention"})
SLIDING = frozenset({"sliding_attention", "hybrid_sliding", "chunked_attention"})
"""Layer types of transformers that attend to all tokens, and to those in a window or chunk."""


@dataclass(frozen=True)
class Attention:
    """The kinds of attention layers of a model, and the form in which it accepts a custom mask."""

    window: int | None
    """Number of tokens that sliding layers attend to, including the query, or of a chunk; None without such layers."""
    chunked: bool
    """Windows are chunks of the text, whose tokens attend to each other (Llama 4)."""
    mixed: bool
    """The model has sliding and full layers, and takes one mask for each kind."""
    chains: str
    """Implementation of passes over chains after equally many tokens, without a mask where it needs none."""
    masked: str
    """Implementation of all other passes."""
    own: str
    """The model's own implementation."""
    configs: tuple[dict[str, Any], ...]
    """The attributes of the configs that name it."""
    native: bool
    """The model makes masks and positions itself; see `Passes`."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Attention":
        """Read the values from a model; ConfigError for an implementation that takes no mask and is no flash attention.

        A model with flash attention keeps it for chains. Passes with a mask use sdpa instead, or eager for a model that
        sdpa does not compute.
        """
        config = model.config.get_text_config(decoder=True)
        own = str(config._attn_implementation)
        if own not in ("eager", "sdpa") and not is_flash(own):
            raise ConfigError(f"attn_implementation={own!r}; expected sdpa, eager or flash attention")
        passes = passes_of(model)
        grouped = GROUPED if passes == "grouped" else "sdpa"
        native = passes not in ("grouped", "masked")
        if native or own == "eager":
            chains = masked = own
        elif own == "sdpa":
            chains = masked = "sdpa" if model.config.is_encoder_decoder else grouped
        else:
            capped = getattr(config, "attn_logit_softcapping", None)
            chains, masked = own, grouped if model._supports_sdpa and not capped else "eager"
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if window is not None and type(window) is not int:  # transformers checks it only where the family has one
            raise ConfigError.of("sliding_window", window, "a number of tokens in the model's config")
        chunked = "chunked_attention" in (kinds or ())
        if chunked:
            window, chains = config.attention_chunk_size, masked  # flash attention would ignore chunks
        # All layers slide in a config without `layer_types`, unless `use_sliding_window` is False.
        some_slide = not SLIDING.isdisjoint(kinds) if kinds else getattr(config, "use_sliding_window", True)
        slides = window is not None and some_slide
        mixed = slides and kinds is not None and not FULL.isdisjoint(kinds)
        configs = tuple(map(vars, configs_of(model, own))) if {chains, masked} != {own} else ()
        return cls(window if slides else None, chunked, mixed, chains, masked, own, configs, native)

    @cached_property
    def is_flash(self) -> bool:
        """Chains are read with flash attention, which applies the window of sliding layers itself."""
        return is_flash(self.chains)

    def running(self, *, chain: bool) -> AbstractContextManager[None]:
        """Return a context in which the model's layers use the implementation for this kind of pass."""
        name = self.chains if chain else self.masked
        return NO_CONTEXT if name == self.own else implementation(self.configs, name)

    @cached_property
    def slides_alone(self) -> bool:
        """`chain` needs no mask over all slots where a window is exceeded."""
        return self.native or (not self.chunked and (self.is_flash or self.chains == GROUPED))

    def chain(self, start: int, width: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the `attention_mask` argument of a chain of `width` tokens after `start` ones in each row."""
        if self.native:
            return None
        if start == 0 or width == 1 or self.is_flash:
            full = None
        elif self.chains == GROUPED:
            full = chain_marker(width, device)
        else:
            full = self.plain(chain_mask(start, width, device), dtype)
        if self.is_flash or self.window is None or start + width <= self.window:
            return full
        slots = min(start + width, self.window + width - 1)  # those before are seen by no query
        near_QS = torch.ones(width, slots, dtype=torch.bool, device=device).tril_(slots - width)
        sliding = near_QS.triu_(slots - width - self.window + 1)[None, None]
        return _by_kind(full, sliding) if self.mixed else sliding

    def prepared(self, visible_BQS: Tensor, positions_BQ: Tensor, positions_BS: Tensor, dtype: torch.dtype) -> Any:
        """Return the `attention_mask` argument: [B, 1, Q, S], or one mask for each kind of layer.

        `visible_BQS`, bool: the slots that each query attends to before the window is applied. Positions count the
        tokens from the start of the text.
        """
        full = self.plain(visible_BQS, dtype)
        if self.window is None:
            return full
        query_BQ1, key_B1S = positions_BQ[:, :, None], positions_BS[:, None]
        if self.chunked:
            near_BQS = query_BQ1 // self.window == key_B1S // self.window
        else:
            near_BQS = query_BQ1 - key_B1S < self.window
        near = self.plain(visible_BQS & near_BQS, dtype)
        return _by_kind(full, near) if self.mixed else near

    def of_rows(self, mask: Any, rows: int) -> Any:
        """Return the `attention_mask` argument with a row for each sequence, which some layers require (XGLM).

        `attend` takes one mask for all rows, and repeats it for grouped heads.
        """
        if isinstance(mask, dict):
            return {kind: self.of_rows(of_kind, rows) for kind, of_kind in mask.items()}
        return mask if mask is None or self.masked == GROUPED else mask.expand(rows, -1, -1, -1)

    def plain(self, mask_BQS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, 1, Q, S] in the model's form; valid for all layers while no window is exceeded."""
        mask = mask_BQS[:, None]
        if self.masked != "eager":
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def is_flash(name: str) -> bool:
    """Return whether an attention implementation is flash attention, from a package or from the Hub's kernels."""
    return "flash" in name


def _by_kind(full: Any, sliding: Any) -> dict[str, Any]:
    """Return the masks by layer type; recurrent and convolution layers have none."""
    masks = {"linear_attention": None, "conv": None}
    return {**masks, **dict.fromkeys(FULL, full), **dict.fromkeys(SLIDING, sliding)}


def chain_mask(start: int, count: int, device: torch.device) -> Tensor:
    """Return the causal mask of `count` tokens after `start` visible ones: bool [1, count, start + count]."""
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril_(start)[None]


def chains_after(starts: Counts, width: int, end: int) -> Tensor:
    """Return the mask [B, Q, S] of chains after different numbers of committed tokens, up to slot `end`: bool."""
    start_B11 = starts.on_device_B[:, None, None]
    query_Q1 = torch.arange(width, device=starts.device)[:, None]
    return torch.arange(end, device=starts.device) <= start_B11 + query_Q1


def trees(shapes: Sequence[Parents], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the masks [B, width, width] of roots and draft nodes, and their depths [B, width], from one upload.

    Each node attends to its own path: bool. The depth of a root is 1, like that of padding.
    """
    masks = np.zeros((len(shapes), width, width), dtype=bool)
    for mask, parents in zip(masks, shapes, strict=True):
        mask[range(len(parents) + 1), range(len(parents) + 1)] = True
        for node, parent in enumerate(parents):
            mask[node + 1] |= mask[parent + 1]
    masks_BQQ = upload(torch.from_numpy(masks), device)
    return masks_BQQ, masks_BQQ.sum(-1).clamp_min(1)


@lru_cache(maxsize=1024)
def tree(parents: Parents, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mask [1, N + 1, N + 1] and the depths of one tree, which many rounds may share."""
    return trees([parents], len(parents) + 1, device)
