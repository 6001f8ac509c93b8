"""Weights of tokens in the expected accepted length, which depend on the other tokens of the same draft.

Alpha of a draft's tokens is recorded chunk by chunk, without a gradient, before their losses are computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.distill.draft_probabilities import Position

# Shapes: N tokens, n tokens of a chunk, K draft positions, B texts, T positions or anchors.


class DraftWeights:
    """Derivatives of the expected accepted length with respect to alpha, for all tokens of a batch.

    `draft_length`: of drafters whose states serve every depth.
    """

    def __init__(self, positions: Sequence[Position], draft_length: int) -> None:
        self._positions = positions
        entry = positions[0].entry
        self._every_depth = len(positions) == 1 and not entry.offset and entry.everywhere
        self.longest = draft_length if self._every_depth else len(positions)
        """Number of neighbouring positions of the target that a draft spans."""
        self._alpha = [position.student_ND.new_zeros(position.grid, dtype=torch.float32) for position in positions]

    def record(self, k: int, place: slice, alpha_n: Tensor) -> None:
        """Store alpha of some tokens of draft position k."""
        self._alpha[k] = self._alpha[k].to(alpha_n.dtype)
        self._alpha[k][self._anchors(k, place)] = alpha_n

    def update(self) -> None:
        """Compute the weights from what has been recorded: those of a token need all tokens of its drafts."""
        self._weights, self._constant = self._by_draft()

    def at(self, k: int, place: slice) -> Tensor:
        """Return the weights of some tokens of draft position k, detached."""
        return self._weights[k][self._anchors(k, place)]

    def constant(self) -> Tensor:
        """Return the constant by which the surrogate loss differs from the expected length, once all is recorded."""
        self.update()
        return self._constant

    def _anchors(self, k: int, place: slice) -> tuple[Tensor, ...]:
        return tuple(index_N[place] for index_N in self._positions[k].anchors)

    def _by_draft(self) -> tuple[list[Tensor], Tensor]:
        """Return weights on each position's grid, and the constant."""
        if not self._every_depth:
            weights, constant = _length_weights(torch.stack(self._alpha))
            return list(weights), constant
        # One state a position serves every depth: token k of the draft after anchor t is at t + k.
        (grid,), length = self._alpha, self.longest
        drafts = torch.stack([nn.functional.pad(grid[:, k:], (0, min(k, grid.shape[1]))) for k in range(length)])
        weights, constant = _length_weights(drafts)
        back = torch.zeros_like(grid)
        for k in range(min(length, grid.shape[1])):
            back = back + nn.functional.pad(weights[k], (k, 0))[:, : grid.shape[1]]
        return [back], constant


def _length_weights(alpha_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """Return w_i = d/d alpha_i of sum_k prod_{j<=k} alpha_j, and minus that sum plus sum_i w_i alpha_i."""
    K = alpha_KBT.shape[0]
    before = torch.cat([torch.ones_like(alpha_KBT[:1]), alpha_KBT[:-1].cumprod(0)])
    after = [torch.ones_like(alpha_KBT[0])]
    for k in range(K - 1, 0, -1):
        after.append(1 + alpha_KBT[k] * after[-1])
    weights = before * torch.stack(after[::-1])
    value = alpha_KBT.cumprod(0).sum()
    return weights, (weights * alpha_KBT).sum() - value
