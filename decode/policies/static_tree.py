"""Draft trees of a given shape, and drawn trees that are wide where the drafter is likely to be read.

    static     the shape is given: paths of ranks, as (0,), (1,), (0, 0) for the best, the second, and the best's best
    measured   a static shape that follows from how often each rank was accepted at each depth
    sampled    every node draws as many children as its path is likely, so the ratio rules stay exact

Chosen trees are verified by the point-mass rule, which is exact for any choice at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.policies.base import MOST, Growing, require_counts
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft

Siblings = Literal["best", "without-replacement", "iid"]
Path = tuple[int, ...]

# Shapes: n nodes, V vocabulary.


def widths_shape(widths: Sequence[int]) -> tuple[Path, ...]:
    """The shape in which every node at depth d has `widths[d]` children."""
    paths: list[Path] = []
    level: list[Path] = [()]
    for width in widths:
        if len(paths) + len(level) * width > MOST:
            raise ConfigError.of("widths", "x".join(map(str, widths)), f"at most {MOST} nodes together")
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return tuple(paths)


def best_shape(acceptance: Sequence[Sequence[float]], size: int) -> tuple[Path, ...]:
    """The `size` paths that are most often accepted.

    `acceptance[d][r]`: how often the target takes the drafter's rank r at depth d, given that it took what came
    before. As paths multiply, the best ones are prefix-closed.
    """
    found: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(1.0, ())]
    while frontier and len(found) <= size:
        frontier.sort(key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
        weight, path = frontier.pop(0)
        found.append((weight, path))
        if len(path) < len(acceptance):
            frontier += [(weight * rate, (*path, rank)) for rank, rate in enumerate(acceptance[len(path)]) if rate > 0]
    return tuple(sorted((path for _, path in found[1 : size + 1]), key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class StaticTree:
    """A tree of a given shape. Ranks are the drafter's order, or with drawn siblings the order of drawing."""

    learns: ClassVar[bool] = False
    shape: tuple[Path, ...]
    siblings: Siblings = "best"
    _children: dict[Path, list[int]] = field(init=False, repr=False, compare=False)
    """Ranks of the children of each path that has some."""

    def __post_init__(self) -> None:
        if not self.shape:
            raise ConfigError.of("shape", self.shape, "at least one path")
        known = {(), *self.shape}
        children: dict[Path, list[int]] = {}
        for path in sorted(self.shape):
            drawn_before = self.siblings == "best" or path[-1] == len(children.get(path[:-1], []))
            if path[:-1] not in known or path[-1] < 0 or not drawn_before:
                raise ConfigError.of("shape", path, "its parent, and of drawn siblings all earlier ones, in it too")
            children.setdefault(path[:-1], []).append(path[-1])
        object.__setattr__(self, "_children", children)

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, Path]] = [(ROOT, ())]
        for _ in range(builder.room):
            level = [(node, path) for node, path in level if path in self._children]
            if not level:
                break
            nodes = [node for node, _ in level]
            q_nV = builder.probabilities((yield nodes), nodes)
            below: list[tuple[int, Path]] = []
            for (node, path), q_V in zip(level, q_nV, strict=True):
                ranks = self._children[path]
                if builder.greedy or self.siblings == "best":
                    added = choose_ranks(builder, node, q_V, ranks)
                else:
                    added = draw_children(builder, node, q_V, len(ranks), self.siblings)
                below += [(child, (*path, rank)) for rank, child in added]
            level = below
        return builder.draft()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """A fixed shape learns nothing."""

    def __str__(self) -> str:
        depth = max(len(path) for path in self.shape)
        widths = [max(p[-1] + 1 for p in self.shape if len(p) == d) for d in range(1, depth + 1)]
        shape = "x".join(map(str, widths))
        full = set(self.shape) == set(widths_shape(widths))
        siblings = "" if self.siblings == "best" else f",siblings={self.siblings}"
        return f"tree:widths={shape}{siblings}" if full else f"tree:size={len(self.shape)}{siblings}"


PROBE_WIDTHS = (8, 3, 2, 1, 1, 1)
"""Children a level of the tree that ranks are counted with; deeper or lower ranks are taken as never accepted."""


@dataclass
class MeasuredTree:
    """The static tree of `size` nodes that is accepted longest, from how often each rank is accepted at each depth.

    Until there is evidence (see `SpeculativeDecoder.calibrate`) it drafts a wide tree to count with; then the shape
    stands still. Verified by the point-mass rule.
    """

    learns: ClassVar[bool] = True
    size: int = 16
    explores: bool = False
    """Drafts the wide tree, to count; see `SpeculativeDecoder.calibrate`."""
    accepted: list[list[int]] = field(default_factory=lambda: [[0] * width for width in PROBE_WIDTHS], repr=False)
    reached: list[int] = field(default_factory=lambda: [0] * len(PROBE_WIDTHS), repr=False)
    """By depth: how often a node's children were tested, and which of their ranks was accepted."""
    _tree: StaticTree | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_counts(self, "size")

    def fresh(self) -> Self:
        """A text begins with the shape that the counts so far suggest, and counts on."""
        copy = replace(self, accepted=[list(row) for row in self.accepted], reached=list(self.reached))
        copy._tree = StaticTree(copy.shape())
        return copy

    def shape(self) -> tuple[Path, ...]:
        """The best shape by the counts; the wide one without any."""
        if self.explores or self.reached[0] == 0:
            return widths_shape(PROBE_WIDTHS)
        return best_shape(self.acceptance, self.size)

    @property
    def acceptance(self) -> list[list[float]]:
        """`acceptance[depth][rank]`, given that the path so far was accepted."""
        rows = zip(self.accepted, self.reached, strict=True)
        return [[count / max(reached, 1) for count in counts] for counts, reached in rows]

    def grow(self, builder: DraftBuilder) -> Growing:
        assert self._tree is not None, "a policy grows after `fresh`"
        return (yield from self._tree.grow(builder))

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        below = draft.children
        for depth, node in enumerate([ROOT, *result.path][: len(PROBE_WIDTHS)]):
            if below[node + 1]:
                self.reached[depth] += 1
            if depth < len(result.path):
                self.accepted[depth][below[node + 1].index(result.path[depth])] += 1

    def __str__(self) -> str:
        return f"measured-tree:size={self.size}"


@dataclass(frozen=True)
class SampledTree:
    """A drawn tree in which a node gets round(width * q(path)) children: many where the drafter is sure to be read.

    How many depends on the tokens above the node and on nothing below or beside it, and is settled before they are
    drawn. Siblings are drawn without replacement, or as `siblings` says.
    """

    learns: ClassVar[bool] = False
    width: int = 4
    depth: int = 4
    siblings: Siblings = "without-replacement"

    def __post_init__(self) -> None:
        require_counts(self, "width", "depth")
        if self.siblings == "best":
            raise ConfigError.of("siblings", self.siblings, "without-replacement or iid: a sampled tree is drawn")

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, float]] = [(ROOT, 1.0)]
        for _ in range(min(self.depth, builder.room)):
            level = [(node, weight) for node, weight in level if round(self.width * weight) > 0]
            if not level:
                break
            nodes = [node for node, _ in level]
            q_nV = builder.probabilities((yield nodes), nodes)
            below = []
            for (node, weight), q_V in zip(level, q_nV, strict=True):
                count = round(self.width * weight)
                if builder.greedy:
                    added = choose_ranks(builder, node, q_V, list(range(count)))
                else:
                    added = draw_children(builder, node, q_V, count, self.siblings)
                below += [(child, weight * float(q_V[builder.tokens[child]])) for _, child in added]
            level = below
        return builder.draft()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """The shape follows q alone."""

    def __str__(self) -> str:
        return f"sampled-tree:width={self.width},depth={self.depth},siblings={self.siblings}"


def choose_ranks(builder: DraftBuilder, node: int, q_V: Tensor, ranks: list[int]) -> list[tuple[int, int]]:
    """The tokens of these ranks as children of `node`: (rank, child) of each that has any probability."""
    best = q_V.topk(min(ranks[-1] + 1, q_V.shape[0]))
    values, tokens = best.values.tolist(), best.indices.tolist()
    allowed = [rank for rank in ranks if rank < len(values) and values[rank] > 0]
    return [(rank, builder.choose(node, tokens[rank])) for rank in allowed]


def draw_children(
    builder: DraftBuilder, node: int, q_V: Tensor, count: int, siblings: Siblings
) -> list[tuple[int, int]]:
    """`count` children drawn from q: (order of drawing, child) of each; fewer where nothing is left to draw."""
    drawn = [builder.draw(node, q_V, replacement=siblings == "iid") for _ in range(count)]
    return [(order, child) for order, child in enumerate(drawn) if child is not None]
