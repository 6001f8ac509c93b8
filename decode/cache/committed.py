"""What is kept of committed tokens on the device: their ids, for processors that read the text, and their features.

The ids are one tensor that grows, so a round costs their copy at most, not their conversion from a list. Features of
the target are kept from the pass that reads the tokens until the drafter takes them:

    row 0   f3 f4 f5        `add` appends on the right, `take` removes from the left, for all texts at once
    row 1   f2 . .
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

# Shapes: n rows of logits, B texts, S slots, T tokens, D draft tokens on a path, Q tokens of a pass, F size of the
# features per position.

SPARE = 64
"""Slots that are allocated in addition to the tokens."""


class Contexts(Protocol):
    """The tokens before n rows of logits."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens before each row."""
        ...

    @property
    def texts(self) -> Sequence[int]:
        """For each row the index of its text in the batch."""
        ...

    def ids(self, rows: Sequence[int]) -> torch.LongTensor:
        """Return the tokens [len(rows), T] before these rows, which have equal lengths."""
        ...

    def repeated(self) -> torch.LongTensor:
        """Return [n, T]: the tokens before every row, followed by copies of its first token where it is shorter."""
        ...


def token_ids(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> torch.LongTensor:
    """Return rows of equal length as [B, T], with the type that transformers' processors and criteria declare."""
    return cast(torch.LongTensor, torch.tensor(rows, device=device))  # int64, which no annotation of torch's says


class ListContexts:
    """Contexts that are given as lists; all rows belong to one text."""

    def __init__(self, rows: Sequence[list[int]], text: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.lengths, self.texts = [len(row) for row in rows], [text] * len(rows)

    def ids(self, rows: Sequence[int]) -> torch.LongTensor:
        return token_ids([self._rows[row] for row in rows], self._device)

    def repeated(self) -> torch.LongTensor:
        width = max(self.lengths)
        return token_ids([row + row[:1] * (width - len(row)) for row in self._rows], self._device)


class CommittedTokens:
    """The committed tokens of B texts on the device, [B, S]."""

    def __init__(self, texts: Sequence[list[int]], device: torch.device) -> None:
        self.lengths = [0] * len(texts)
        self._ids_BS = torch.zeros(len(texts), 0, dtype=torch.int64, device=device)
        self.append(texts)

    def append(self, new: Sequence[list[int]]) -> None:
        """Append tokens to every text."""
        width = max(map(len, new))
        if width == 0:
            return
        self._reserve(max(self.lengths) + width)
        rows = [number for number, tokens in enumerate(new) for _ in tokens]
        slots = [start + i for start, tokens in zip(self.lengths, new, strict=True) for i in range(len(tokens))]
        values = [token for tokens in new for token in tokens]
        place = torch.tensor([rows, slots, values], device=self._ids_BS.device)
        self._ids_BS[place[0], place[1]] = place[2]
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, new, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Keep only these texts, in this order."""
        self._ids_BS, self.lengths = self._ids_BS[rows], [self.lengths[row] for row in rows]

    def with_paths(
        self, rows: Sequence[int], paths_nD: Tensor | None, depths: Sequence[int], texts: Sequence[int]
    ) -> "StoredContexts":
        """Return contexts of texts `rows`, each followed by the first `depths` tokens of its row of `paths_nD`.

        `texts`: for each row the index of its text in the whole batch.
        """
        lengths = [self.lengths[row] + depth for row, depth in zip(rows, depths, strict=True)]
        if paths_nD is not None:
            self._reserve(max(self.lengths) + paths_nD.shape[1])
        return StoredContexts(self, rows, paths_nD, lengths, texts)

    def with_tokens(
        self, rows: Sequence[int], paths: Sequence[Sequence[int]], texts: Sequence[int]
    ) -> "StoredContexts":
        """Return contexts of texts `rows`, each followed by the tokens of its path; `texts` as in `with_paths`."""
        longest = max(map(len, paths))
        wide = [[*path, *[0] * (longest - len(path))] for path in paths]
        paths_nD = torch.tensor(wide, device=self._ids_BS.device) if longest else None
        return self.with_paths(rows, paths_nD, list(map(len, paths)), texts)

    def tokens(self, rows: Sequence[int], paths_nD: Tensor | None, width: int) -> Tensor:
        """Return [n, width]: the tokens of texts `rows`, then those of `paths_nD`."""
        index_n = torch.tensor(rows, device=self._ids_BS.device)
        if paths_nD is None:
            return self._ids_BS[index_n, :width]
        D = paths_nD.shape[1]
        starts_n1 = torch.tensor([[self.lengths[row]] for row in rows], device=self._ids_BS.device)
        wide_nS = self._ids_BS[index_n, : max(width, max(self.lengths) + D)]
        slots_nD = starts_n1 + torch.arange(D, device=self._ids_BS.device)
        return wide_nS.scatter_(1, slots_nD, paths_nD)[:, :width]

    def _reserve(self, slots: int) -> None:
        B, held = self._ids_BS.shape
        if slots > held:
            self._ids_BS = torch.cat([self._ids_BS, self._ids_BS.new_zeros(B, max(held, slots - held + SPARE))], 1)


class StoredContexts:
    """Contexts of draft nodes: the committed tokens of their texts and the tokens on the path to each node."""

    def __init__(
        self,
        committed: CommittedTokens,
        rows: Sequence[int],
        paths_nD: Tensor | None,
        lengths: Sequence[int],
        texts: Sequence[int],
    ) -> None:
        self._committed, self._rows, self._paths_nD = committed, rows, paths_nD
        self.lengths, self.texts = lengths, texts

    def ids(self, rows: Sequence[int]) -> torch.LongTensor:
        paths = None if self._paths_nD is None else self._paths_nD[list(rows)]
        width = self.lengths[rows[0]]
        return cast(torch.LongTensor, self._committed.tokens([self._rows[row] for row in rows], paths, width))

    def repeated(self) -> torch.LongTensor:
        ids_nT = self._committed.tokens(self._rows, self._paths_nD, max(self.lengths))
        lengths_n1 = torch.tensor([[length] for length in self.lengths], device=ids_nT.device)
        own_nT = torch.arange(ids_nT.shape[1], device=ids_nT.device) < lengths_n1
        return cast(torch.LongTensor, torch.where(own_nT, ids_nT, ids_nT[:, :1]))


# Features.


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
