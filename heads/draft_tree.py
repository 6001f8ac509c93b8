"""Drafts: the tokens that a drafter proposes in one round, chosen deterministically or drawn at random.

A `Draft` holds tokens that were chosen in any way: the best k, pruned, re-sorted, copied from the prompt. A
`DrawnDraft` holds tokens that were drawn from the drafter's q one after the other, all of which were kept; only
`Drawing` creates it. Verification rules that compare p with q require a `DrawnDraft`: they are not lossless for tokens
that were selected after their values were known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Shapes: N draft tokens, V vocabulary.

ROOT = -1
"""The parent of the first draft tokens: the last committed token."""


@dataclass(frozen=True)
class Draft:
    """A tree of draft tokens, chosen in any way. A chain is a tree with one path.

    Nodes are stored in topological order. `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token. Siblings hold different tokens, unless they were drawn independently.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        """Return a draft with one path of these tokens."""
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @cached_property
    def is_chain(self) -> bool:
        """True if every token is the child of the one before it."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of the root (entry 0) and of each node i (entry i + 1), in order."""
        below: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return below

    @cached_property
    def depths(self) -> list[int]:
        """Number of nodes on the path to each node, including itself."""
        if self.is_chain:
            return list(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return len(self) if self.is_chain else max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root to `node`."""
        if self.is_chain:
            return list(range(node + 1))
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def keep(self, nodes: list[int]) -> "Draft":
        """Return a draft of these nodes in this order, each after its parent. It is never a `DrawnDraft`."""
        place = {ROOT: ROOT}
        for new, old in enumerate(nodes):
            place[old] = new
        return Draft(tuple(self.tokens[i] for i in nodes), tuple(place[self.parents[i]] for i in nodes))

    def __len__(self) -> int:
        return len(self.tokens)


class DrawnDraft(Draft):
    """A tree whose tokens were drawn from the drafter's q; only `Drawing` creates it."""

    q: tuple[Tensor, ...]
    """For each node the distribution [V] after its parent, with all logits processors applied; siblings share it."""
    replacement: bool
    """True: siblings are independent draws from q. False: each is drawn from q without the earlier siblings."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a DrawnDraft is created by Drawing only; use Draft for tokens that were chosen otherwise")

    @property
    def q_NV(self) -> Tensor:
        """The distributions [N, V] from which the tokens were drawn."""
        return torch.stack(self.q)


class Drawing:
    """Draws a tree of tokens from q, one by one, and keeps all of them.

    The call of `add` decides that a token is submitted before the token is known; tokens cannot be removed, and tokens
    that were not drawn here cannot be added. The rules for `DrawnDraft` require this ("non-anticipation").

    Args:
        draw: returns an index with probability proportional to the weights [V], i.e. `Rng.categorical`.
        replacement: whether siblings are drawn independently of each other.
    """

    def __init__(self, draw: Callable[[Tensor], int], *, replacement: bool = False) -> None:
        self._draw, self._replacement = draw, replacement
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._q: list[Tensor] = []

    def add(self, parent: int, q_V: Tensor) -> int | None:
        """Draw one more child of `parent` from `q_V` and return its token.

        Without replacement, return None and add no child once all tokens in the support of q are drawn.
        """
        weights_V = q_V
        if not self._replacement:
            siblings = [self.tokens[i] for i, other in enumerate(self.parents) if other == parent]
            if siblings:
                weights_V = q_V.clone()
                weights_V[siblings] = 0
                if not weights_V.any():
                    return None
        token = self._draw(weights_V)
        self.tokens.append(token)
        self.parents.append(parent)
        self._q.append(q_V)
        return token

    def draft(self) -> DrawnDraft:
        """Return the draft of all tokens that were drawn."""
        draft = object.__new__(DrawnDraft)
        object.__setattr__(draft, "tokens", tuple(self.tokens))
        object.__setattr__(draft, "parents", tuple(self.parents))
        object.__setattr__(draft, "q", tuple(self._q))
        object.__setattr__(draft, "replacement", self._replacement)
        return draft
