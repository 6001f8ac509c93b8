"""The target's features of committed tokens, from the pass that reads them until the drafter takes them.

held    row 0   f3 f4 f5        `add` appends on the right, `take` removes from the left, for all texts at once
        row 1   f2 . .
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Shapes: B texts, Q tokens of a pass, n places, S tokens held, F size of the features per position.


def at_places(values_BQF: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Return the values [B, n, F] at these places of each row; rows with fewer are padded with other values.

    A view, which copies nothing, where the places of all rows rise by one from the same place.
    """
    first, width = next((row[0] for row in places if row), 0), max(map(len, places))
    if all(list(row) == list(range(first, first + len(row))) for row in places):
        return values_BQF[:, first : first + width]
    wide = [[*row, *[0] * (width - len(row))] for row in places]
    rows_B1 = torch.arange(len(places), device=values_BQF.device)[:, None]
    return values_BQF[rows_B1, torch.tensor(wide, device=values_BQF.device)]


class FeatureQueue:
    """Features of the next tokens of each text, in the order of the tokens."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        """Number of tokens of each text."""
        self.values_BSF: Tensor | None = None
        """Padded on the right; None while the queue is empty."""

    def add(self, features_BQF: Tensor, counts: Sequence[int]) -> None:
        """Append the features of the first `counts` tokens of each row."""
        if self.values_BSF is None:
            self.values_BSF, self.counts = features_BQF[:, : max(counts)], list(counts)
            return
        S, pairs = self.values_BSF.shape[1], list(zip(self.counts, counts, strict=True))
        both_BSF = torch.cat([self.values_BSF, features_BQF[:, : max(counts)]], 1)
        self.values_BSF = at_places(both_BSF, [[*range(held), *range(S, S + new)] for held, new in pairs])
        self.counts = [held + new for held, new in pairs]

    def take(self, counts: Sequence[int]) -> Tensor:
        """Remove the features of the next `counts` tokens of each text and return them, see `Context.take_features`."""
        values_BSF = self.values_BSF
        assert values_BSF is not None, "only drafters that need features take them"
        rest = [list(range(count, held)) for count, held in zip(counts, self.counts, strict=True)]
        self.counts = [len(row) for row in rest]
        self.values_BSF = at_places(values_BSF, rest) if any(rest) else None
        return values_BSF[:, : max(counts)]

    def keep(self, rows: list[int]) -> None:
        """Keep only these texts, in this order."""
        if self.values_BSF is not None:
            self.values_BSF, self.counts = self.values_BSF[rows], [self.counts[row] for row in rows]
