"""The Draft: what a drafter proposes in one round."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A tree of draft tokens and how they were chosen. A chain is the tree with one path.

    Nodes are stored in topological order. `parents[i]` is the index of node i's parent, -1 for a child of the last
    committed token. `q[i]` is the distribution, after every logits processor, that `tokens[i]` was drawn from; `q` is
    None when every token was chosen deterministically (a point mass).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q_NV: Tensor | None

    @classmethod
    def chain(cls, tokens: list[int], q_NV: Tensor | None) -> Self:
        """Draft tokens that follow one another. `q_NV`: [N, V], or None for deterministic tokens."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), q_NV)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)
