"""Attention of block drafters: each position of a block sees the features before its anchor, and the block.

decoding   features in the cache; one block after the last committed token
training   features of whole texts; blocks at many anchors, which do not see each other
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.layers import attention

# Shapes: B rows, T positions, A anchors, b block size, S keys, h heads, d head size.


@dataclass(frozen=True)
class Windows:
    """The layers of a block drafter that see only the last features before the anchor."""

    sizes: tuple[int | None, ...]
    """For each layer the number of features that it sees; None: all of them."""
    causal: bool = True
    """In layers with a window, a position of the block sees no later ones."""


class CachedBlock:
    """Attention in decoding: every position of the block sees the cache slots that its last position sees."""

    def __init__(self, cache: Any, mask: Tensor | None, windows: Windows) -> None:
        self._cache, self._windows = cache, windows
        self._mask_B11S = None if mask is None else mask[:, :, -1:]

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        k_BhSd, v_BhSd = self._cache.update(k_BhTd, v_BhTd, layer)
        (block, S), window, mask = (q_BhTd.shape[2], k_BhSd.shape[2]), self._windows.sizes[layer], self._mask_B11S
        if window is not None:
            slots_S = torch.arange(S, device=q_BhTd.device)
            anchor = S - block if mask is None else mask.sum(-1, keepdim=True) - block
            near = slots_S >= anchor - window
            if self._windows.causal:
                near = near & (slots_S <= anchor + torch.arange(block, device=q_BhTd.device)[:, None])
            mask = near if mask is None else mask & near
        return attention(q_BhTd, k_BhSd, v_BhSd, None if mask is None else mask.expand(*mask.shape[:-2], block, S))


class AnchoredBlocks:
    """Attention in training: A blocks of b positions per text; each sees the features before its anchor and itself.

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
        self._context, self._windows = context, windows
        B, A = anchors_BA.shape
        T, device = context[0][0].shape[2], anchors_BA.device
        before_BAT = torch.arange(T, device=device) < anchors_BA[..., None]
        if documents_BT is not None:
            before_BAT &= documents_BT.gather(1, anchors_BA)[..., None] == documents_BT[:, None]
        own_AA = torch.eye(A, dtype=torch.bool, device=device)
        whole_bb = torch.ones(block, block, dtype=torch.bool, device=device)
        self._masks: dict[int | None, Tensor] = {}
        for window in set(windows.sizes):
            near_BAT, own_bb = before_BAT, whole_bb
            if window is not None:
                near_BAT = before_BAT & (torch.arange(T, device=device) >= anchors_BA[..., None] - window)
                own_bb = whole_bb.tril() if windows.causal else whole_bb
            own_XX = torch.kron(own_AA, own_bb).expand(B, A * block, A * block)
            self._masks[window] = torch.cat([near_BAT.repeat_interleave(block, 1), own_XX], 2)[:, None]

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        keys, values = self._context[layer]
        mask = self._masks[self._windows.sizes[layer]]
        return attention(q_BhTd, torch.cat([keys, k_BhTd], 2), torch.cat([values, v_BhTd], 2), mask)
