"""The Draft: what a drafter proposes in one round, and the two ways in which its tokens can have come about.

A `Draft` holds tokens that were chosen in any way whatsoever: the best k, pruned, re-sorted, copied from the prompt.
A `DrawnDraft` holds tokens that were drawn at random from the drafter's q, one after the other, none taken back; only
its `Drawing` can make one. The rules that weigh p against q ask for a `DrawnDraft`, because they are wrong for tokens
that were looked at before it was decided to submit them.
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
    """A tree of draft tokens, chosen in whatever way. A chain is the tree with one path.

    Nodes are stored in topological order. `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token. Siblings hold different tokens, unless they were drawn independently.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        """Tokens that follow one another."""
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @cached_property
    def is_chain(self) -> bool:
        """True if every token is the child of the one before it."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def children(self) -> list[list[int]]:
        """For the root (entry 0) and each node i (entry i + 1), its children in their order."""
        below: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return below

    @cached_property
    def depths(self) -> list[int]:
        """Nodes on the path to each node, itself included."""
        if self.is_chain:
            return list(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return len(self) if self.is_chain else max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Nodes from a child of the root down to `node`."""
        if self.is_chain:
            return list(range(node + 1))
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def keep(self, nodes: list[int]) -> "Draft":
        """Only these nodes, in this order; each after its parent. The result is a `Draft`, whatever this one is."""
        place = {ROOT: ROOT}
        for new, old in enumerate(nodes):
            place[old] = new
        return Draft(tuple(self.tokens[i] for i in nodes), tuple(place[self.parents[i]] for i in nodes))

    def __len__(self) -> int:
        return len(self.tokens)


class DrawnDraft(Draft):
    """A tree whose tokens were drawn from the drafter's q. Made by `Drawing` alone."""

    q: tuple[Tensor, ...]
    """For each node the distribution [V] behind its parent, after every logits processor; siblings share it."""
    replacement: bool
    """True: siblings are independent draws from q. False: each is drawn from q without the earlier ones."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a DrawnDraft is made by Drawing alone; tokens chosen otherwise make a Draft")

    @property
    def q_NV(self) -> Tensor:
        """Distribution [N, V] from which each token was drawn."""
        return torch.stack(self.q)


class Drawing:
    """Draws a tree of tokens from q, one by one, and keeps every one of them.

    Whether a token is submitted is decided by calling `add`, before the token is known; there is no way to take it
    back, nor to add one that was not drawn here. That is what the rules for `DrawnDraft` rest on ("non-anticipation").

    Args:
        draw: an index with probability proportional to the weights [V], i.e. `Rng.categorical`.
        replacement: whether siblings are drawn independently of one another.
    """

    def __init__(self, draw: Callable[[Tensor], int], *, replacement: bool = False) -> None:
        self._draw, self._replacement = draw, replacement
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._q: list[Tensor] = []

    def add(self, parent: int, q_V: Tensor) -> int | None:
        """Draw one more child of `parent`, whose distribution is `q_V`: its token.

        None, and no child, when drawing without replacement has used up the support of q.
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
        """All that was drawn."""
        draft = object.__new__(DrawnDraft)
        object.__setattr__(draft, "tokens", tuple(self.tokens))
        object.__setattr__(draft, "parents", tuple(self.parents))
        object.__setattr__(draft, "q", tuple(self._q))
        object.__setattr__(draft, "replacement", self._replacement)
        return draft
