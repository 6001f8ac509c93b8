"""Trees of the most likely paths under q; verified by the point-mass rule, which is exact for any choice.

dynamic    EAGLE-2: extends the most likely paths of each level and keeps the most likely nodes of all
best-first the `size` most likely prefixes, exactly
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from draftsmith.decode.draft_builder import DraftBuilder, Look, Read
from draftsmith.decode.policies.base import Growing, MostNodes, require_counts
from draftsmith.decode.verification_rules import VerifyResult
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

    def best(self, count: int, depth: int | None = None) -> list[int]:
        """Return the indices of the `count` most likely candidates, at `depth` or at any depth."""
        places = [place for place in range(len(self._candidates)) if depth is None or self.depth(place) == depth]
        return sorted(places, key=lambda place: (-self._candidates[place].weight, place))[:count]

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


def _grown(
    builder: DraftBuilder, depth: int, top: int, size: int, extended: Callable[[Candidates, int], list[int]]
) -> Growing:
    """Grow a tree level by level, and keep the `size` most likely nodes of all.

    Args:
        top: most likely tokens that are read after each node.
        extended: returns the candidates at a depth that get children.
    """
    candidates, nodes, last = Candidates(builder), [ROOT], min(depth, builder.room)
    for level in range(1, last + 1):
        look: Look = yield Read(nodes, top)
        for node, rates, tokens in zip(nodes, look.values, look.tokens, strict=True):
            candidates.add(node, rates, tokens)
        if level == last:
            break
        nodes = [candidates.node(place) for place in extended(candidates, level)]
        if not nodes:
            break
    return candidates.draft(candidates.best(size))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: extends the `top_k` most likely paths of each level, then keeps the `size` most likely nodes of all.

    Li et al. 2024, arXiv:2406.16858, section 4.
    """

    learns: ClassVar[bool] = False
    size: int = 24
    depth: int = 6
    top_k: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth", "top_k")

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes."""
        return MostNodes(self.size, self.top_k * self.depth)

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        return _grown(builder, self.depth, self.top_k, self.size, lambda found, depth: found.best(self.top_k, depth))

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the tree depends on q only."""

    def __str__(self) -> str:
        return f"dynamic-tree:size={self.size},depth={self.depth},top_k={self.top_k}"


@dataclass(frozen=True)
class BestFirst:
    """The `size` prefixes that are most likely under the drafter, at most `depth` deep.

    Each level extends the nodes that are among the `size` most likely so far. Further candidates can only displace
    less likely ones, so the result after the last level is exact. Wang et al. 2024 (OPT-Tree), arXiv:2406.17276.
    """

    learns: ClassVar[bool] = False
    size: int = 16
    depth: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth")

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: what a level reads may be displaced later."""
        return MostNodes(self.size, self.size * self.depth)

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        def extended(found: Candidates, depth: int) -> list[int]:
            return [place for place in found.best(self.size) if found.depth(place) == depth]

        return _grown(builder, self.depth, self.size, self.size, extended)

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the tree depends on q only."""

    def __str__(self) -> str:
        return f"best-first:size={self.size},depth={self.depth}"
