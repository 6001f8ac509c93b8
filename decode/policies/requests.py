"""What a policy asks of the drafter while a draft grows, and what it is sent."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: n nodes of one text, V vocabulary of the target.


class Request(NamedTuple):
    """A request for the drafter's predictions after `nodes`, or for children drawn from them.

    Nodes are read in one pass of the drafter for all texts, each node once. With `draw`, children of the nodes that
    were read last are drawn; their numbers are fixed before any of these tokens is known, as rules for drawn drafts
    require.
    """

    nodes: Sequence[int] = ()
    top: int = 1
    """Number of most likely tokens of each node that `Look` contains."""
    draw: Sequence[int] = ()
    """Children of each node that was read last; it gets fewer where q has no token left."""
    chances: bool = False
    """Whether `Look` contains the probabilities of drawn children."""


class Look(NamedTuple):
    """The drafter's predictions after the nodes that were read last."""

    nodes: Sequence[int]
    logits_nV: "Tensor"
    """The drafter's logits, before processors."""
    values: list[list[float]]
    """For each node the largest probabilities under q, in descending order."""
    tokens: list[list[int]]
    """Their tokens."""
    children: Sequence[Sequence[tuple[int, float | None]]] = ()
    """For each node the children that were drawn, in this order, with their probabilities under q if asked for."""

    @property
    def parent(self) -> int:
        """The only node."""
        (node,) = self.nodes
        return node
