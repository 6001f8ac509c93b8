"""Toy models with the decoder's interfaces: tables of fp64 logits that depend on the whole text."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from exact.enumeration import Tokens
from torch import Tensor

from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter, Level, SequenceState
from draftsmith.heads.draft_tree import ROOT, Draft, Parents

VOCAB = 5
"""With three tokens or fewer, wrong rules can agree with correct ones by coincidence."""
SPREAD = 1.5
"""Standard deviation of the logits: neither nearly flat nor nearly certain."""


class ToyModel:
    """fp64 logits [V] after every text, from a seed; `banned` tokens have probability zero."""

    def __init__(self, seed: int, banned: frozenset[int] = frozenset()) -> None:
        @cache
        def logits(text: Tokens) -> Tensor:
            # The hash of a tuple of integers is the same in every process.
            generator = torch.Generator().manual_seed(hash((seed, text)) % 2**62)
            row_V = torch.randn(VOCAB, dtype=torch.float64, generator=generator) * SPREAD
            row_V[list(banned)] = -torch.inf
            return row_V

        self.logits = logits


class ToyTarget(TransformersTarget):
    """A toy model as a target. It uses only the tokens that it has read, as a model with a cache does."""

    context_limit = None

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.read: list[Tokens] = []

    def prefill(self, texts: Sequence[SequenceState], layers: tuple[int, ...] = ()) -> Tensor:
        self.read = [tuple(text.tokens) for text in texts]
        return torch.stack([self.model.logits(read) for read in self.read])

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        rows = tokens_BQ.tolist()
        shapes = list(shapes) if len(shapes) == len(rows) else [shapes[0]] * len(rows)
        self.read = [(*read, row[0]) for read, row in zip(self.read, rows, strict=True)]
        self._drafts = [Draft(tuple(row[1 : len(shape) + 1]), shape) for row, shape in zip(rows, shapes, strict=True)]
        logits_BQV = torch.zeros(*tokens_BQ.shape, VOCAB, dtype=torch.float64)
        for row, (read, draft) in enumerate(zip(self.read, self._drafts, strict=True)):
            for node in range(ROOT, len(draft)):
                logits_BQV[row, node + 1] = self.model.logits(read + below(draft, node))
        return logits_BQV

    def commit(self, paths: list[list[int]]) -> None:
        for row, (draft, path) in enumerate(zip(self._drafts, paths, strict=True)):
            self.read[row] += tuple(draft.tokens[node] for node in path)

    def hidden(self, nodes: list[int]) -> None:
        return None

    def features(self, paths: list[list[int]] | None) -> None:
        return None

    def drop(self, rows: list[int]) -> None:
        self.read = [self.read[row] for row in rows]


class ToyDrafter(Drafter):
    """A toy model as a drafter; with `independent`, its logits do not depend on draft tokens, as in Medusa."""

    type: ClassVar[str] = "toy"

    def __init__(self, model: ToyModel, *, independent: bool = False) -> None:
        super().__init__()
        self.model, self.independent = model, independent

    def begin(self, rows: list[int]) -> Tensor:
        self._paths: list[list[Tokens]] = [[()] for _ in self.context.sequences]
        return self._logits()[:, 0]

    def extend(self, level: Level) -> Tensor:
        tokens, parents = level.tokens_Bn.tolist(), level.parents_Bn
        above = [[0]] * len(tokens) if parents is None else parents.tolist()
        self._paths = [
            [(*paths[parent], token) for token, parent in zip(*of_row, strict=True)]
            for paths, *of_row in zip(self._paths, tokens, above, strict=True)
        ]
        return self._logits()

    def _logits(self) -> Tensor:
        rows = zip(self.context.sequences, self._paths, strict=True)
        return torch.stack(
            [
                torch.stack([self.model.logits((*text.tokens, *self._seen(path))) for path in paths])
                for text, paths in rows
            ]
        )

    def _seen(self, path: Tokens) -> Tokens:
        # VOCAB + depth is not a token, so each depth gets a table of its own.
        return (VOCAB + len(path),) if self.independent and path else path


def below(tree: Draft, node: int) -> Tokens:
    """Return the tokens from a child of the root down to `node`."""
    path: Tokens = ()
    while node != ROOT:
        path = (tree.tokens[node], *path)
        node = tree.parents[node]
    return path
