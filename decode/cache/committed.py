"""Committed tokens on the device: their ids, for processors that read the sequence, and their features.

The ids are one tensor that grows, so a round costs their copy at most, not their conversion from a list. Features of
the target are kept from the pass that reads the tokens until the drafter takes them:

    row 0   f3 f4 f5        `add` appends on the right, `take` removes from the left, for all sequences at once
    row 1   f2 . .
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from draftsmith.heads.rows import Counts, Rows, rows_of

# Shapes: n rows of logits, B sequences, S slots, T tokens, D draft tokens on a path, Q tokens of a pass, F size of the
# features per position.

SPARE = 64
"""Slots that are allocated in addition to the tokens."""


class CommittedSequence(Protocol):
    """A sequence as processors read it."""

    tokens: list[int]
    """The committed tokens."""
    padding: list[int]
    """Before them, on the left of the prompt in a batch."""
    number: int
    """Index of the sequence in its batch."""


class CommittedTokens:
    """The committed tokens of B sequences on the device, [B, S]."""

    def __init__(self, sequences: Sequence[list[int]], device: torch.device) -> None:
        self.lengths = Counts([0] * len(sequences), device)
        self._ids_BS = torch.zeros(len(sequences), 0, dtype=torch.int64, device=device)
        self.append(sequences)

    @staticmethod
    def of(sequences: Sequence[CommittedSequence], device: torch.device) -> "CommittedTokens":
        """Return the committed tokens of sequences, with padding."""
        return CommittedTokens([sequence.padding + sequence.tokens for sequence in sequences], device)

    def append(self, new: Sequence[list[int]]) -> None:
        """Append tokens to every sequence."""
        rows = Rows.of(new, self._ids_BS.device)
        if rows.width == 0:
            return
        self._reserve(max(self.lengths) + rows.width)
        # Padding takes slots that later tokens overwrite.
        slots_BW = self.lengths.on_device_B[:, None] + torch.arange(rows.width, device=self._ids_BS.device)
        self._ids_BS.scatter_(1, slots_BW, rows.values_BW)
        self.lengths = self.lengths + rows.counts

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order."""
        self._ids_BS, self.lengths = rows_of(self._ids_BS, rows), self.lengths.keep(rows)

    def with_paths(
        self, rows: Sequence[int], paths_nD: Tensor | None, depths: Counts, sequences: Sequence[int]
    ) -> "Contexts":
        """Return contexts of sequences `rows`, each followed by the first `depths` tokens of its row of `paths_nD`.

        `sequences`: for each row the index of its sequence in the whole batch.
        """

        def on_device() -> Tensor:
            return self._of_sequences(self.lengths.on_device_B[:, None], rows)[:, 0] + depths.on_device_B

        values = [self.lengths[row] + depth for row, depth in zip(rows, depths, strict=True)]
        lengths = Counts(values, self._ids_BS.device, on_device)
        if paths_nD is not None:
            self._reserve(max(self.lengths) + paths_nD.shape[1])
        return Contexts(self, rows, paths_nD, lengths, sequences)

    def with_tokens(self, rows: Sequence[int], paths: Sequence[Sequence[int]], sequences: Sequence[int]) -> "Contexts":
        """Return contexts of sequences `rows`, each followed by the tokens of its path; see `with_paths`."""
        longest = max(map(len, paths))
        wide = [[*path, *[0] * (longest - len(path))] for path in paths]
        paths_nD = torch.tensor(wide, device=self._ids_BS.device) if longest else None
        return self.with_paths(rows, paths_nD, Counts(map(len, paths), self._ids_BS.device), sequences)

    def tokens(self, rows: Sequence[int], paths_nD: Tensor | None, width: int) -> Tensor:
        """Return [n, width]: the tokens of sequences `rows`, then those of `paths_nD`."""
        if paths_nD is None:
            return self._of_sequences(self._ids_BS[:, :width], rows)
        D = paths_nD.shape[1]
        starts_n1 = self._of_sequences(self.lengths.on_device_B[:, None], rows)
        wide_nS = self._of_sequences(self._ids_BS[:, : max(width, max(self.lengths) + D)], rows)
        slots_nD = starts_n1 + torch.arange(D, device=self._ids_BS.device)
        return wide_nS.scatter_(1, slots_nD, paths_nD)[:, :width]

    def _of_sequences(self, values_BX: Tensor, rows: Sequence[int]) -> Tensor:
        """Return a copy of the values of sequences `rows`; without an upload where each has equally many rows."""
        each = len(rows) // len(self.lengths)
        if list(rows) == [row for row in range(len(self.lengths)) for _ in range(each)]:
            return values_BX.repeat_interleave(each, 0)
        return values_BX[torch.tensor(rows, device=values_BX.device)]

    def _reserve(self, slots: int) -> None:
        B, held = self._ids_BS.shape
        if slots > held:
            self._ids_BS = torch.cat([self._ids_BS, self._ids_BS.new_zeros(B, max(held, slots - held + SPARE))], 1)


class Contexts:
    """The tokens before n rows of logits: the committed ones of their sequences and those on the path to each node.

    `lengths`: number of tokens before each row. `sequences`: for each row the index of its sequence in the whole batch.
    """

    def __init__(
        self,
        committed: CommittedTokens,
        rows: Sequence[int],
        paths_nD: Tensor | None,
        lengths: Counts,
        sequences: Sequence[int],
    ) -> None:
        self._committed, self._rows, self._paths_nD = committed, rows, paths_nD
        self.lengths, self.sequences = lengths, sequences

    def ids(self, rows: Sequence[int]) -> torch.LongTensor:
        """Return the tokens [len(rows), T] before these rows, which have equal lengths."""
        paths = None if self._paths_nD is None else self._paths_nD[list(rows)]
        width = self.lengths[rows[0]]
        return cast(torch.LongTensor, self._committed.tokens([self._rows[row] for row in rows], paths, width))

    def repeated(self) -> torch.LongTensor:
        """Return [n, T]: the tokens before every row, followed by copies of its first token where it is shorter."""
        ids_nT = self._committed.tokens(self._rows, self._paths_nD, max(self.lengths))
        own_nT = torch.arange(ids_nT.shape[1], device=ids_nT.device) < self.lengths.on_device_B[:, None]
        return cast(torch.LongTensor, torch.where(own_nT, ids_nT, ids_nT[:, :1]))


def contexts_of(rows: Sequence[list[int]], device: torch.device, sequence: int = 0) -> Contexts:
    """Return contexts that are given as lists; all rows belong to one sequence."""
    none = Counts([0] * len(rows), device)
    return CommittedTokens(rows, device).with_paths(range(len(rows)), None, none, [sequence] * len(rows))


# Features.


def at_positions(values_BQF: Tensor, positions: Rows) -> Tensor:
    """Return the values [B, n, F] at these positions of each row; rows with fewer are padded with other values.

    A view, which copies nothing, where the positions of all rows rise by one from 0.
    """
    if positions.rise_from_0:
        return values_BQF[:, : positions.width]
    return _gathered(values_BQF, positions.values_BW)


def _gathered(values_BQF: Tensor, positions_Bn: Tensor) -> Tensor:
    rows_B1 = torch.arange(len(positions_Bn), device=positions_Bn.device)[:, None]
    return values_BQF[rows_B1, positions_Bn]


class FeatureQueue:
    """Features of the next tokens of each sequence, in the order of the tokens."""

    def __init__(self) -> None:
        self.counts: Counts | None = None
        """Number of tokens of each sequence; None before the first."""
        self.values_BSF: Tensor | None = None
        """As wide as the largest count, padded on the right; None while the queue is empty."""

    def add(self, features_BQF: Tensor, counts: Counts) -> None:
        """Append the features of the first `counts` tokens of each row."""
        new_BQF, held = features_BQF[:, : max(counts)], self.counts
        if self.values_BSF is None or held is None:
            self.values_BSF, self.counts = new_BQF, counts
            return
        self.counts = held + counts
        both_BSF, S = torch.cat([self.values_BSF, new_BQF], 1), self.values_BSF.shape[1]
        if held.equal:  # to S, as the storage is as wide as the largest count
            self.values_BSF = both_BSF
            return
        position_n, held_B1 = torch.arange(max(self.counts), device=both_BSF.device), held.on_device_B[:, None]
        position_Bn = torch.where(position_n < held_B1, position_n, position_n - held_B1 + S)
        self.values_BSF = _gathered(both_BSF, position_Bn.clamp_max(both_BSF.shape[1] - 1))

    def take(self, counts: Sequence[int]) -> Tensor:
        """Remove and return the features of the next `counts` tokens of each sequence, see `Context.take_features`."""
        values_BSF, held = self.values_BSF, self.counts
        assert values_BSF is not None, "only drafters that need features take them"
        assert held is not None
        taken = Counts.of(counts, held.device)
        self.counts, self.values_BSF = held + taken.map(lambda count: -count), None
        most = max(self.counts)
        if most > 0:
            self.values_BSF = self._after(values_BSF, taken, most)
        return values_BSF[:, : max(taken)]

    def _after(self, values_BSF: Tensor, taken: Counts, most: int) -> Tensor:
        """Return the values after the first ones of each row, at most `most` of them."""
        assert self.counts is not None
        starts = {count for count, rest in zip(taken, self.counts, strict=True) if rest > 0}
        if len(starts) == 1:
            (start,) = starts
            return values_BSF[:, start : start + most]
        position_Bn = taken.on_device_B[:, None] + torch.arange(most, device=values_BSF.device)
        return _gathered(values_BSF, position_Bn.clamp_max(values_BSF.shape[1] - 1))

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order."""
        if self.values_BSF is not None and self.counts is not None:
            self.counts = self.counts.keep(rows)
            self.values_BSF = rows_of(self.values_BSF[:, : max(self.counts)], rows)
