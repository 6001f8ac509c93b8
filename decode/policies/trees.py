"""Trees whose shape depends on q.

best-first    the most likely paths; verified by the point-mass rule, which is exact for any choice
sampled       every node draws a number of children in proportion to q of its path, so rules with q remain exact
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from draftsmith.decode.drafts.requests import Growing, Look, Request
from draftsmith.decode.policies.policy import ForecastLayout, MostNodes, Policy, require_counts
from draftsmith.heads.draft_tree import ROOT

if TYPE_CHECKING:
    from draftsmith.decode.drafts.builder import DraftBuilder


@dataclass(frozen=True)
class BestFirst(Policy):
    """The `size` prefixes that are most likely under the drafter, at most `depth` deep.

    Each level extends the nodes that are among the `size` most likely so far. Further candidates can only displace
    less likely ones, so the result after the last level is exact. Wang et al. 2024 (OPT-Tree), arXiv:2406.17276.
    """

    name: ClassVar[str] = "best-first"
    chooses: ClassVar[bool] = True
    size: int = 16
    depth: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth")

    @property
    def longest(self) -> int:
        return self.depth

    def layout(self, *, greedy: bool) -> ForecastLayout:
        return ForecastLayout(replay=True)

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: what a level reads may be displaced later."""
        return MostNodes(self.size, self.size * self.depth)

    def grow(self, builder: "DraftBuilder") -> Growing:
        candidates: list[tuple[float, int, int]] = []
        """The probability of the path to each token that may be added, its parent and the token: after its parent."""
        nodes: dict[int, int] = {}
        """The node of each candidate that has been read, by its index."""
        weights, level, best = {ROOT: 1.0}, [ROOT], []
        last = min(self.depth, builder.room)
        for depth in range(1, last + 1):
            look = yield Request(level, self.size)
            for node, values, tokens in zip(level, look.values, look.tokens, strict=True):
                pairs = zip(values, tokens, strict=True)
                candidates += [(weights[node] * q, node, token) for q, token in pairs if q > 0]
            best = sorted(range(len(candidates)), key=lambda index: (-candidates[index][0], index))[: self.size]
            added = [index for index in best if builder.depth(candidates[index][1]) + 1 == depth]
            if depth == last or not added:
                break
            nodes |= {index: builder.choose(*candidates[index][1:]) for index in added}
            level = [nodes[index] for index in added]
            weights |= {nodes[index]: candidates[index][0] for index in added}
        # A child's weight is at most its parent's, so parents are among the best, too.
        kept = [nodes[index] if index in nodes else builder.choose(*candidates[index][1:]) for index in best]
        return builder.pruned(sorted(kept))


@dataclass(frozen=True)
class SampledTree(Policy):
    """A drawn tree in which every node has round(width * q(path)) children.

    This number depends on the tokens on the path to the node only, and is known before the children are drawn. Siblings
    are drawn without replacement.
    """

    name: ClassVar[str] = "sampled-tree"
    width: int = 4
    depth: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "width", "depth")

    @property
    def longest(self) -> int:
        return self.depth

    def layout(self, *, greedy: bool) -> ForecastLayout:
        siblings = "draws siblings: their acceptance depends on p of tokens that are not in the text"
        return ForecastLayout(replay=True) if greedy else ForecastLayout(refused=siblings)

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: fewer than 2 * width in a level of different tokens, whose q add up to at most 1.

        Only nodes with width * q above 1/2 have children, and rounding adds at most 1/2 to each of their counts.
        """
        most = 2 * self.width * self.depth
        return MostNodes(most, most)

    def grow(self, builder: "DraftBuilder") -> Growing:
        level: list[tuple[int, float]] = [(ROOT, 1.0)]
        for _ in range(min(self.depth, builder.room)):
            level = [(node, weight) for node, weight in level if round(self.width * weight) > 0]
            if not level:
                break
            nodes = [node for node, _ in level]
            counts = [round(self.width * weight) for _, weight in level]
            look = yield Request(nodes, top=max(counts) if builder.greedy else 0)
            if builder.greedy:
                children = [_chosen(builder, look, row, count) for row, count in enumerate(counts)]
            else:
                children = (yield Request(draw=counts, chances=True)).children
            level = [
                (child, weight * (q or 0.0))
                for (_, weight), own in zip(level, children, strict=True)
                for child, q in own
            ]
        return builder.draft()


def _chosen(builder: "DraftBuilder", look: Look, row: int, count: int) -> list[tuple[int, float]]:
    """Add the `count` likeliest tokens of q > 0 as children of a node, and return (child, q) of each."""
    pairs = zip(look.tokens[row][:count], look.values[row], strict=False)
    return [(builder.choose(look.nodes[row], token), q) for token, q in pairs if q > 0]
