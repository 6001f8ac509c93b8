"""Drafts that end where one more token would cost more than it brings, in tokens per second on this machine.

Speed is a ratio, E[tokens] / E[seconds]. With lambda the best speed there is, a token is worth drafting when its
chance of being accepted is at least lambda times the seconds that it adds; lambda is the fixed point at which the
plan's own speed is lambda (Dinkelbach 1967). Both policies keep a running estimate of it.
"""

from bisect import bisect_right
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from draftsmith.decode.costs import Costs
from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.policies.base import Growing, require_counts
from draftsmith.decode.policies.dynamic_tree import Candidates, top
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.heads.draft_tree import ROOT, Draft

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR, MOST = 4.0, 60.0
"""Observations that a bin counts for before there are any, and the most that it keeps: older ones fade."""
LEVELS = 4
"""A drawn tree is drawn level by level: where nodes cost nothing, its size is made to last for about so many."""
CAUTION = 3.0
"""Expected acceptances at a depth before its own correction counts as much as that of the depth above."""
EXPLORED = 8
"""Depth that drafts are given while a policy is being taught, so that it sees what it would not draft."""
FADING = 0.99
"""Weight of the past in what was accepted at a depth, an observation."""
MEMORY = 0.97
"""Weight of the past in the running speed, a round: about the last thirty rounds count."""


class Calibration:
    """How often tokens of a given confidence were accepted, in bins that begin at a guess.

    `prior` maps the drafter's confidence to that guess.
    """

    def __init__(self, prior: Callable[[float], float]) -> None:
        centres = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._accepted = [PRIOR * prior(centre) for centre in centres]
        self._count = [PRIOR] * len(centres)

    def rate(self, confidence: float) -> float:
        """The chance of acceptance of a token with this confidence."""
        place = bisect_right(EDGES, confidence)
        return self._accepted[place] / self._count[place]

    def observe(self, confidence: float, outcome: float) -> None:
        """`outcome` in [0, 1]: whether it was accepted, or the known chance that it is."""
        place = bisect_right(EDGES, confidence)
        self._accepted[place] += outcome
        self._count[place] += 1
        if self._count[place] > MOST:
            self._accepted[place] *= MOST / self._count[place]
            self._count[place] = MOST

    @property
    def mean(self) -> float:
        """The chance of a token about which nothing is known."""
        return sum(self._accepted) / sum(self._count)


class Survival:
    """How often a whole path is accepted, from the product of its tokens' chances and its depth.

    The product alone is too low for long paths: sure tokens come in runs, and the block rule lets a token that the
    target likes better than the drafter make up for others. So it is corrected by what was accepted at that depth,
    beside what was expected there; a depth that was hardly seen takes its correction from the one above.
    """

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._expected: list[float] = []
        self._corrections: list[float] | None = []
        """By depth; None after something was observed."""

    def rate(self, product: float, depth: int) -> float:
        return min(1.0, product * self._correction(depth))

    def _correction(self, depth: int) -> float:
        if self._corrections is None:
            self._corrections, correction = [], 1.0
            for accepted, expected in zip(self._accepted, self._expected, strict=True):
                correction = (accepted + CAUTION * correction) / (expected + CAUTION)
                self._corrections.append(correction)
        if not self._corrections:
            return 1.0
        return self._corrections[min(depth, len(self._corrections)) - 1]

    def observe(self, product: float, depth: int, accepted: bool) -> None:
        """A path of `depth` tokens was or was not accepted."""
        self._corrections = None
        while len(self._accepted) < depth:
            self._accepted.append(0.0)
            self._expected.append(0.0)
        self._accepted[depth - 1] = FADING * self._accepted[depth - 1] + accepted
        self._expected[depth - 1] = FADING * self._expected[depth - 1] + product


class Speed:
    """Tokens per modelled second over the last rounds: the running lambda."""

    def __init__(self, costs: Costs, acceptance: float = 0.7) -> None:
        tokens = 1 + 2 * acceptance
        seconds = costs.round + 2 * costs.draft_seconds(1) + costs.verify_seconds(3)
        # Begins as if a few rounds with two draft tokens had gone by.
        self._tokens, self._seconds = 4 * tokens, 4 * seconds

    def observe(self, tokens: float, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + tokens
        self._seconds = MEMORY * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds


class Experience:
    """What a policy has learned so far: greedy and sampled runs apart, since they accept differently.

    A greedy target agrees with the drafter's favourite more often than the drafter is sure of it; a token drawn from q
    is accepted with sum(min(p, q)), which is high even where q is flat. The guesses say so until there is evidence.
    """

    def __init__(self, costs: Costs, *, greedy: bool) -> None:
        self.speed = Speed(costs)
        if greedy:
            guesses = [lambda c: c**0.5, lambda c: 0.7 * c, lambda c: 0.5 * c]
        else:
            guesses = [lambda c: 0.5 + 0.5 * c, lambda c: 0.15 * (1 - c), lambda c: 0.05 * (1 - c)]
        self._by_rank = [Calibration(guess) for guess in guesses]
        self.survival = Survival()

    def rank(self, rank: int) -> Calibration:
        """For a first child, a second, and all others. Confidence is the token's own q when greedy, else max q."""
        return self._by_rank[min(rank, 2)]

    @property
    def first(self) -> Calibration:
        return self._by_rank[0]


@dataclass
class AdaptiveChain:
    """A chain that goes on while the next token is worth it.

    Before the drafter's step the chance is guessed from what was accepted so far; behind it, with that cost sunk, from
    the probability of q's most likely token. Both decisions fall before the token is drawn.
    """

    learns: ClassVar[bool] = True
    costs: Costs
    draft_length: int = 16
    explores: bool = False
    """Drafts deeper than pays, to learn; see `SpeculativeDecoder.calibrate`."""
    experience: dict[bool, Experience] = field(default_factory=dict, repr=False)
    """By greedy or not. A text begins with a copy of it, see `fresh`."""

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")
        for greedy in (False, True):
            self.experience.setdefault(greedy, Experience(self.costs, greedy=greedy))

    def fresh(self) -> Self:
        return replace(self, experience=deepcopy(self.experience))

    def grow(self, builder: DraftBuilder) -> Growing:
        known = self.experience[builder.greedy]
        node, survival, speed = ROOT, 1.0, known.speed.tokens_per_second
        while (depth := builder.depth(node)) < min(self.draft_length, builder.room):
            check = self.costs.verify_seconds(depth + 2) - self.costs.verify_seconds(depth + 1)
            step = self.costs.draft_seconds(1) + check
            explores = self.explores and depth < EXPLORED
            if (
                depth > 0
                and not explores
                and known.survival.rate(survival * known.first.mean, depth + 1) < speed * step
            ):
                break
            q_V = builder.probabilities((yield [node]), [node])[0]
            confidence = float(q_V.max())
            survival *= known.first.rate(confidence)
            if depth > 0 and not explores and known.survival.rate(survival, depth + 1) < speed * check:
                break
            child = builder.follow_q(q_V, node)
            if child is None:
                break
            builder.confidence.append(confidence)
            builder.survival.append(survival)
            node = child
        return builder.draft()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        known = self.experience[builder.greedy]
        for confidence, overlap in zip(builder.confidence, result.overlap, strict=False):
            known.first.observe(confidence, overlap)
        for place, chance in enumerate(builder.survival):
            known.survival.observe(chance, place + 1, place < result.accepted)
        steps = max(len(draft), 1)
        seconds = steps * self.costs.draft_seconds(1) + self.costs.verify_seconds(len(draft) + 1) + self.costs.round
        known.speed.observe(result.accepted + 1, seconds)

    def __str__(self) -> str:
        return f"adaptive:draft_length={self.draft_length}"


@dataclass
class OptimalTree:
    """A tree whose every node is worth its seconds: size and depth follow from costs and acceptance, not from settings.

    Nodes are weighed by the calibrated chance that the accepted path reaches them. Another level is drafted while what
    it may add pays for the drafter's pass. Greedy runs take the most likely candidates; of all of them those stay that
    pay for their own verification. Sampled runs draw siblings without replacement, each while its chance pays, so that
    the ratio rules apply: whether a token is drawn is settled by what stands above and before it.
    """

    learns: ClassVar[bool] = True
    costs: Costs
    size: int = 48
    depth: int = 16
    top_k: int = 4
    explores: bool = False
    """Drafts deeper than pays, to learn; see `SpeculativeDecoder.calibrate`."""
    experience: dict[bool, Experience] = field(default_factory=dict, repr=False)
    """By greedy or not. A text begins with a copy of it, see `fresh`."""

    def __post_init__(self) -> None:
        require_counts(self, "size", "depth", "top_k")
        for greedy in (False, True):
            self.experience.setdefault(greedy, Experience(self.costs, greedy=greedy))

    def fresh(self) -> Self:
        return replace(self, experience=deepcopy(self.experience))

    def grow(self, builder: DraftBuilder) -> Growing:
        return (yield from self._chosen(builder) if builder.greedy else self._drawn(builder))

    def _chosen(self, builder: DraftBuilder) -> Growing:
        known = self.experience[True]
        candidates, nodes = Candidates(builder), [ROOT]
        for depth in range(1, min(self.depth, builder.room) + 1):
            q_nV = builder.probabilities((yield nodes), nodes)
            builder.passes += 1
            for node, chances, tokens in zip(nodes, *top(q_nV, self.top_k), strict=True):
                rates = [known.rank(rank).rate(chance) for rank, chance in enumerate(chances)]
                candidates.add(node, rates, tokens, chances)
            worth = self._worth(candidates, known)
            new = [place for place in worth if candidates.depth(place) == depth]
            mass = sum(known.survival.rate(candidates.weight(place), depth) for place in new)
            if depth == min(self.depth, builder.room) or not self._next_level_pays(mass, len(new), len(worth), known):
                break
            nodes = [candidates.node(place) for place in new]
        draft = candidates.draft(self._worth(candidates, known) or candidates.best(1))
        kept = [candidates.of_node(node) for node in builder.origin(tuple(range(len(draft))))]
        builder.confidence, builder.ranks = [c.confidence for c in kept], [c.rank for c in kept]
        builder.survival = [c.weight for c in kept]
        return draft

    def _worth(self, candidates: Candidates, known: Experience) -> list[int]:
        """The candidates that pay for their own verification, best first."""
        places, speed = candidates.best(self.size), known.speed.tokens_per_second
        for count, place in enumerate(places):
            if known.survival.rate(candidates.weight(place), candidates.depth(place)) < speed * self._slope(count):
                return places[:count]
        return places

    def _drawn(self, builder: DraftBuilder) -> Growing:
        known = self.experience[False]
        level, speed = [(ROOT, 1.0)], known.speed.tokens_per_second
        for depth in range(1, min(self.depth, builder.room) + 1):
            nodes = [node for node, _ in level]
            q_nV = builder.probabilities((yield nodes), nodes)
            builder.passes += 1
            confidences = q_nV.max(-1).values.tolist()
            below: list[tuple[int, float]] = []
            first = nodes[0]
            for (node, weight), q_V, confidence in zip(level, q_nV, confidences, strict=True):
                for rank in range(self.top_k):
                    chance = weight * known.rank(rank).rate(confidence)
                    least = max(speed * self._slope(len(builder.tokens)), LEVELS / self.size)
                    paid = known.survival.rate(chance, depth) >= least and len(builder.tokens) < self.size
                    explores = self.explores and rank == 0 and node == first
                    if not paid and not explores and builder.tokens:  # the first token is always drafted
                        break
                    child = builder.draw(node, q_V)
                    if child is None:
                        break
                    builder.confidence.append(confidence)
                    builder.ranks.append(rank)
                    builder.survival.append(chance)
                    below.append((child, chance))
            mass = sum(known.survival.rate(chance, depth) for _, chance in below)
            explores = self.explores and below and depth < EXPLORED
            if not explores and not self._next_level_pays(mass, len(below), len(builder.tokens), known):
                break
            level = below
        return builder.draft()

    def _next_level_pays(self, mass: float, width: int, nodes: int, known: Experience) -> bool:
        """Whether a pass over `width` nodes, reached with chance `mass` in all, is likely to bring what it costs."""
        if width == 0:
            return False
        seconds = self.costs.draft_seconds(width) + self._slope(nodes) * width
        return mass * known.first.mean >= known.speed.tokens_per_second * seconds

    def _slope(self, nodes: int) -> float:
        """Seconds that the next node adds to a verification of `nodes`; averaged, since a measured curve has steps."""
        return (self.costs.verify_seconds(nodes + 5) - self.costs.verify_seconds(nodes + 1)) / 4

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        known = self.experience[builder.greedy]
        accepted, reached = set(result.path), {ROOT, *result.path}
        for node, parent in enumerate(draft.parents):
            known.survival.observe(builder.survival[node], draft.depths[node], node in accepted)
            if parent in reached:
                known.rank(builder.ranks[node]).observe(builder.confidence[node], float(node in accepted))
        width = max(1, len(draft) // max(builder.passes, 1))
        seconds = self.costs.verify_seconds(len(draft) + 1) + builder.passes * self.costs.draft_seconds(width)
        seconds += self.costs.round
        known.speed.observe(result.accepted + 1, seconds)

    def __str__(self) -> str:
        return f"optimal-tree:size={self.size},depth={self.depth},top_k={self.top_k}"
