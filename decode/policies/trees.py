"""Trees whose shape depends on q.

best-first    the most likely paths; verified by the point-mass rule, which is exact for any choice
sampled       every node draws a number of children in proportion to q of its path, so rules with q remain exact
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from draftsmith.decode.drafts.builder import DraftBuilder, DrawChildren, Look, Read
from draftsmith.decode.policies.base import Growing, MostNodes, Policy, require_counts
from draftsmith.heads.draft_tree import ROOT, Draft


class Candidate(NamedTuple):
    """A token that may be added to a chosen tree."""

    weight: float
    """The policy's estimate of the probability of the path to it."""
    parent: int
    token: int
    confidence: float
    """Probability of the token under q."""
    rank: int
    """Index among its siblings, 0 for the most likely."""


class Candidates:
    """All tokens so far that may be added to a chosen tree, each after its parent."""

    def __init__(self, builder: DraftBuilder) -> None:
        self._builder = builder
        self._candidates: list[Candidate] = []
        self._nodes: dict[int, int] = {}
        """The node of each index in `_candidates`, for candidates that are nodes of the builder."""
        self._of_node: dict[int, Candidate] = {}

    def add(
        self, node: int, rates_k: Sequence[float], tokens_k: Sequence[int], confidence_k: Sequence[float] | None = None
    ) -> None:
        """Add k tokens that may follow `node`.

        `rates_k`: the estimated probability of each, by which weights multiply. `confidence_k`: their probabilities
        under q, where the rates are others.
        """
        weight = 1.0 if node == ROOT else self._of_node[node].weight
        rows = zip(rates_k, tokens_k, confidence_k or rates_k, strict=True)
        for rank, (rate, token, confidence) in enumerate(rows):
            if confidence > 0:
                self._candidates.append(Candidate(weight * rate, node, token, confidence, rank))

    def best(self, count: int) -> list[int]:
        """Return the indices of the `count` most likely candidates."""
        return sorted(range(len(self._candidates)), key=lambda place: (-self._candidates[place].weight, place))[:count]

    def depth(self, place: int) -> int:
        return self._builder.depth(self._candidates[place].parent) + 1

    def weight(self, place: int) -> float:
        return self._candidates[place].weight

    def node(self, place: int) -> int:
        """Return the node of a candidate, which is added to the builder if it is not a node yet."""
        if place not in self._nodes:
            candidate = self._candidates[place]
            self._nodes[place] = self._builder.choose(candidate.parent, candidate.token)
            self._of_node[self._nodes[place]] = candidate
        return self._nodes[place]

    def of_node(self, node: int) -> Candidate:
        """Return the candidate of `node`."""
        return self._of_node[node]

    def draft(self, places: list[int]) -> Draft:
        """Return a draft of the most likely candidates; a child's weight is at most its parent's, which is included."""
        return self._builder.pruned(sorted(self.node(place) for place in places))


@dataclass(frozen=True)
class BestFirst(Policy):
    """The `size` prefixes that are most likely under the drafter, at most `depth` deep.

    Each level extends the nodes that are among the `size` most likely so far. Further candidates can only displace
    less likely ones, so the result after the last level is exact. Wang et al. 2024 (OPT-Tree), arXiv:2406.17276.
    """

    chooses: ClassVar[bool] = True
    size: int = 16
    depth: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth")

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: what a level reads may be displaced later."""
        return MostNodes(self.size, self.size * self.depth)

    def grow(self, builder: DraftBuilder) -> Growing:
        candidates, nodes, last = Candidates(builder), [ROOT], min(self.depth, builder.room)
        for depth in range(1, last + 1):
            look: Look = yield Read(nodes, self.size)
            for node, rates, tokens in zip(nodes, look.values, look.tokens, strict=True):
                candidates.add(node, rates, tokens)
            if depth == last:
                break
            best = candidates.best(self.size)
            nodes = [candidates.node(place) for place in best if candidates.depth(place) == depth]
            if not nodes:
                break
        return candidates.draft(candidates.best(self.size))

    def __str__(self) -> str:
        return f"best-first:size={self.size},depth={self.depth}"


@dataclass(frozen=True)
class SampledTree(Policy):
    """A drawn tree in which every node has round(width * q(path)) children.

    This number depends on the tokens on the path to the node only, and is known before the children are drawn. Siblings
    are drawn without replacement.
    """

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
                children = [_chosen(builder, look, place, count) for place, count in enumerate(counts)]
            else:
                yield Read(nodes, top=0)
                children = yield DrawChildren(counts, chances=True)
            level = [(child, weight * q) for (_, weight), own in zip(level, children, strict=True) for child, q in own]
        return builder.draft()

    def __str__(self) -> str:
        return f"sampled-tree:width={self.width},depth={self.depth}"


def _chosen(builder: DraftBuilder, look: Look, place: int, count: int) -> list[tuple[int, float]]:
    """Add the `count` likeliest tokens with any probability as children of a node, and return (child, q) of each."""
    pairs = zip(look.tokens[place][:count], look.values[place], strict=False)
    return [(builder.choose(look.nodes[place], token), q) for token, q in pairs if q > 0]
