"""The network of block drafters: its attention and layers. The tokens before a position enter in `transitions`.

Each position of a block sees the features before its anchor, and the block:

decoding   features in the cache; one block after the last committed token
training   features of whole sequences; blocks at many anchors, which do not see each other
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.heads.autoregressive import DraftNetwork, NetworkOutput
from draftsmith.heads.block_convolution import ConvolutionLayer, ConvolutionOptions
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, attention, norm, turned
from draftsmith.heads.lm_head import DraftVocabulary, weight_of

# Shapes: B rows, T positions, C features, A anchors, b block size, K positions that predict, X = A * b, Q positions of
# some blocks, S keys, h heads, d head size, H hidden size, n nodes or positions.

ENDLESS = 2**40
"""More positions than any sequence has."""
QUERIES = 512
"""Positions of blocks whose mask is in memory at a time in training."""


@dataclass
class Visibility:
    """What the positions of a block see in each layer: features before the anchor, and each other.

    Layers without a window see all features, and all positions of the block unless `causal`.
    """

    windows: Sequence[int | None]
    """For each layer the size of its window, None without one."""
    causal_windows: bool = True
    """In layers with a window, a position sees no later ones of the block."""
    causal: bool = False
    """In no layer does a position see later ones of the block."""
    windows_from_anchor: bool = True
    """The window is a number of features before the anchor, for all positions, as in the speculators package. Elsewhere
    it is a number of positions, a position's own included, and as many later ones where it sees these."""

    def limits(self, layer: int) -> bool:
        """Return whether the layer hides features or positions of the block."""
        return self.causal or self.windows[layer] is not None

    def features(self, layer: int, block: int, device: torch.device) -> Tensor:
        """Return the first feature that each position [b] sees, relative to the anchor."""
        window, slots_b = self.windows[layer], torch.arange(block, device=device)
        if window is None:
            return slots_b - ENDLESS
        return torch.full_like(slots_b, -window) if self.windows_from_anchor else slots_b - window + 1

    def block(self, layer: int, block: int, device: torch.device) -> Tensor:
        """Return the positions of the block that each of them sees, bool [b, b]."""
        window, own_bb = self.windows[layer], torch.ones(block, block, dtype=torch.bool, device=device)
        if window is not None and not self.windows_from_anchor:
            own_bb = own_bb.triu(1 - window).tril(window - 1)
        return own_bb.tril() if self.causal or (self.causal_windows and window is not None) else own_bb


Sinks = Callable[[int], Tensor | None]
"""Return the `attention_sink_bias` [h] of a layer."""


def cached_block(cache: Any, mask: Tensor | None, sees: Visibility, sinks: Sinks) -> Attend:
    """Return the attention of a block that is decoded over a cache.

    Each position attends to the slots that the mask allows for the last position of the block and `sees` for its own.
    The block has the last of these slots; there may be other slots between the features and the block.
    """
    mask_B11S = None if mask is None else mask[:, :, -1:]

    def attend(layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        k_BhSd, v_BhSd = cache.update(k_BhTd, v_BhTd, layer)
        block, S, mask = q_BhTd.shape[2], k_BhSd.shape[2], mask_B11S
        if sees.limits(layer):
            slots_1S = torch.arange(S, device=q_BhTd.device)[None]
            features = start = S - block
            if mask is not None:
                features = mask.sum(-1, keepdim=True) - block
                start = (mask * slots_1S).amax(-1, keepdim=True) - block + 1
            own_bb = sees.block(layer, block, q_BhTd.device)
            own_bS = own_bb.T[(slots_1S - start).clamp(0, block - 1).squeeze(-2)].mT
            before_bS = slots_1S >= features + sees.features(layer, block, q_BhTd.device)[:, None]
            near_bS = torch.where(slots_1S >= start, own_bS, before_bS)
            mask = near_bS if mask is None else mask & near_bS
        mask = None if mask is None else mask.expand(*mask.shape[:-2], block, S)
        return attention(q_BhTd, k_BhSd, v_BhSd, mask, sinks_h=sinks(layer))

    return attend


class AnchoredBlocks:
    """Attention in training: A blocks of b positions per sequence; each sees the features before its anchor and itself.

    Blocks are attended in groups of about `QUERIES` positions, which are computed again in the backward pass where
    there are several, so that memory is linear in the number of anchors.

    Args:
        context: keys and values of the features, for each layer.
        documents_BT: see `TeacherSignals`; blocks see only features of their own document.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        anchors_BA: Tensor,
        block: int,
        documents_BT: Tensor | None,
        sees: Visibility,
        sinks: Sinks = lambda layer: None,
    ) -> None:
        self._context, self._block, self._sees, self._sinks = context, block, sees, sinks
        self._anchors_BA, self._documents_BT = anchors_BA, documents_BT

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        count, together = self._anchors_BA.shape[1], max(1, QUERIES // self._block)
        keys, values, parts = *self._context[layer], []
        for start in range(0, count, together):
            anchors = slice(start, min(start + together, count))
            part = slice(anchors.start * self._block, anchors.stop * self._block)
            own = (x_BhTd[:, :, part] for x_BhTd in (q_BhTd, k_BhTd, v_BhTd))
            inputs = (anchors, layer, keys, values, *own)
            if count <= together:
                return self._attend(*inputs)
            parts.append(checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts, 2)

    def _attend(
        self,
        anchors: slice,
        layer: int,
        keys_BhTd: Tensor,
        values_BhTd: Tensor,
        q_BhQd: Tensor,
        k_BhQd: Tensor,
        v_BhQd: Tensor,
    ) -> Tensor:
        """Return the attention of some blocks."""
        k_BhSd, v_BhSd = torch.cat([keys_BhTd, k_BhQd], 2), torch.cat([values_BhTd, v_BhQd], 2)
        # With a mask and fewer key heads than query heads, torch may fall back to a kernel that keeps all scores.
        groups = q_BhQd.shape[1] // k_BhSd.shape[1]
        k_BhSd, v_BhSd = (x_BhSd.repeat_interleave(groups, 1) for x_BhSd in (k_BhSd, v_BhSd))
        mask = self._mask(anchors, layer, keys_BhTd.shape[2])
        return attention(q_BhQd, k_BhSd, v_BhSd, mask, sinks_h=self._sinks(layer))

    def _mask(self, anchors: slice, layer: int, length: int) -> Tensor:
        """Return the mask of features and positions of these blocks that each position sees, bool [B, 1, Q, T + Q]."""
        anchors_BA1 = self._anchors_BA[:, anchors, None]
        B, A, _ = anchors_BA1.shape
        places_T = torch.arange(length, device=anchors_BA1.device)
        before_BAT = places_T < anchors_BA1
        if self._documents_BT is not None:
            before_BAT &= self._documents_BT.gather(1, anchors_BA1[..., 0])[..., None] == self._documents_BT[:, None]
        before_BQT = before_BAT.repeat_interleave(self._block, 1)
        if self._sees.limits(layer):
            first_b = self._sees.features(layer, self._block, anchors_BA1.device)
            before_BQT &= places_T >= (anchors_BA1 + first_b).flatten(1)[..., None]
        own_bb = self._sees.block(layer, self._block, anchors_BA1.device)
        own_QQ = torch.kron(torch.eye(A, dtype=torch.bool, device=own_bb.device), own_bb).expand(B, -1, -1)
        return torch.cat([before_BQT, own_QQ], 2)[:, None]


class PlainEmbeddings(nn.Module):
    """Rows of the target's embeddings as they are stored, not scaled (Gemma 3) or normed (Muse Glimmer)."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self._embeddings = (target.get_input_embeddings(),)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return nn.functional.embedding(ids_BT, weight_of(self._embeddings[0]))


class DFlashNetwork(DraftNetwork):
    """Layers on a block of an anchor and masks; the features enter as keys and values.

    Args:
        first: index in the block of the first position that predicts.
        sinks: see `SelfAttention`.
        plain_target: use the target's embeddings and lm_head without the operations around them, as other projects do.
        draft_vocab_size: number of rows of an own lm_head; None: the target's lm_head is used.
        block_size: of the layers' convolutions.
    """

    def __init__(
        self,
        config: LlamaConfig,
        features: int,
        first: int,
        *,
        sees: Visibility,
        sinks: bool = False,
        plain_target: bool = False,
        draft_vocab_size: int | None = None,
        block_size: int,
        convolution: ConvolutionOptions,
    ) -> None:
        super().__init__(config)
        self.plain_target, self.convolution = plain_target, convolution
        hidden = config.hidden_size
        self.first, self.sees = first, sees
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        self.hidden_norm = norm(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, qk_norm=True, sinks=sinks)
            if convolution.conv_kernel_size == 0
            else ConvolutionLayer(config, layer, block_size, convolution, sinks=sinks)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = norm(config)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        if draft_vocab_size is not None and draft_vocab_size < config.vocab_size:
            self.vocabulary = DraftVocabulary(config.vocab_size, draft_vocab_size)

    def attach(self, target: PreTrainedModel) -> None:
        super().attach(target)
        if self.plain_target:
            lm_head = target.get_output_embeddings()
            assert lm_head is not None, "the base class requires it"
            self._shared = (PlainEmbeddings(target), lm_head)
            self._share_rows()

    def sinks(self, layer: int) -> Tensor | None:
        """Return the logits [h] of a layer's attention sinks; None for none."""
        module = self.layers[layer]
        assert isinstance(module, DecoderLayer)
        return module.self_attn.attention_sink_bias

    def turn_masks(self, state_H: Tensor) -> None:
        """Set the last layer's MLP so that it maps the mask's embedding to `state_H`, if no other layer changes it."""
        layer = self.layers[-1]
        assert isinstance(layer, DecoderLayer)
        mlp, read_H = layer.mlp, layer.post_attention_layernorm(self.mask_embedding)
        inner_I = mlp.act_fn(mlp.gate_proj(read_H)) * mlp.up_proj(read_H)
        mlp.down_proj.weight.copy_(torch.outer(state_H - self.mask_embedding, inner_I / inner_I.square().sum()))

    def project(self, features_nF: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features_nF))

    def block(self, anchors_n: Tensor, size: int) -> Tensor:
        """Return the input embeddings [n, b, H] of a block: each anchor, then masks."""
        anchor_n1H = self.embed(anchors_n)[:, None]
        return torch.cat([anchor_n1H, self.mask_embedding.expand(anchors_n.shape[0], size - 1, -1)], 1)

    def context_keys(self, context_BTH: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Return rotated keys and values of the projected features, for each layer."""
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            k_BhTd, v_BhTd = layer.self_attn.keys(context_BTH)
            pairs.append((turned(k_BhTd, rope), v_BhTd))
        return pairs

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # blocks are returned whole
        self, embeds_BTH: Tensor, states_BTH: Tensor | None, rope: Rope, attend: Attend
    ) -> Tensor:
        x_BTH = embeds_BTH
        for layer in self.layers:
            x_BTH = layer(x_BTH, rope, attend)
        return self.norm(x_BTH)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decoder looks for `columns`
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> NetworkOutput:
        """Store the keys and values of `features` [B, C, F], and predict the block of an anchor and masks after them.

        `input_ids` [B, C + b]: only the anchor, after the C tokens of the features, is read.
        """
        context_BCH, count = self.project(features.to(self.dtype)), features.shape[1]
        x_BbH = self.block(input_ids[:, count], input_ids.shape[1] - count)
        rope = self.rotary(context_BCH, position_ids)
        attend = cached_block(past_key_values, attention_mask, self.sees, self.sinks)
        for layer in self.layers:
            x_BbH = layer(x_BbH, rope, attend, features_BCH=context_BCH)
        states_BKH = self.norm(x_BbH)[:, self.first :]
        return NetworkOutput(self.head(states_BKH), states_BKH)
