"""The positions of a batch that training reads, as one flat row: no state is computed that nothing reads.

A state at position t of draft step k is trained where position t + k + 1 of its document is in the loss mask, and read
by the later steps at t. Everywhere else, at prompts and at the ends of rows, only the first step's keys and values are
read, and those only up to the last query of the document:

    row 0   p p p p r r r r      queries            3 4 5 6            11 12 13          (one step)
    row 1   p p p r r r r .      keys       0 1 2 3 4 5 6  8 9 10 11 12 13
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.hidden_states import positions_like
from draftsmith.heads.model_config import has_data
from draftsmith.heads.sequence_part import SequencePart

# Shapes: B rows, T positions, P = B * T, M keys, N queries, X positions of a step, D documents, L keys in the part of a
# process, g key heads, d head size. Tensors `*_M`, `*_N` and `*_X` hold indices in the flattened batch [P].

MULTIPLE, SHARE = 16, 32
"""Flat rows are padded to a multiple of `MULTIPLE` that is at most a `SHARE`th of them, so that few lengths occur: see
train/step.py."""


@dataclass(frozen=True)
class DocumentSpan:
    """Successive queries of a document and the keys up to the last of them."""

    queries: slice
    keys: slice


class ReadPositions:
    """Positions, as indices in the flattened batch [B * T], that the steps of a drafter read.

    Args:
        steps: number of draft steps; step k at position t is trained towards position t + k + 1.
        part: the share of this process: of the keys, and of the queries.
    """

    def __init__(self, signals: TeacherSignals, steps: int, part: SequencePart | None = None) -> None:
        self._signals, self._part = signals, part
        ids_BT = signals.input_ids_BT
        indices, runs, documents = _layout(*_on_host(_trained(signals, steps), signals.documents_BT))
        keys, queries = len(indices[0]), len(indices[1])
        self.count, total = _rounded(keys), _rounded(queries)
        if keys != queries and self.count == total:  # so that the number of queries tells which they are
            self.count += MULTIPLE
        own_keys, own = slice(0, self.count), slice(0, total)
        if part is not None:
            own_keys, own = part.positions(self.count), part.positions(total)
        self._own_keys = own_keys.stop - own_keys.start
        sizes = (self.count, total, total, total)
        keys_M, queries_N, among_N, ends_N = (
            nn.functional.pad(x, (0, size - len(x))).to(ids_BT.device) for x, size in zip(indices, sizes, strict=True)
        )
        self.queries_N, self._ends_N = queries_N[own], ends_N[own]
        self.runs = list(_within(runs, own))
        """The documents' spans of queries."""
        self.first_X = keys_M
        """Positions of the first step: the keys, then with a part its queries too, which may lie among other keys."""
        self.first_runs = list(_within(documents, own_keys))
        self.among_N: Tensor | None = None if keys == queries else among_N
        """Index of each query in `first_X`; None where these are the queries."""
        if part is not None:
            self.first_X = torch.cat([keys_M[own_keys], self.queries_N])
            self.first_runs += [_shifted(run, self._own_keys) for run in self.runs]
            self.among_N = torch.arange(self._own_keys, len(self.first_X), device=ids_BT.device)

    def values(self, values_BTX: Tensor, indices_X: Tensor) -> Tensor:
        """Return values [1, X, ...] at these indices."""
        return values_BTX.flatten(0, 1).index_select(0, indices_X)[None]

    def tokens(self, indices_X: Tensor, by: int) -> Tensor:
        """Return the token [1, X] `by` positions after each index; 0 after the end of the row."""
        return self.values(shifted(self._signals.input_ids_BT, by), indices_X)

    def positions(self, indices_X: Tensor) -> Tensor:
        """Return the positions [1, X] in their documents of these indices."""
        ids_BT = self._signals.input_ids_BT
        return self.values(positions_like(ids_BT, self._signals.documents_BT).expand_as(ids_BT), indices_X)

    def towards(self, offset: int) -> Tensor:
        """Return the index [N] `offset` positions after each query, -1 outside of its document."""
        indices_N = self.queries_N + offset
        return indices_N.where(indices_N < self._ends_N, -1)

    def keys(self, first_1gXd: Tensor) -> Tensor:
        """Return the first step's keys or values of all keys [1, g, M, d], those of other parts included."""
        own_1gLd = first_1gXd[:, :, : self._own_keys]
        return own_1gLd if self._part is None else self._part.whole(own_1gLd, self.count)


def shifted(ids_BT: Tensor, by: int) -> Tensor:
    """Return ids shifted left by `by`; zeros fill the end, where nothing is trained."""
    by = min(by, ids_BT.shape[1])
    return nn.functional.pad(ids_BT[:, by:], (0, by))


def _trained(signals: TeacherSignals, steps: int) -> Tensor:
    """Return whether a state at each position [B, T] is trained in some step."""
    mask_BT, documents_BT = signals.mask_BT, signals.documents_BT
    T = mask_BT.shape[1]
    trained_BT = torch.zeros_like(mask_BT)
    for by in range(1, min(steps, T - 1) + 1):
        towards_BT = mask_BT[:, by:]
        if documents_BT is not None:
            towards_BT = towards_BT & (documents_BT[:, by:] == documents_BT[:, :-by])
        trained_BT[:, : T - by] |= towards_BT
    return trained_BT


def _on_host(trained_BT: Tensor, documents_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return masks [B, T] of the trained positions and of the begins of documents, in host memory by one transfer.

    Fake tensors, which memory is estimated with, have no values; as many positions as `nonzero` returns are trained.
    """
    B, T = trained_BT.shape
    if not has_data(trained_BT):
        count = -(-trained_BT.nonzero().shape[0] // B)
        with unset_fake_temporarily():
            places_BT = torch.arange(T, device="cpu").expand(B, T)
            return places_BT >= T - count, places_BT == 0
    first_BT = torch.zeros_like(trained_BT)
    first_BT[:, 0] = True
    if documents_BT is not None:
        first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    trained_BT, first_BT = torch.stack([trained_BT, first_BT]).cpu()
    return trained_BT, first_BT


def _layout(
    trained_BT: Tensor, first_BT: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[DocumentSpan], list[DocumentSpan]]:
    """Return the positions that are read, in host memory.

    Indices of keys [M] and queries [N], for each query its index among the keys and the end of its document; then the
    runs of queries, and all keys as queries.
    """
    with unset_fake_temporarily():
        trained_P, first_P = trained_BT.flatten(), first_BT.flatten()
        document_P = first_P.cumsum(0) - 1
        starts_D, queries_N = first_P.nonzero()[:, 0], trained_P.nonzero()[:, 0]
        ends_D = nn.functional.pad(starts_D[1:], (0, 1), value=len(first_P))
        document_N = document_P[queries_N]
        # The index after the last query of each document; its start where it has none.
        read_D = starts_D.scatter_reduce(0, document_N, queries_N + 1, "amax")
        key_P = torch.arange(len(first_P), device="cpu") < read_D[document_P]
        before_P = nn.functional.pad(key_P.cumsum(0), (1, 0))
        among_N = before_P[queries_N]
        key_starts = before_P[starts_D].tolist()
        documents = list(zip(key_starts, before_P[read_D].tolist(), strict=True))
        new_N = torch.ones_like(queries_N, dtype=torch.bool)
        new_N[1:] = (queries_N[1:] != queries_N[:-1] + 1) | (document_N[1:] != document_N[:-1])
        begins = new_N.nonzero()[:, 0].tolist()
        runs = [
            DocumentSpan(slice(begin, end), slice(key_starts[document_N[begin]], int(among_N[end - 1]) + 1))
            for begin, end in zip(begins, [*begins[1:], len(queries_N)], strict=False)
        ]
        whole = [DocumentSpan(slice(start, end), slice(start, end)) for start, end in documents if start < end]
        return (key_P.nonzero()[:, 0], queries_N, among_N, ends_D[document_N]), runs, whole


def _within(runs: Sequence[DocumentSpan], own: slice) -> Iterator[DocumentSpan]:
    """Yield the parts of runs whose queries lie in `own`, counted from its start."""
    for run in runs:
        start, stop = max(run.queries.start, own.start), min(run.queries.stop, own.stop)
        if start < stop:
            last = run.keys.stop - (run.queries.stop - stop)
            yield DocumentSpan(slice(start - own.start, stop - own.start), slice(run.keys.start, last))


def _shifted(run: DocumentSpan, by: int) -> DocumentSpan:
    return DocumentSpan(slice(run.queries.start + by, run.queries.stop + by), run.keys)


def _rounded(count: int) -> int:
    """Return the length of a flat row with `count` positions, at least one multiple."""
    multiple = max(MULTIPLE, 1 << (count // SHARE).bit_length() - 1 if count >= SHARE else 0)
    return max(multiple, -(-count // multiple) * multiple)
