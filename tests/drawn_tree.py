"""Policies that build trees of a given shape: rules are tested on shapes that no q decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.drafts.requests import Growing, Request
from draftsmith.decode.policies.policy import MostNodes, Policy
from draftsmith.heads.draft_tree import ROOT

Path = tuple[int, ...]


def widths_shape(widths: Sequence[int]) -> tuple[Path, ...]:
    """Return the shape in which every node at depth d has `widths[d]` children."""
    paths: list[Path] = []
    level: list[Path] = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return tuple(paths)


@dataclass(frozen=True)
class DrawnTree(Policy):
    """Draws the children of every node without replacement; `shape`: paths of ranks, such as (0,), (1,), (0, 0)."""

    shape: tuple[Path, ...]

    @property
    def most_nodes(self) -> MostNodes:
        return MostNodes(len(self.shape), len(self.shape))

    def grow(self, builder: DraftBuilder) -> Growing:
        chooses = self.chooses or builder.greedy
        level: list[tuple[int, Path]] = [(ROOT, ())]
        for _ in range(builder.room):
            counts = [sum(other[:-1] == path and len(other) > 0 for other in self.shape) for _, path in level]
            level = [entry for entry, count in zip(level, counts, strict=True) if count]
            if not level:
                break
            look = yield Request([node for node, _ in level], top=max(counts) if chooses else 0)
            counts = [count for count in counts if count]
            if chooses:
                rows = zip(level, look.tokens, look.values, counts, strict=True)
                children = [
                    [(builder.choose(node, t), None) for t, q in zip(tokens[:count], values, strict=False) if q > 0]
                    for (node, _), tokens, values, count in rows
                ]
            else:
                children = (yield Request(draw=counts)).children
            level = [
                (child, (*path, rank))
                for (_, path), own in zip(level, children, strict=True)
                for rank, (child, _) in enumerate(own)
            ]
        return builder.draft()

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.shape}"


class ChosenTree(DrawnTree):
    """Chooses the likeliest children of every node."""

    chooses = True
