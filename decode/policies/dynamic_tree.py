"""Trees that grow where the drafter puts its probability; verified by the point-mass rule, exact for any choice.

dynamic    EAGLE-2: the best few per level are extended, the most likely of all are kept
best-first the `size` most likely prefixes, exactly
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.policies.base import Growing, require_counts
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.heads.draft_tree import ROOT, Draft

# Shapes: n nodes, V vocabulary.


class Candidate(NamedTuple):
    """A token that could join a chosen tree."""

    weight: float
    """The chance of its whole path, as the policy sees it."""
    parent: int
    token: int
    confidence: float
    """Its own probability under the drafter."""
    rank: int
    """Its place among its siblings, 0 for the most likely."""


class Candidates:
    """Every token seen so far that could join a chosen tree, each after its parent."""

    def __init__(self, builder: DraftBuilder) -> None:
        self._growth = builder
        self._found: list[Candidate] = []
        self._nodes: dict[int, int] = {}
        """Place in `_found` to node, for those that the drafter has been asked about."""
        self._of_node: dict[int, Candidate] = {}

    def add(
        self, node: int, rates_k: Sequence[float], tokens_k: Sequence[int], confidence_k: Sequence[float] | None = None
    ) -> None:
        """Tokens that may follow `node`, with the chance of each; `confidence_k`: q itself, where the chance is not."""
        weight = 1.0 if node == ROOT else self._of_node[node].weight
        rows = zip(rates_k, tokens_k, confidence_k or rates_k, strict=True)
        for rank, (rate, token, confidence) in enumerate(rows):
            if confidence > 0:
                self._found.append(Candidate(weight * rate, node, token, confidence, rank))

    def best(self, count: int, depth: int | None = None) -> list[int]:
        """Places of the `count` most likely, at `depth` alone or anywhere."""
        places = [place for place in range(len(self._found)) if depth is None or self.depth(place) == depth]
        return sorted(places, key=lambda place: (-self._found[place].weight, place))[:count]

    def depth(self, place: int) -> int:
        return self._growth.depth(self._found[place].parent) + 1

    def weight(self, place: int) -> float:
        return self._found[place].weight

    def node(self, place: int) -> int:
        """The candidate as a node of the growth, added now if it is not there yet."""
        if place not in self._nodes:
            candidate = self._found[place]
            self._nodes[place] = self._growth.choose(candidate.parent, candidate.token)
            self._of_node[self._nodes[place]] = candidate
        return self._nodes[place]

    def of_node(self, node: int) -> Candidate:
        """The candidate that became `node`."""
        return self._of_node[node]

    def draft(self, places: list[int]) -> Draft:
        """A draft of these candidates; a child is as likely as its parent at most, so none lacks its parent."""
        return self._growth.pruned(sorted(self.node(place) for place in places))


def top(q_nV: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """The `count` most likely tokens of each row: their probabilities and ids."""
    best = q_nV.topk(min(count, q_nV.shape[-1]))
    return best.values.tolist(), best.indices.tolist()


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: extend the `top_k` most likely paths of each level, then keep the `size` most likely nodes of all.

    Li et al. 2024, arXiv:2406.16858, section 4.
    """

    learns: ClassVar[bool] = False
    size: int = 24
    depth: int = 6
    top_k: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth", "top_k")

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        candidates, nodes = Candidates(builder), [ROOT]
        for depth in range(1, min(self.depth, builder.room) + 1):
            q_nV = builder.probabilities((yield nodes), nodes)
            for node, rates, tokens in zip(nodes, *top(q_nV, self.top_k), strict=True):
                candidates.add(node, rates, tokens)
            if depth == min(self.depth, builder.room):
                break
            nodes = [candidates.node(place) for place in candidates.best(self.top_k, depth)]
            if not nodes:
                break
        return candidates.draft(candidates.best(self.size))

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """The tree follows q alone."""

    def __str__(self) -> str:
        return f"dynamic-tree:size={self.size},depth={self.depth},top_k={self.top_k}"


@dataclass(frozen=True)
class BestFirst:
    """The `size` prefixes that are most likely under the drafter, at most `depth` deep.

    Level by level, whatever stands among the best so far is extended; more candidates only ever raise the bar, so after
    the last level the best are found exactly. Wang et al. 2024 (OPT-Tree), arXiv:2406.17276.
    """

    learns: ClassVar[bool] = False
    size: int = 16
    depth: int = 8

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth")

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        candidates, nodes = Candidates(builder), [ROOT]
        for depth in range(1, min(self.depth, builder.room) + 1):
            q_nV = builder.probabilities((yield nodes), nodes)
            for node, rates, tokens in zip(nodes, *top(q_nV, self.size), strict=True):
                candidates.add(node, rates, tokens)
            if depth == min(self.depth, builder.room):
                break
            nodes = [candidates.node(place) for place in candidates.best(self.size) if candidates.depth(place) == depth]
            if not nodes:
                break
        return candidates.draft(candidates.best(self.size))

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """The tree follows q alone."""

    def __str__(self) -> str:
        return f"best-first:size={self.size},depth={self.depth}"
