"""Weights of tokens in the expected accepted length, which depend on the other tokens of the same draft.

Alpha of a draft's tokens is recorded chunk by chunk, without a gradient, before their losses are computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.distill.draft_probabilities import Position

# Shapes: N states, n tokens of a chunk, K draft positions, B texts, T positions.


class DraftWeights:
    """Derivatives of the expected accepted length with respect to alpha, for all tokens of a batch.

    Args:
        draft_length: of drafters whose states serve every depth.
        row_length: T of the batch.
    """

    def __init__(self, positions: Sequence[Position], draft_length: int, row_length: int) -> None:
        self._positions, self._row_length = positions, row_length
        self._every_depth = positions[0].entry.every_depth
        self.longest = draft_length if self._every_depth else len(positions)
        """Number of neighbouring positions of the target that a draft spans."""
        counts = [len(position.entry.places_N) for position in positions]
        self._alpha = [torch.zeros(count, device=positions[0].student_ND.device) for count in counts]

    def record(self, k: int, place: slice, alpha_n: Tensor) -> None:
        """Store alpha of some tokens of draft position k."""
        self._alpha[k] = self._alpha[k].to(alpha_n.dtype)
        self._alpha[k][self._positions[k].states_N[place]] = alpha_n

    def update(self) -> None:
        """Compute the weights from what has been recorded: those of a token need all tokens of its drafts."""
        self._weights, self._constant = self._by_draft()

    def at(self, k: int, place: slice) -> Tensor:
        """Return the weights of some tokens of draft position k, detached."""
        return self._weights[k][self._positions[k].states_N[place]]

    def constant(self) -> Tensor:
        """Return the constant by which the surrogate loss differs from the expected length, once all is recorded."""
        self.update()
        return self._constant

    def _by_draft(self) -> tuple[list[Tensor], Tensor]:
        """Return the weights of each position's states, and the constant."""
        if not self._every_depth:
            weights, constant = _length_weights(torch.stack(self._alpha))
            return list(weights), constant
        # One state a position serves every depth: token k of the draft after anchor t is at t + k.
        T = self._row_length
        alpha_BT = self._alpha[0].view(-1, T)
        drafts = torch.stack([nn.functional.pad(alpha_BT[:, k:], (0, min(k, T))) for k in range(self.longest)])
        weights, constant = _length_weights(drafts)
        back_BT = torch.zeros_like(alpha_BT)
        for k in range(min(self.longest, T)):
            back_BT = back_BT + nn.functional.pad(weights[k], (k, 0))[:, :T]
        return [back_BT.flatten()], constant


def _length_weights(alpha_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Return w_i = d/d alpha_i of sum_k prod_{j<=k} alpha_j, and minus that sum plus sum_i w_i alpha_i."""
    K = alpha_KN.shape[0]
    before = torch.cat([torch.ones_like(alpha_KN[:1]), alpha_KN[:-1].cumprod(0)])
    after = [torch.ones_like(alpha_KN[0])]
    for k in range(K - 1, 0, -1):
        after.append(1 + alpha_KN[k] * after[-1])
    weights = before * torch.stack(after[::-1])
    value = alpha_KN.cumprod(0).sum()
    return weights, (weights * alpha_KN).sum() - value
