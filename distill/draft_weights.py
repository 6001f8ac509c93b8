"""Weights of tokens that depend on the other tokens of the same draft: the accepted length, and D-PACE.

The agreement of a draft's tokens is recorded chunk by chunk, without a gradient, before their losses are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.distill.draft_probabilities import Position

# Shapes: N tokens, n tokens of a chunk, K draft positions, B texts, T positions or anchors.


@dataclass(frozen=True)
class TokenWeights:
    """Weights of some tokens of one draft position, detached."""

    dpace_n: Tensor | None = None
    length_n: Tensor | None = None
    """Derivative of the expected accepted length with respect to the token's alpha."""


class DraftWeights:
    """Weights of all tokens of a batch.

    Args:
        dpace: see `Objective.dpace`.
        length_weight: weight of the term accepted_length; None without it.
        draft_length: of drafters whose states serve every depth.
    """

    def __init__(
        self, positions: Sequence[Position], dpace: float | None, length_weight: float | None, draft_length: int
    ) -> None:
        self._positions, self._dpace, self._length_weight = positions, dpace, length_weight
        entry = positions[0].entry
        self._every_depth = len(positions) == 1 and not entry.offset and entry.everywhere
        self.longest = draft_length if self._every_depth else len(positions)
        """Number of neighbouring positions of the target that a draft spans."""
        self._alpha, self._sure = (
            [position.student_ND.new_zeros(position.grid, dtype=torch.float32) for position in positions]
            for _ in range(2)
        )

    def record(self, k: int, place: slice, alpha_n: Tensor, likelihood_n: Tensor) -> None:
        """Store alpha and q of the target's most likely token for some tokens of draft position k."""
        share = self._dpace or 0.0
        for grids, values_n in ((self._alpha, alpha_n), (self._sure, (1 - share) * likelihood_n + share)):
            grids[k] = grids[k].to(values_n.dtype)
            grids[k][self._anchors(k, place)] = values_n

    def update(self) -> None:
        """Compute the weights from what has been recorded: those of a token need all tokens of its drafts."""
        if self._length_weight is not None:
            self._length, self._constant = self._by_draft(self._alpha, _length_weights)
        if self._dpace is not None:
            self._dependent, _ = self._by_draft(self._sure, _dpace_weights)

    def at(self, k: int, place: slice) -> TokenWeights:
        """Return the weights of some tokens of draft position k."""
        anchors = self._anchors(k, place)
        dpace_n = None if self._dpace is None else self._dependent[k][anchors]
        return TokenWeights(dpace_n, None if self._length_weight is None else self._length[k][anchors])

    def constant(self) -> Tensor | float:
        """Return the constant by which the surrogate loss differs from the expected length, once all is recorded."""
        if self._length_weight is None:
            return 0.0
        self.update()
        return self._length_weight * self._constant

    def _anchors(self, k: int, place: slice) -> tuple[Tensor, ...]:
        return tuple(index_N[place] for index_N in self._positions[k].anchors)

    def _by_draft(
        self, grids: list[Tensor], weigh: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return weights on each position's grid, and the constant, of values that are laid out by anchor."""
        if not self._every_depth:
            weights, constant = weigh(torch.stack(grids))
            return list(weights), constant
        # One state a position serves every depth: token k of the draft after anchor t is at t + k.
        (grid,), length = grids, self.longest
        drafts = torch.stack([nn.functional.pad(grid[:, k:], (0, min(k, grid.shape[1]))) for k in range(length)])
        weights, constant = weigh(drafts)
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


def _dpace_weights(sure_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight_k = sum_{j>=k} prod_{i<=j} s_i (D-PACE): the accepted tokens that depend on position k."""
    survival = sure_KBT.cumprod(0)
    return survival.flip(0).cumsum(0).flip(0), survival.new_zeros(())
