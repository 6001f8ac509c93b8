"""The draft tokens in the cache of a `ModelRunner`: their positions, and the slots that the next ones see."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

# Shapes: B rows, Q tokens fed to each, S slots of the cache.

Depths = Sequence[int] | Sequence[list[int]]
"""Number of draft tokens on the path to each token of a pass: [Q], or [B, Q] where rows differ."""


def by_row(depths: Depths, rows: int) -> Sequence[Sequence[int]]:
    """Return the depths of each row."""
    if len(depths) > 0 and isinstance(depths[0], list):
        return cast(Sequence[list[int]], depths)
    return [cast(Sequence[int], depths)] * rows


class Positions:
    """Positions of the tokens of a pass. Where they rise by one, they are a view of a table on the device.

    Args:
        last: the last position of the model's context; padding has no later one.
    """

    def __init__(self, device: torch.device, last: int) -> None:
        self._device, self._last = device, last
        self._table_1S = torch.empty(1, 0, dtype=torch.int64, device=device)

    def of_text(self, starts: list[int], counts: list[int], width: int) -> Tensor:
        """Return the positions [B, Q] of `counts` committed tokens after `starts` ones, and of padding."""
        if min(counts) == width and (rising_BQ := self._rising(starts, width)) is not None:
            return rising_BQ
        rows = [
            [*range(start, start + count), *[start] * (width - count)]
            for start, count in zip(starts, counts, strict=True)
        ]
        return torch.tensor(rows, device=self._device)

    def of_draft(self, lengths: list[int], starts: list[int], depths: Depths, width: int) -> Tensor:
        """Return the positions [B, Q] of draft tokens after texts of these lengths, and of padding.

        `starts`: the first slots that the tokens take.
        """
        first = starts[0] - lengths[0] + 1
        if depths == range(first, first + width) and (rising_BQ := self._rising(starts, width)) is not None:
            return rising_BQ
        # Rows that have fewer draft tokens are padded, maybe beyond the model's context.
        rows = [
            [min(length - 1 + depth, self._last) for depth in row] + [length] * (width - len(row))
            for length, row in zip(lengths, by_row(depths, len(lengths)), strict=True)
        ]
        return torch.tensor(rows, device=self._device)

    def _rising(self, starts: list[int], width: int) -> Tensor | None:
        """Return positions that rise from the same start in all rows; None if rows differ or leave the context."""
        start, end = starts[0], starts[0] + width
        if end - 1 > self._last or any(other != start for other in starts[1:]):
            return None
        if end > self._table_1S.shape[1]:
            self._table_1S = torch.arange(2 * end, device=self._device)[None]
        rising_1Q = self._table_1S[:, start:end]
        return rising_1Q if len(starts) == 1 else rising_1Q.repeat(len(starts), 1)


class Drafted:
    """The draft tokens that the cache holds after the committed ones, in the same slots for every row."""

    def __init__(self) -> None:
        self.slots = 0
        self._depths: list[Depths] = []
        """Of the tokens of each pass."""
        self.visible: Tensor | None = None
        """[B, n, slots]: the slots that the nodes of the last level see; None while every level has one node."""

    def read(self, count: int, depths: Depths) -> None:
        """Add `count` tokens of every row."""
        self.slots += count
        self._depths.append(depths)

    def positions(self, end: int, positions_BQ: Tensor, starts: list[int]) -> Tensor:
        """Return the position in its text of the token in each slot up to `end`, [B, S].

        `starts`: the slots from which on the tokens at `positions_BQ` are being read.
        """
        B, Q = positions_BQ.shape
        device = positions_BQ.device
        # Padding may end after the last slot.
        slots_BS = torch.arange(end + Q, device=device).repeat(B, 1)
        start_B1 = torch.tensor(starts, device=device)[:, None]
        if self.slots:
            rows = [[depth for of_pass in self._depths for depth in by_row(of_pass, B)[row]] for row in range(B)]
            length_B1 = start_B1 - self.slots
            drafted_BR = length_B1 + torch.arange(self.slots, device=device)
            slots_BS.scatter_(1, drafted_BR, length_B1 + torch.tensor(rows, device=device) - 1)
        return slots_BS.scatter_(1, start_B1 + torch.arange(Q, device=device), positions_BQ)[:, :end]
