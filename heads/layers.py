"""The decoder layer of drafter networks, and its attention in decoding."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    rotate_half,
)

from draftsmith.errors import ConfigError
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import layer_value, text_config

# Shapes: B rows, T tokens read, S keys, h heads, d head size, H hidden size, A = h * d.

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary positions."""


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer, queries, keys, values), each [B, h, T, d], to the output [B, h, T, d].

It stores or reads keys and values, and applies the mask; keys and values may have fewer heads than queries."""


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """Return for each layer the number of positions that it attends to, its own included; None: all of them.

    ConfigError for other kinds of layers.
    """
    depth, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * depth
    if len(kinds) != depth or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise ConfigError.of(
            "layer_types", kinds, f"full_attention or sliding_attention for each of the {depth} layers"
        )
    if "sliding_attention" in kinds and (type(window) is not int or window < 1):
        raise ConfigError.of("sliding_window", window, "a number of tokens")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def cached_attention(cache: Any, masks: Tensor | Mapping[str, Tensor | None] | None, kinds: Sequence[str]) -> Attend:
    """Return the attention of decoding, with a transformers cache.

    Args:
        masks: bool [B, 1, T, S], or None for causal attention; a mapping has one for each type of layer.
        kinds: the type of each layer.
    """

    def attend(layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        k_BhSd, v_BhSd = cache.update(k_BhTd, v_BhTd, layer)
        mask = masks[kinds[layer]] if isinstance(masks, Mapping) else masks
        return attention(q_BhTd, k_BhSd, v_BhSd, mask, causal=mask is None and q_BhTd.shape[2] > 1)

    return attend


def attention(
    q_BhTd: Tensor,
    k_BhSd: Tensor,
    v_BhSd: Tensor,
    mask: Tensor | None,
    causal: bool = False,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Return scaled dot-product attention; keys and values may have fewer heads than queries.

    `sinks_h`: for each head a logit that takes part in the softmax and has no value.
    """
    scale, grouped = None, q_BhTd.shape[1] != k_BhSd.shape[1]
    if sinks_h is not None:
        scale = q_BhTd.shape[-1] ** -0.5
        # A key that only one more dimension of queries and keys sees; eight more, as kernels require.
        assert not causal, "a sink is seen by all"
        sink_B1Td = (sinks_h.to(q_BhTd.dtype) / scale)[:, None, None].expand(*q_BhTd.shape[:3], 1)
        q_BhTd = nn.functional.pad(torch.cat([q_BhTd, sink_B1Td], -1), (0, 7))
        k_BhSd = nn.functional.pad(k_BhSd, (0, 8, 0, 1))
        k_BhSd[..., -1, -8] = 1
        v_BhSd = nn.functional.pad(v_BhSd, (0, 8, 0, 1))
        mask = None if mask is None else nn.functional.pad(mask, (0, 1), value=True)
    out_BhTd = scaled_dot_product_attention(
        q_BhTd, k_BhSd, v_BhSd, mask, is_causal=causal, enable_gqa=grouped, scale=scale
    )
    return out_BhTd if sinks_h is None else out_BhTd[..., :-8]


class SelfAttention(nn.Module):
    """Rotary self-attention.

    Args:
        input_size: number of inputs; by default the hidden size.
        qk_norm: normalise queries and keys of each head (Qwen3).
        gated: multiply outputs by the sigmoid of gates; q_proj has each head's gates after its queries (Qwen3.5).
        centred: see `norm`.
        sinks: have `attention_sink_bias`, for each head the logit of a position whose value is zero. The function that
            attends reads it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        input_size: int | None = None,
        qk_norm: bool = False,
        gated: bool = False,
        centred: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        head_dim, key_heads = config.head_dim, config.num_key_value_heads
        assert head_dim is not None, "LlamaConfig sets it"
        assert key_heads is not None, "LlamaConfig sets it"
        self.layer, self.head_dim, self.gated = layer, head_dim, gated
        size, bias = input_size or config.hidden_size, config.attention_bias
        inner, outer = (count * head_dim for count in (config.num_attention_heads, key_heads))
        self.q_proj = nn.Linear(size, 2 * inner if gated else inner, bias=bias)
        self.k_proj = nn.Linear(size, outer, bias=bias)
        self.v_proj = nn.Linear(size, outer, bias=bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = norm(config, self.head_dim, centred=centred) if qk_norm else nn.Identity()
        self.k_norm = norm(config, self.head_dim, centred=centred) if qk_norm else nn.Identity()
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if sinks else None

    def forward(self, x_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | slice | None = None) -> Tensor:
        k_BhTd, v_BhTd = self.keys(x_BTH)
        if read_Q is None:
            q_BhTd, gate_BTA = self._queries(x_BTH)
            q_BhTd, k_BhTd = rotated(q_BhTd, k_BhTd, rope)
        else:
            q_BhTd, gate_BTA = self._queries(selected(x_BTH, read_Q))
            cos, sin = (selected(part, read_Q) for part in rope)
            q_BhTd, k_BhTd = turned(q_BhTd, (cos, sin)), turned(k_BhTd, rope)
        out_BTA = attend(self.layer, q_BhTd, k_BhTd, v_BhTd).transpose(1, 2).flatten(2)
        return self.o_proj(out_BTA if gate_BTA is None else out_BTA * gate_BTA.sigmoid())

    def _queries(self, x_BTH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries [B, h, T, d], not rotated yet, and where there are gates these [B, T, h * d]."""
        q_BTA, gate_BTA = self.q_proj(x_BTH), None
        if self.gated:
            q_BThd, gate_BThd = q_BTA.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
            q_BTA, gate_BTA = q_BThd.flatten(2), gate_BThd.flatten(2)
        return self.q_norm(self._heads(q_BTA)).transpose(1, 2), gate_BTA

    def keys(self, x_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, not rotated yet, and values, both [B, h, T, d]."""
        k_BThd, v_BThd = self.k_norm(self._heads(self.k_proj(x_BTH))), self._heads(self.v_proj(x_BTH))
        return k_BThd.transpose(1, 2), v_BThd.transpose(1, 2)

    def _heads(self, x_BTA: Tensor) -> Tensor:
        return x_BTA.unflatten(-1, (-1, self.head_dim))


def rotated(q_BhTd: Tensor, k_BhTd: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return queries and keys, of which the first values of each head, as many as `rope` has, are rotated."""
    turned = rope[0].shape[-1]
    if turned == q_BhTd.shape[-1]:
        return apply_rotary_pos_emb(q_BhTd, k_BhTd, *rope)
    q_BhTr, k_BhTr = apply_rotary_pos_emb(q_BhTd[..., :turned], k_BhTd[..., :turned], *rope)
    return torch.cat([q_BhTr, q_BhTd[..., turned:]], -1), torch.cat([k_BhTr, k_BhTd[..., turned:]], -1)


def turned(x_BhTd: Tensor, rope: Rope) -> Tensor:
    """Return queries or keys alone, rotated as `rotated` does."""
    cos_B1Tr, sin_B1Tr = (part[:, None] for part in rope)
    size = cos_B1Tr.shape[-1]
    x_BhTr = x_BhTd[..., :size]
    x_BhTr = x_BhTr * cos_B1Tr + rotate_half(x_BhTr) * sin_B1Tr
    return x_BhTr if size == x_BhTd.shape[-1] else torch.cat([x_BhTr, x_BhTd[..., size:]], -1)


def selected(x_BTH: Tensor, read_Q: Tensor | slice) -> Tensor:
    """Return the values [B, Q, H] of some positions; a view for a slice."""
    return x_BTH[:, read_Q] if isinstance(read_Q, slice) else x_BTH.index_select(1, read_Q)


class DecoderLayer(nn.Module):
    """Llama's decoder layer; `norm_input=False` omits the first norm, as in EAGLE-1. Others: see `SelfAttention`.

    `read_Q`: the positions whose outputs [B, Q, H] are returned; all others have keys and values only. None: all.
    `features_BCH`: not normed, their keys and values enter before those of all positions.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        norm_input: bool = True,
        qk_norm: bool = False,
        gated: bool = False,
        centred: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer, qk_norm=qk_norm, gated=gated, centred=centred, sinks=sinks)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = norm(config, centred=centred) if norm_input else nn.Identity()
        self.post_attention_layernorm = norm(config, centred=centred)

    def forward(
        self,
        x_BTH: Tensor,
        rope: Rope,
        attend: Attend,
        read_Q: Tensor | None = None,
        features_BCH: Tensor | None = None,
    ) -> Tensor:
        read_BTH, own = self.input_layernorm(x_BTH), read_Q
        if features_BCH is not None:
            read_BTH, own = torch.cat([features_BCH, read_BTH], 1), slice(features_BCH.shape[1], None)
        added_BTH = self.self_attn(read_BTH, rope, attend, own)
        x_BTH = (x_BTH if read_Q is None else x_BTH.index_select(1, read_Q)) + added_BTH
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class RMSNorm(nn.RMSNorm):
    """RMSNorm with the gain cast to the input's dtype: torch fuses it for equal dtypes only, as under autocast."""

    centred: bool = False
    """The gain is 1 + weight (Qwen3-Next, Qwen3.5)."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight
        if self.centred:
            gain = 1 + gain.to(torch.promote_types(x.dtype, torch.float32))
        return nn.functional.rms_norm(x, self.normalized_shape, gain.to(x.dtype), self.eps)


def norm(config: LlamaConfig, size: int | None = None, *, centred: bool = False) -> RMSNorm:
    """Return a new RMSNorm over `size` values, by default the hidden size; `centred`: its gain is 1 + weight."""
    made = RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps)
    made.centred = centred
    return made


@torch.no_grad()
def last_norm_is_centred(target: PreTrainedModel) -> Tensor:
    """Return whether the gain of the target's last norm is 1 + weight, measured, as a bool tensor; False without one.

    The norm is computed on values of mean 0 and mean square 1 and on their negatives, so that LayerNorms with a bias
    are measured, too.
    """
    norm = getattr(target.get_decoder(), "norm", None)
    if norm is None:
        return torch.tensor(False)
    weight_H = weight_of(norm)
    signs_H = torch.ones_like(weight_H)
    signs_H[1::2] = -1
    gain_H = signs_H * (norm(signs_H) - norm(-signs_H)) / 2
    return (gain_H - weight_H - 1).abs().sum() < (gain_H - weight_H).abs().sum()


def rotary(config: LlamaConfig) -> LlamaRotaryEmbedding:
    """Return the rotary position embedding that `config` describes, of a part of each head where it says so."""
    part = (config.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    if part != 1:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        config = copy(config)
        config.head_dim = int(part * size)
    return LlamaRotaryEmbedding(config)


def layer_config(
    target: PreTrainedModel, num_hidden_layers: int, *, window: int | None = None, **changes: Any
) -> LlamaConfig:
    """Return a Llama config with the width, heads, MLP size and positions of a target of any architecture.

    `window`: tokens that each layer attends to, its own included; None: all.

    Where layers differ (Gemma 3n and 4), heads and MLP size are those of the first one, whose attention slides. Where
    the width is no multiple of the heads, there are fewer of them.
    """
    config = text_config(target)
    hidden, attends = config.hidden_size, layer_value(config, "num_attention_heads")
    heads = attends or max(1, hidden // 64)  # a purely recurrent target has none
    head_dim = (layer_value(config, "head_dim") if attends else None) or hidden // heads
    key_heads = layer_value(config, "num_key_value_heads") or heads
    if hidden % heads:  # which Llama's config, and with it engines, refuse
        heads = next((n for n in range(heads - heads % key_heads, 0, -key_heads) if hidden % n == 0), heads)
    width = weight_of(target.get_input_embeddings()).shape[1]
    if width != hidden:
        raise ConfigError(
            f"target has embeddings of width {width} and hidden states of width {hidden}; expected equal widths"
        )
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": layer_value(config, "intermediate_size") or 4 * hidden,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 4096,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
        "rope_parameters": _rope_parameters(config, head_dim),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is not None:
        values |= {"sliding_window": window, "layer_types": ["sliding_attention"] * num_hidden_layers}
    return ready(LayerConfig(**{**values, **{key: value for key, value in changes.items() if value is not None}}))


class LayerConfig(LlamaConfig):
    """Llama's config for any number of heads of a given size: Qwen3.6-27B has 24 of 256 at width 5,120."""

    def validate_architecture(self) -> None:
        """Accept what Llama's config refuses."""


def ready(config: LlamaConfig) -> LlamaConfig:
    """Return `config` with sdpa attention, which takes bool masks."""
    config._attn_implementation = "sdpa"
    return config


def _rope_parameters(config: PreTrainedConfig, head_dim: int) -> dict[str, Any]:
    """Return the config's rotary parameters, for rotation of the whole head.

    Factors of single frequencies (longrope) are left out where they are those of a part of a head (Phi-4-mini).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:  # one entry per type of layer, None for one without rotation
        rope = rope["full_attention"] or rope.get("sliding_attention") or {}
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    if rope.get("rope_type") == "proportional":  # Gemma 4: the default one, for a part of each head
        rope["rope_type"] = "default"
    if "long_factor" in rope and len(rope["long_factor"]) != head_dim // 2:
        rope = {"rope_theta": rope["rope_theta"]}
    return {"rope_type": "default", "rope_theta": 10000.0, **rope}
