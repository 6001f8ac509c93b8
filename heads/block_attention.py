"""Attention of block drafters: each position of a block sees the features before its anchor, and the block.

decoding   features in the cache; one block after the last committed token
training   features of whole texts; blocks at many anchors, which do not see each other
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.heads.layers import attention

# Shapes: B rows, T positions, A anchors, b block size, X = A * b, Q positions of some blocks, S keys, h heads, d head
# size.

QUERIES = 512
"""Positions of blocks whose mask is in memory at a time in training."""


@dataclass(frozen=True)
class Windows:
    """The layers of a block drafter that see only the last features before the anchor."""

    sizes: tuple[int | None, ...]
    """For each layer the number of features that it sees; None: all of them."""
    causal: bool = True
    """In layers with a window, a position of the block sees no later ones."""


class CachedBlock:
    """Attention in decoding: every position of the block sees the cache slots that its last position sees.

    The block takes the last slots that it sees; there may be others between the features and the block.
    """

    def __init__(self, cache: Any, mask: Tensor | None, windows: Windows) -> None:
        self._cache, self._windows = cache, windows
        self._mask_B11S = None if mask is None else mask[:, :, -1:]

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        k_BhSd, v_BhSd = self._cache.update(k_BhTd, v_BhTd, layer)
        (block, S), window, mask = (q_BhTd.shape[2], k_BhSd.shape[2]), self._windows.sizes[layer], self._mask_B11S
        if window is not None:
            slots_S = torch.arange(S, device=q_BhTd.device)
            features = first = S - block
            if mask is not None:
                features = mask.sum(-1, keepdim=True) - block
                first = (mask * slots_S).amax(-1, keepdim=True) - block + 1
            near = slots_S >= features - window
            if self._windows.causal:
                near = near & (slots_S <= first + torch.arange(block, device=q_BhTd.device)[:, None])
            mask = near if mask is None else mask & near
        return attention(q_BhTd, k_BhSd, v_BhSd, None if mask is None else mask.expand(*mask.shape[:-2], block, S))


class AnchoredBlocks:
    """Attention in training: A blocks of b positions per text; each sees the features before its anchor and itself.

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
        windows: Windows,
    ) -> None:
        self._context, self._windows, self._block = context, windows, block
        self._anchors_BA, self._documents_BT = anchors_BA, documents_BT

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        count, together = self._anchors_BA.shape[1], max(1, QUERIES // self._block)
        keys, values, parts = *self._context[layer], []
        for start in range(0, count, together):
            anchors = slice(start, min(start + together, count))
            place = slice(anchors.start * self._block, anchors.stop * self._block)
            own = (x_BhTd[:, :, place] for x_BhTd in (q_BhTd, k_BhTd, v_BhTd))
            inputs = (anchors, self._windows.sizes[layer], keys, values, *own)
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
            own_bb = own_bb.tril() if self._windows.causal else own_bb
        own_QQ = torch.kron(torch.eye(A, dtype=torch.bool, device=own_bb.device), own_bb).expand(B, -1, -1)
        return torch.cat([before_BAT.repeat_interleave(self._block, 1), own_QQ], 2)[:, None]
