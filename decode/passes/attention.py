"""Attention of verification passes: causal without a mask for chains, and key/value heads that are never expanded.

transformers' sdpa function expands grouped key/value heads whenever it is given a mask, and a pass over several draft
tokens after a cache needs a mask there. `attend` is registered beside it and used by the models' attention layers while
this package runs a pass: `Implementation` changes the name in the model's configs and changes it back.

    query  [B, K * G, Q, D]  ->  [B, K, G * Q, D]     the G query heads of a key/value head become more queries of it
    key    [B, K, S, D]                               as the cache holds it
"""

from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.heads.model_config import SPECIAL_ATTENTION, text_config

# Shapes: B rows, K key/value heads, G query heads for each of them, Q queries, S slots, D head size.

GROUPED = "draftsmith"
"""Name of `attend` among the attention implementations of transformers."""
MOST_GROUPED = 128
"""Most queries that are grouped; beyond, the repeated mask costs more than the expanded keys and values."""

Passes = Literal["grouped", "masked", "native", "copied", "whole"]
"""How a model is run: with `attend` and the decoder's masks; with transformers' own attention function and the
decoder's masks; or as in `generate`, with masks that the model makes itself, which suits chains only. Of the latter,
"native" has the decoder's cache, "copied" the model's own, see `Reread`, and "whole" none."""
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
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output [B, Q, K * G, D], like transformers' sdpa function, without expanded heads.

    The mask may be a `chain_marker`, or that of the last slots only; no query sees the slots before them.
    """
    (B, heads, Q, _), (_, K, S, _) = query.shape, key.shape
    mask, is_chain = attention_mask, attention_mask is not None and attention_mask.shape[-1] == 0
    plain = query.device.type in ("cpu", "cuda")
    for name in SPECIAL_ATTENTION:  # in every layer of every pass, so not `all` of a generator
        plain = plain and kwargs.get(name) is None
    if is_chain and plain and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # FlashAttention aligns its causal mask with the last key and reads grouped heads.
        bias = causal_lower_right(Q, S)
        out = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=heads > K)
        return out.transpose(1, 2).contiguous(), None
    if is_chain:
        build = _lower_right if torch.compiler.is_compiling() else _same_lower_right
        mask = build(Q, S, query.dtype, query.device)
    elif mask is not None and mask.shape[-1] < S:
        key, value = (x[:, :, S - mask.shape[-1] :] for x in (key, value))
    if (mask is None and Q > 1) or not plain or Q > MOST_GROUPED:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    if heads > K:
        query = query.reshape(B, K, -1, query.shape[-1])
        mask = None if mask is None else mask.repeat(1, 1, heads // K, 1)
    out = scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
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
