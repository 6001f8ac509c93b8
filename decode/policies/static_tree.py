"""Draft trees of a fixed shape, and drawn trees whose width follows the probability of each path.

    static     a given shape, as paths of ranks: (0,), (1,), (0, 0) are the best token, the second, and the best's best
    sampled    every node draws a number of children in proportion to q of its path, so rules with q remain exact

Chosen trees are verified by the point-mass rule, which is exact for any choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from draftsmith.decode.draft_builder import DraftBuilder, DrawChildren, Look, Read
from draftsmith.decode.fixed_drafts import Shape
from draftsmith.decode.policies.base import MOST, Growing, MostNodes, require_counts
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft

Path = tuple[int, ...]


def widths_shape(widths: Sequence[int]) -> tuple[Path, ...]:
    """Return the shape in which every node at depth d has `widths[d]` children."""
    paths: list[Path] = []
    level: list[Path] = [()]
    for width in widths:
        if len(paths) + len(level) * width > MOST:
            raise ConfigError.of("widths", "x".join(map(str, widths)), f"at most {MOST} nodes together")
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return tuple(paths)


@dataclass(frozen=True)
class StaticTree:
    """A tree of a given shape of the most likely tokens: ranks order siblings by q."""

    learns: ClassVar[bool] = False
    shape: tuple[Path, ...]
    _children: dict[Path, list[int]] = field(init=False, repr=False, compare=False)
    """Ranks of the children of each path with children."""

    def __post_init__(self) -> None:
        if not self.shape:
            raise ConfigError.of("shape", self.shape, "at least one path")
        known = {(), *self.shape}
        children: dict[Path, list[int]] = {}
        for path in sorted(self.shape):
            if path[:-1] not in known or path[-1] < 0:
                raise ConfigError.of("shape", path, "its parent as another path")
            children.setdefault(path[:-1], []).append(path[-1])
        object.__setattr__(self, "_children", children)

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

    def fixed(self, *, greedy: bool) -> Shape:
        """Return the shape of all drafts."""
        levels: list[tuple[tuple[int, int], ...]] = []
        above: list[Path] = [()]
        while nodes := _below(above, self._children):
            levels.append(tuple((above.index(path[:-1]), path[-1]) for path in nodes))
            above = nodes
        return Shape(tuple(levels))

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, Path]] = [(ROOT, ())]
        for _ in range(builder.room):
            level = [(node, path) for node, path in level if path in self._children]
            if not level:
                break
            nodes = [node for node, _ in level]
            ranks = [self._children[path] for _, path in level]
            look: Look = yield Read(nodes, max(own[-1] for own in ranks) + 1)
            children = choose_ranks(builder, look, ranks)
            level = [
                (child, (*path, rank)) for (_, path), own in zip(level, children, strict=True) for rank, child, _ in own
            ]
        return builder.draft()

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the shape is fixed."""

    def __str__(self) -> str:
        depth = max(len(path) for path in self.shape)
        widths = [max(p[-1] + 1 for p in self.shape if len(p) == d) for d in range(1, depth + 1)]
        shape = "x".join(map(str, widths))
        full = set(self.shape) == set(widths_shape(widths))
        return f"tree:widths={shape}" if full else f"tree:size={len(self.shape)}"


def _below(paths: Sequence[Path], ranks: dict[Path, list[int]]) -> list[Path]:
    """Return the children of `paths`, in their order."""
    return [(*path, rank) for path in paths for rank in ranks.get(path, ())]


@dataclass(frozen=True)
class SampledTree:
    """A drawn tree in which every node has round(width * q(path)) children.

    This number depends on the tokens on the path to the node only, and is known before the children are drawn. Siblings
    are drawn without replacement.
    """

    learns: ClassVar[bool] = False
    width: int = 4
    depth: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "width", "depth")

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: fewer than 2 * width in a level of different tokens, whose q add up to at most 1.

        Only nodes with width * q above 1/2 have children, and rounding adds at most 1/2 to each of their numbers.
        """
        most = 2 * self.width * self.depth
        return MostNodes(most, most)

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, float]] = [(ROOT, 1.0)]
        for _ in range(min(self.depth, builder.room)):
            level = [(node, weight) for node, weight in level if round(self.width * weight) > 0]
            if not level:
                break
            nodes = [node for node, _ in level]
            counts = [round(self.width * weight) for _, weight in level]
            if builder.greedy:
                look: Look = yield Read(nodes, max(counts))
                chosen = choose_ranks(builder, look, [list(range(count)) for count in counts])
                children = [[(child, q) for _, child, q in own] for own in chosen]
            else:
                yield Read(nodes, top=0)
                children = yield DrawChildren(counts, chances=True)
            level = [(child, weight * q) for (_, weight), own in zip(level, children, strict=True) for child, q in own]
        return builder.draft()

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the shape depends on q only."""

    def __str__(self) -> str:
        return f"sampled-tree:width={self.width},depth={self.depth}"


def choose_ranks(
    builder: DraftBuilder, look: Look, ranks: Sequence[Sequence[int]]
) -> list[list[tuple[int, int, float]]]:
    """Add the tokens of these ranks as children of each node; return (rank, child, q) of those with any probability."""
    return [
        [
            (rank, builder.choose(node, tokens[rank]), values[rank])
            for rank in own
            if rank < len(values) and values[rank] > 0
        ]
        for node, values, tokens, own in zip(look.nodes, look.values, look.tokens, ranks, strict=True)
    ]
