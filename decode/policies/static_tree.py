"""Draft trees of a fixed shape, and drawn trees whose width follows the probability of each path.

    static     a given shape, as paths of ranks: (0,), (1,), (0, 0) are the best token, the second, and the best's best
    measured   a static shape that is computed from the acceptance of each rank at each depth
    sampled    every node draws a number of children in proportion to q of its path, so rules with q remain exact

Chosen trees are verified by the point-mass rule, which is exact for any choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from draftsmith.decode.draft_builder import Children, DraftBuilder, Draws, Look, Read
from draftsmith.decode.fixed_drafts import Shape, Siblings
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


def best_shape(acceptance: Sequence[Sequence[float]], size: int) -> tuple[Path, ...]:
    """Return the `size` paths that are accepted most often.

    `acceptance[d][r]`: acceptance of the drafter's rank r at depth d, given that the path before it was accepted. The
    acceptance of a path is the product, so the best paths contain their prefixes.
    """
    best: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(1.0, ())]
    while frontier and len(best) <= size:
        frontier.sort(key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
        weight, path = frontier.pop(0)
        best.append((weight, path))
        if len(path) < len(acceptance):
            frontier += [(weight * rate, (*path, rank)) for rank, rate in enumerate(acceptance[len(path)]) if rate > 0]
    return tuple(sorted((path for _, path in best[1 : size + 1]), key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class StaticTree:
    """A tree of a given shape. Ranks order siblings by q, or drawn siblings in the order of drawing."""

    learns: ClassVar[bool] = False
    shape: tuple[Path, ...]
    siblings: Siblings = "best"
    _children: dict[Path, list[int]] = field(init=False, repr=False, compare=False)
    """Ranks of the children of each path with children."""

    def __post_init__(self) -> None:
        if not self.shape:
            raise ConfigError.of("shape", self.shape, "at least one path")
        known = {(), *self.shape}
        children: dict[Path, list[int]] = {}
        for path in sorted(self.shape):
            drawn_before = self.siblings == "best" or path[-1] == len(children.get(path[:-1], []))
            if path[:-1] not in known or path[-1] < 0 or not drawn_before:
                raise ConfigError.of(
                    "shape", path, "its parent, and of drawn siblings all earlier ones, as other paths"
                )
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
        return Shape(tuple(levels), "best" if greedy else self.siblings)

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, Path]] = [(ROOT, ())]
        for _ in range(builder.room):
            level = [(node, path) for node, path in level if path in self._children]
            if not level:
                break
            nodes = [node for node, _ in level]
            ranks = [self._children[path] for _, path in level]
            if builder.greedy or self.siblings == "best":
                look: Look = yield Read(nodes, max(own[-1] for own in ranks) + 1)
                children = choose_ranks(builder, look, ranks)
            else:
                yield Read(nodes, top=0)
                drawn: Children = yield Draws([len(own) for own in ranks], self.siblings == "iid")
                children = [[(rank, *child) for rank, child in enumerate(own)] for own in drawn]
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
        siblings = "" if self.siblings == "best" else f",siblings={self.siblings}"
        return f"tree:widths={shape}{siblings}" if full else f"tree:size={len(self.shape)}{siblings}"


def _below(paths: Sequence[Path], ranks: dict[Path, list[int]]) -> list[Path]:
    """Return the children of `paths`, in their order."""
    return [(*path, rank) for path in paths for rank in ranks.get(path, ())]


PROBE_WIDTHS = (8, 3, 2, 1, 1, 1)
"""Children per level of the tree that measures acceptance; deeper or lower ranks count as never accepted."""


@dataclass
class MeasuredTree:
    """The static tree of `size` nodes with the largest acceptance length, from the acceptance of each rank and depth.

    Without measurements (see `SpeculativeDecoder.calibrate`) it drafts a wide tree, in which it counts acceptance;
    after that the shape is fixed within a text. Verified by the point-mass rule.
    """

    learns: ClassVar[bool] = True
    size: int = 16
    explores: bool = False
    """Draft the wide tree to measure acceptance; see `SpeculativeDecoder.calibrate`."""
    accepted: list[list[int]] = field(default_factory=lambda: [[0] * width for width in PROBE_WIDTHS], repr=False)
    reached: list[int] = field(default_factory=lambda: [0] * len(PROBE_WIDTHS), repr=False)
    """By depth: how often children were tested (`reached`), and how often each rank was accepted (`accepted`)."""
    _tree: StaticTree | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_counts(self, "size")

    def fresh(self) -> Self:
        """Return a copy that uses the best shape by the counts so far and continues to count."""
        copy = replace(self, accepted=[list(row) for row in self.accepted], reached=list(self.reached))
        copy._tree = StaticTree(copy.shape())
        return copy

    def shape(self) -> tuple[Path, ...]:
        """Return the best shape by the counts: the wide one without any, one node if nothing was accepted."""
        if self.explores or self.reached[0] == 0:
            return widths_shape(PROBE_WIDTHS)
        return best_shape(self.acceptance, self.size) or ((0,),)

    @property
    def acceptance(self) -> list[list[float]]:
        """`acceptance[depth][rank]`, given that the path before it was accepted."""
        rows = zip(self.accepted, self.reached, strict=True)
        return [[count / max(reached, 1) for count in counts] for counts, reached in rows]

    def fixed(self, *, greedy: bool) -> Shape:
        """Return the shape of the drafts of this text."""
        assert self._tree is not None, "`fresh` comes before `fixed`"
        return self._tree.fixed(greedy=greedy)

    def grow(self, builder: DraftBuilder) -> Growing:
        assert self._tree is not None, "`fresh` comes before `grow`"
        return (yield from self._tree.grow(builder))

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
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
    """A drawn tree in which every node has round(width * q(path)) children.

    This number depends on the tokens on the path to the node only, and is known before the children are drawn. Siblings
    are drawn without replacement, or as `siblings` says.
    """

    learns: ClassVar[bool] = False
    width: int = 4
    depth: int = 4
    siblings: Siblings = "without-replacement"

    def __post_init__(self) -> None:
        require_counts(self, "width", "depth")
        if self.siblings == "best":
            raise ConfigError.of("siblings", self.siblings, "without-replacement or iid: a sampled tree is drawn")

    @property
    def most_nodes(self) -> MostNodes | None:
        """Nodes for compiled passes: fewer than 2 * width in a level of different tokens, whose q add up to at most 1.

        Only nodes with width * q above 1/2 have children, and rounding adds at most 1/2 to each of their numbers.
        """
        most = 2 * self.width * self.depth
        return None if self.siblings == "iid" else MostNodes(most, most)

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
                children = yield Draws(counts, self.siblings == "iid", chances=True)
            level = [(child, weight * q) for (_, weight), own in zip(level, children, strict=True) for child, q in own]
        return builder.draft()

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the shape depends on q only."""

    def __str__(self) -> str:
        return f"sampled-tree:width={self.width},depth={self.depth},siblings={self.siblings}"


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
