"""Toy models with the decoder's interfaces: tables of fp64 logits that depend on the whole text."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from exact.enumeration import Tokens
from torch import Tensor

from draftsmith.heads.base import Drafter, SequenceState, Tree
from draftsmith.heads.draft_tree import ROOT, Draft

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


class ToyTarget:
    """A toy model as a target. It uses only the tokens that it has read, as a model with a cache does."""

    context_limit = None

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.read: list[Tokens] = []

    def prefill(self, texts: Sequence[SequenceState], layers: tuple[int, ...] = ()) -> Tensor:
        self.read = [tuple(text.tokens) for text in texts]
        return torch.stack([self.model.logits(read) for read in self.read])

    def verify(self, roots: list[int], drafts: list[Draft]) -> list[Tensor]:
        self.read = [(*read, root) for read, root in zip(self.read, roots, strict=True)]
        self._drafts = drafts
        return [
            torch.stack([self.model.logits(read + below(draft, node)) for node in range(ROOT, len(draft))])
            for read, draft in zip(self.read, drafts, strict=True)
        ]

    def commit(self, paths: list[list[int]]) -> None:
        for row, (draft, path) in enumerate(zip(self._drafts, paths, strict=True)):
            self.read[row] += tuple(draft.tokens[node] for node in path)

    def hidden(self, row: int, node: int) -> None:
        return None

    def features(self, row: int, nodes: list[int] | None = None) -> None:
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
        return torch.stack([self.model.logits(tuple(text.tokens)) for text in self.context.texts])

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        logits = []
        for text, tree, wanted in zip(self.context.texts, trees, nodes, strict=True):
            rows = [self.model.logits((*text.tokens, *self._seen(tree, node))) for node in wanted]
            logits.append(torch.stack(rows) if rows else torch.empty(0, VOCAB))
        return logits

    def _seen(self, tree: Tree, node: int) -> Tokens:
        # VOCAB + depth is not a token, so each depth gets a table of its own.
        return (VOCAB + tree.depths[node],) if self.independent else below(tree, node)


def below(tree: Tree | Draft, node: int) -> Tokens:
    """Return the tokens from a child of the root down to `node`."""
    path: Tokens = ()
    while node != ROOT:
        path = (tree.tokens[node], *path)
        node = tree.parents[node]
    return path
