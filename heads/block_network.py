"""The network of block drafters: its attention and layers. The tokens before a position enter in `transitions`.

Each position of a block sees the features before its anchor, and the block:

decoding   features in the cache; one block after the last committed token
training   features of whole texts; blocks at many anchors, which do not see each other
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from draftsmith.heads.autoregressive import DraftNetwork, NetworkOutput
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, attention, norm, turned
from draftsmith.heads.lm_head import DraftVocabulary

# Shapes: B rows, T positions, C features, A anchors, b block size, K positions that predict, X = A * b, Q positions of
# some blocks, S keys, h heads, d head size, H hidden size, n nodes or positions.

QUERIES = 512
"""Positions of blocks whose mask is in memory at a time in training."""


def cached_block(cache: Any, mask: Tensor | None, windows: Sequence[int | None], causal_windows: bool) -> Attend:
    """Return the attention of decoding: every position of the block sees the cache slots that its last position sees.

    The block takes the last slots that it sees; there may be others between the features and the block.
    """
    mask_B11S = None if mask is None else mask[:, :, -1:]

    def attend(layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        k_BhSd, v_BhSd = cache.update(k_BhTd, v_BhTd, layer)
        (block, S), window, mask = (q_BhTd.shape[2], k_BhSd.shape[2]), windows[layer], mask_B11S
        if window is not None:
            slots_S = torch.arange(S, device=q_BhTd.device)
            features = first = S - block
            if mask is not None:
                features = mask.sum(-1, keepdim=True) - block
                first = (mask * slots_S).amax(-1, keepdim=True) - block + 1
            near = slots_S >= features - window
            if causal_windows:
                near = near & (slots_S <= first + torch.arange(block, device=q_BhTd.device)[:, None])
            mask = near if mask is None else mask & near
        return attention(q_BhTd, k_BhSd, v_BhSd, None if mask is None else mask.expand(*mask.shape[:-2], block, S))

    return attend


class AnchoredBlocks:
    """Attention in training: A blocks of b positions per text; each sees the features before its anchor and itself.

    Blocks are attended in groups of about `QUERIES` positions, which are computed again in the backward pass where
    there are several, so that memory is linear in the number of anchors.

    Args:
        context: keys and values of the features, for each layer.
        documents_BT: see `TeacherSignals`; blocks see only features of their own document.
        windows, causal_windows: see `DFlashNetwork`.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        anchors_BA: Tensor,
        block: int,
        documents_BT: Tensor | None,
        windows: Sequence[int | None],
        causal_windows: bool,
    ) -> None:
        self._context, self._block, self._windows, self._causal = context, block, windows, causal_windows
        self._anchors_BA, self._documents_BT = anchors_BA, documents_BT

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        count, together = self._anchors_BA.shape[1], max(1, QUERIES // self._block)
        keys, values, parts = *self._context[layer], []
        for start in range(0, count, together):
            anchors = slice(start, min(start + together, count))
            place = slice(anchors.start * self._block, anchors.stop * self._block)
            own = (x_BhTd[:, :, place] for x_BhTd in (q_BhTd, k_BhTd, v_BhTd))
            inputs = (anchors, self._windows[layer], keys, values, *own)
            if count <= together:
                return self._attend(*inputs)
            parts.append(checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts, 2)

    def _attend(
        self,
        anchors: slice,
        window: int | None,
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
        return attention(q_BhQd, k_BhSd, v_BhSd, self._mask(anchors, window, keys_BhTd.shape[2]))

    def _mask(self, anchors: slice, window: int | None, length: int) -> Tensor:
        """Return the mask of features and positions of these blocks that each position sees, bool [B, 1, Q, T + Q]."""
        anchors_BA1 = self._anchors_BA[:, anchors, None]
        B, A, _ = anchors_BA1.shape
        places_T = torch.arange(length, device=anchors_BA1.device)
        before_BAT = places_T < anchors_BA1
        if self._documents_BT is not None:
            before_BAT &= self._documents_BT.gather(1, anchors_BA1[..., 0])[..., None] == self._documents_BT[:, None]
        own_bb = torch.ones(self._block, self._block, dtype=torch.bool, device=anchors_BA1.device)
        if window is not None:
            before_BAT &= places_T >= anchors_BA1 - window
            own_bb = own_bb.tril() if self._causal else own_bb
        own_QQ = torch.kron(torch.eye(A, dtype=torch.bool, device=own_bb.device), own_bb).expand(B, -1, -1)
        return torch.cat([before_BAT.repeat_interleave(self._block, 1), own_QQ], 2)[:, None]


class DFlashNetwork(DraftNetwork):
    """Layers on a block of an anchor and masks; the features enter as keys and values.

    Args:
        first: index in the block of the first position that predicts.
        windows: for each layer the number of features before the anchor that it sees; None: all of them.
        causal_windows: in layers with a window, a position of the block sees no later ones.
        draft_vocab_size: number of rows of an own lm_head; None: the target's lm_head is used.
    """

    def __init__(
        self,
        config: LlamaConfig,
        features: int,
        first: int,
        *,
        windows: tuple[int | None, ...],
        causal_windows: bool = True,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.first, self.windows, self.causal_windows = first, windows, causal_windows
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        self.hidden_norm = norm(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, qk_norm=True) for layer in range(config.num_hidden_layers)
        )
        self.norm = norm(config)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        if draft_vocab_size is not None and draft_vocab_size < config.vocab_size:
            self.vocabulary = DraftVocabulary(config.vocab_size, draft_vocab_size)

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
        attend = cached_block(past_key_values, attention_mask, self.windows, self.causal_windows)
        for layer in self.layers:
            x_BbH = layer(x_BbH, rope, attend, features_BCH=context_BCH)
        states_BKH = self.norm(x_BbH)[:, self.first :]
        return NetworkOutput(self.head(states_BKH), states_BKH)
