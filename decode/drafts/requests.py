"""What a policy asks of the drafter while a draft grows, and what it is sent."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from draftsmith.heads.draft_tree import Draft

if TYPE_CHECKING:  # policies are checked before torch is imported
    from torch import Tensor

# Shapes: n nodes of one sequence, V vocabulary of the target.


class Request(NamedTuple):
    """A request for the drafter's predictions after `nodes`, or for children drawn from them.

    Nodes are read in one pass of the drafter for all sequences, each node once. With `draw`, children of the nodes that
    were read last are drawn; their counts are fixed before any of these tokens is known, as rules for drawn drafts
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


Growing = Generator[Request, Look, Draft]
"""Yields what it needs next (the predictions after `[ROOT]` first), is sent the `Look`, and returns the draft.

The drafts of a batch are built in lockstep, so one forward pass of the drafter covers all sequences.
"""
