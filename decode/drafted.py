"""The draft tokens in the cache of a `ModelRunner`: their depths, and the slots that the next ones see."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Drafted:
    """The draft tokens that the cache holds after the committed ones, in the same slots for every row."""

    def __init__(self) -> None:
        self.slots = 0
        self.depths: list[list[int]] = []
        """For each row the depth of the token in each slot."""
        self.visible: Tensor | None = None
        """[B, n, slots]: the slots that the nodes of the last level see; None while every level has one node."""

    def read(self, count: int, depths: Sequence[list[int]]) -> None:
        """Add `count` tokens of every row."""
        self.slots += count
        self.depths = [old + new for old, new in zip(self.depths or [[] for _ in depths], depths, strict=True)]

    def positions(self, lengths: list[int], end: int, positions_BQ: Tensor, starts: list[int]) -> Tensor:
        """Return the position in its text of the token in each slot, including tokens being read from `starts`: [B, S].

        `lengths`: committed tokens of each row; S is `end`.
        """
        slots_BS = torch.arange(end).expand(len(starts), end).clone()
        for row, depths in enumerate(self.depths):
            for slot, depth in enumerate(depths):
                slots_BS[row, lengths[row] + slot] = lengths[row] + depth - 1
        slots_BS = slots_BS.to(positions_BQ.device)
        for row, start in enumerate(starts):
            count = min(positions_BQ.shape[1], end - start)
            slots_BS[row, start : start + count] = positions_BQ[row, :count]
        return slots_BS
