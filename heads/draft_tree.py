"""Drafts: the tokens that a drafter proposes for one sequence in one round, chosen deterministically or drawn."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: V vocabulary.

ROOT = -1
"""The parent of the first draft tokens: the last committed token."""
NO_NODE = -1
"""The token of a node that a sequence does not have, in a chain whose length it shares with other sequences."""
Parents = tuple[int, ...]
"""The shape of a draft: the parent of each node."""


@lru_cache(maxsize=4096)
def chain_parents(length: int) -> Parents:
    """Return the shape of a chain."""
    return tuple(range(-1, length - 1))


@lru_cache(maxsize=4096)
def depths_of(parents: Parents) -> list[int]:
    """Return the number of nodes on the path to each node, including itself."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


@lru_cache(maxsize=4096)
def children_of(parents: Parents) -> list[list[int]]:
    """Return the children of the root (entry 0) and of each node i (entry i + 1), in order."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        below[parent + 1].append(node)
    return below


@lru_cache(maxsize=4096)
def path_to(parents: Parents, node: int) -> list[int]:
    """Return the nodes from a child of the root to `node`; none for `ROOT`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class Draft:
    """A tree of draft tokens, chosen in any way or drawn from q. A chain is a tree with one path.

    Nodes are stored in topological order. `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token. Siblings hold different tokens. Tokens without q were chosen: the best k, pruned, re-sorted, or
    retrieved from the prompt.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    _q = None
    """Of drawn tokens, set by `DraftBuilder`; no field, so that `replace` and `keep` return chosen drafts."""

    @property
    def drawn(self) -> bool:
        """Whether the tokens were drawn from q."""
        return self._q is not None

    @property
    def q(self) -> "tuple[Tensor, ...]":
        """For each node the distribution [V] after its parent, with all logits processors applied.

        Siblings share it, and each was drawn without the earlier ones.
        """
        assert self._q is not None, "the tokens were chosen"
        return self._q

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        """Return a draft with one path of these tokens."""
        return Draft(tuple(tokens), chain_parents(len(tokens)))

    @cached_property
    def is_chain(self) -> bool:
        """True if every token is the child of the one before it."""
        return self.parents == chain_parents(len(self.parents))

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of the root (entry 0) and of each node i (entry i + 1), in order."""
        return children_of(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        """Number of nodes on the path to each node, including itself."""
        return depths_of(self.parents)

    @cached_property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        if self.is_chain:
            return self.drafted
        pairs = zip(self.tokens, self.depths, strict=True)
        return max((depth for token, depth in pairs if token != NO_NODE), default=0)

    @cached_property
    def drafted(self) -> int:
        """Number of tokens, without the nodes that the sequence does not have."""
        return len(self.tokens) - self.tokens.count(NO_NODE)

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root to `node`."""
        return list(range(node + 1)) if self.is_chain else path_to(self.parents, node)

    def keep(self, nodes: list[int]) -> "Draft":
        """Return a draft of these nodes in this order, each after its parent: a chosen draft."""
        index = {ROOT: ROOT}
        for new, old in enumerate(nodes):
            index[old] = new
        return Draft(tuple(self.tokens[i] for i in nodes), tuple(index[self.parents[i]] for i in nodes))

    def __len__(self) -> int:
        return len(self.tokens)
