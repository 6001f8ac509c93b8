"""Policies that maximize tokens per second on this machine, from measured costs and learned acceptance.

Speed is the ratio E[tokens] / E[seconds]. For the maximum speed lambda, drafting a token increases speed if its
acceptance probability is at least lambda times the seconds that it adds; lambda is the fixed point at which the speed
of the plan is lambda (Dinkelbach 1967). Both policies keep a running estimate of lambda.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import ClassVar, Self

from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.builder import Children, DraftBuilder, DrawChildren, Look, Read
from draftsmith.decode.policies.base import Growing, MostNodes, Policy, require_counts
from draftsmith.decode.policies.experience import Experience
from draftsmith.decode.policies.trees import Candidates
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.heads.draft_tree import ROOT, Draft

LEVELS = 4
"""A tree is drawn level by level: where nodes cost almost nothing, its size is spread over about this many levels."""
EXPLORED = 8
"""Depth of drafts during `calibrate`, so that a policy observes tokens that it would not draft otherwise."""
PERFECT = 0.9
"""Acceptance probability that drafters hardly exceed; `AdaptiveChain.may_pay` decides with it for a whole batch."""


@dataclass
class Planned(Policy):
    """A policy that plans with measured costs and with what it has learned."""

    learns: ClassVar[bool] = True
    costs: Costs
    explores: bool = field(default=False, kw_only=True)
    """Draft deeper than is fastest, to learn; see `SpeculativeDecoder.calibrate`."""
    texts: int = field(default=1, kw_only=True)
    """Number of texts that are decoded together; `costs` are the share of each."""
    experience: dict[bool, Experience] = field(default_factory=dict, repr=False, kw_only=True)
    """By whether decoding is greedy. Each text starts with a copy, see `fresh`."""

    def __post_init__(self) -> None:
        require_counts(self, *(one.name for one in fields(self) if one.type in (int, "int") and not one.kw_only))
        for greedy in (False, True):
            self.experience.setdefault(greedy, Experience(self.costs, greedy=greedy))

    def fresh(self) -> Self:
        return replace(self, experience=deepcopy(self.experience))


@dataclass
class AdaptiveChain(Planned):
    """A chain that continues while the next token increases the expected tokens per second; often it is empty.

    Before the drafter's step, acceptance is estimated from earlier rounds; after the step, whose cost is then spent,
    from the maximum of q. Both decisions are made before the token is drawn. Where no draft pays, one token is drafted
    from time to time to learn whether that is still so. A retrieved draft is cut where its next token does not pay, and
    gives way to the drafter's own drafts where these have gained more.
    """

    branches: ClassVar[bool] = False
    draft_length: int = 16

    def may_pay(self, *, retrieved: bool) -> bool:
        """Return whether some draft pays if each of its tokens is accepted with probability `PERFECT`.

        `retrieved`: drafts may be retrieved, which costs nothing.
        """
        speed, depths = 1 / self.costs.plain, range(1, self.draft_length + 1)
        copies = accumulate(PERFECT**depth - speed * self.texts * self._check(depth) for depth in depths)
        return (retrieved and max(copies) > 0) or self._pays(speed, depths, lambda depth: PERFECT**depth)

    def _check(self, depth: int) -> float:
        """Return the seconds that a verification takes longer with a token at this depth."""
        return self.costs.verify_seconds(depth + 1) - self.costs.verify_seconds(depth)

    def _pays(self, speed: float, depths: range, rate: Callable[[int], float], *, drafted: bool = False) -> bool:
        """Return whether a draft that ends at some of these depths is worth the seconds of its tokens there.

        The first tokens alone may not be worth it: a pass over two tokens can take as long as one over eight.

        Args:
            rate: the probability that the tokens up to a depth are accepted.
            drafted: the drafter's pass for the first of them is over.
        """
        step = self.costs.draft_seconds(1)
        gain = speed * step if drafted else -speed * self.costs.first if depths.start == 1 else 0.0
        for depth in depths:
            gain += rate(depth) - speed * (step + self._check(depth))
            if gain >= 0:
                return True
        return False

    def grow(self, builder: DraftBuilder) -> Growing:
        experience = self.experience[builder.greedy]
        speed = experience.speed.tokens_per_second
        node, survival, most = ROOT, 1.0, min(self.draft_length, builder.room)
        while (depth := builder.depth(node)) < most:
            explores = (self.explores and depth < EXPLORED) or (depth == 0 and experience.curious)
            depths = range(depth + 1, most + 1)
            if not explores and not self._pays(speed, depths, experience.ahead(survival, depth)):
                break
            look: Look = yield Read([node])
            builder.passes += 1
            confidence = builder.estimates.get(node, look.values[0][0])
            survival *= experience.first.rate(confidence)
            if not explores and not self._pays(speed, depths, experience.ahead(survival, depth + 1), drafted=True):
                break
            child = yield from builder.follow(look)
            if child is None:
                break
            builder.confidence.append(confidence)
            builder.survival.append(survival)
            node = child
        return builder.draft()

    def retrieved(self, draft: Draft, *, greedy: bool) -> Draft:
        # Other texts of a batch seldom have a match in the same round, and are padded to this one's draft.
        experience = self.experience[greedy]
        if not draft.is_chain:
            return draft
        rate, speed = experience.copied.rate(len(draft)), experience.speed.tokens_per_second
        gain, best, kept = 0.0, max(experience.gain, 0.0), 0
        for depth in range(1, len(draft) + 1):
            gain += rate**depth - speed * self.texts * self._check(depth)
            if gain > best:
                best, kept = gain, depth
        return draft.keep([*range(kept)])

    def observe_retrieved(self, length: int, verified: int, accepted: int, *, greedy: bool) -> None:
        experience = self.experience[greedy]
        experience.copied.observe(length, verified, accepted)
        experience.speed.observe(accepted + 1, self.costs.verify_seconds(verified + 1) + self.costs.round)

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        experience = self.experience[builder.greedy]
        for confidence, overlap in zip(builder.confidence, result.overlap, strict=False):
            experience.first.observe(confidence, overlap)
        for place, survival in enumerate(builder.survival):
            experience.survival.observe(survival, place + 1, place < result.accepted)
        seconds = self.costs.drafting(builder.passes) + self.costs.verify_seconds(len(draft) + 1) + self.costs.round
        speed = experience.speed.tokens_per_second
        experience.drafted(len(draft), result.accepted - speed * (seconds - self.costs.plain))
        experience.speed.observe(result.accepted + 1, seconds)

    def __str__(self) -> str:
        return f"adaptive:draft_length={self.draft_length}"


@dataclass
class OptimalTree(Planned):
    """A tree whose size and depth follow from costs and acceptance: every node increases expected tokens per second.

    Nodes are weighted by the calibrated probability that the accepted path reaches them. Another level is drafted while
    its expected tokens are worth the drafter's pass. Greedy runs choose the most likely candidates and keep those that
    are worth their verification. Sampled runs draw siblings without replacement while the next one is worth its
    verification; this decision depends on earlier nodes only, so rules that compare p with q apply.
    """

    size: int = 48
    depth: int = 16
    top_k: int = 4

    @property
    def most_nodes(self) -> MostNodes:
        """Nodes for compiled passes: where it explores, each level may have one more than is worth it."""
        return MostNodes(self.size + self.depth, (self.size + 1) * self.depth)

    def grow(self, builder: DraftBuilder) -> Growing:
        return (yield from self._chosen(builder) if builder.greedy else self._drawn(builder))

    def _chosen(self, builder: DraftBuilder) -> Growing:
        experience = self.experience[True]
        candidates, nodes = Candidates(builder), [ROOT]
        for depth in range(1, min(self.depth, builder.room) + 1):
            look: Look = yield Read(nodes, self.top_k)
            builder.passes += 1
            for node, confidences, tokens in zip(nodes, look.values, look.tokens, strict=True):
                rates = [experience.rank(rank).rate(q) for rank, q in enumerate(confidences)]
                candidates.add(node, rates, tokens, confidences)
            worth = self._worth(candidates, experience)
            new = [place for place in worth if candidates.depth(place) == depth]
            mass = sum(experience.survival.rate(candidates.weight(place), depth) for place in new)
            pays = self._next_level_pays(mass, len(new), len(worth), experience)
            if depth == min(self.depth, builder.room) or not pays:
                break
            nodes = [candidates.node(place) for place in new]
        draft = candidates.draft(self._worth(candidates, experience) or candidates.best(1))
        kept = [candidates.of_node(node) for node in builder.origin(tuple(range(len(draft))))]
        builder.confidence, builder.ranks = [c.confidence for c in kept], [c.rank for c in kept]
        builder.survival = [c.weight for c in kept]
        return draft

    def _worth(self, candidates: Candidates, experience: Experience) -> list[int]:
        """Return the candidates that are worth the seconds of their verification, most likely first."""
        places, speed = candidates.best(self.size), experience.speed.tokens_per_second
        for count, place in enumerate(places):
            if experience.survival.rate(candidates.weight(place), candidates.depth(place)) < speed * self._slope(count):
                return places[:count]
        return places

    def _drawn(self, builder: DraftBuilder) -> Growing:
        experience, level = self.experience[False], [(ROOT, 1.0)]
        for depth in range(1, min(self.depth, builder.room) + 1):
            nodes = [node for node, _ in level]
            look: Look = yield Read(nodes, support=True)
            builder.passes += 1
            planned = self._planned(builder, [weight for _, weight in level], look, depth)
            children: Children = (yield DrawChildren(list(map(len, planned)))) if any(planned) else []
            below = [
                (child, survival)
                for own, drawn in zip(planned, children, strict=False)
                for survival, (child, _) in zip(own, drawn, strict=True)
            ]
            mass = sum(experience.survival.rate(survival, depth) for _, survival in below)
            explores = self.explores and below and depth < EXPLORED
            if not explores and not self._next_level_pays(mass, len(below), len(builder.tokens), experience):
                break
            level = below
        return builder.draft()

    def _planned(self, builder: DraftBuilder, weights: list[float], look: Look, depth: int) -> list[list[float]]:
        """Return the estimated survival of each child to draw, by node, and store what `observe` needs of them."""
        experience, total = self.experience[False], len(builder.tokens)
        speed, planned = experience.speed.tokens_per_second, []
        for place, (weight, (confidence,), support) in enumerate(zip(weights, look.values, look.support, strict=True)):
            own: list[float] = []
            for rank in range(min(self.top_k, support)):
                survival = weight * experience.rank(rank).rate(confidence)
                least = max(speed * self._slope(total), LEVELS / self.size)
                paid = experience.survival.rate(survival, depth) >= least and total < self.size
                explores = self.explores and rank == place == 0
                if not paid and not explores and total > 0:  # the first token is always drafted
                    break
                own.append(survival)
                total += 1
            builder.confidence += [confidence] * len(own)
            builder.ranks += range(len(own))
            builder.survival += own
            planned.append(own)
        return planned

    def _next_level_pays(self, mass: float, width: int, nodes: int, experience: Experience) -> bool:
        """Return whether a pass over `width` nodes, reached with total probability `mass`, is worth its seconds."""
        if width == 0:
            return False
        seconds = self.costs.draft_seconds(width) + self._slope(nodes) * width
        return mass * experience.first.mean >= experience.speed.tokens_per_second * seconds

    def _slope(self, nodes: int) -> float:
        """Return the seconds that one more node adds to a verification, averaged over four nodes to smooth steps."""
        return (self.costs.verify_seconds(nodes + 5) - self.costs.verify_seconds(nodes + 1)) / 4

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        experience = self.experience[builder.greedy]
        accepted, reached = set(result.path), {ROOT, *result.path}
        for node, parent in enumerate(draft.parents):
            experience.survival.observe(builder.survival[node], draft.depths[node], node in accepted)
            if parent in reached:
                experience.rank(builder.ranks[node]).observe(builder.confidence[node], float(node in accepted))
        width = max(1, len(draft) // max(builder.passes, 1))
        seconds = self.costs.drafting(builder.passes, width) + self.costs.verify_seconds(len(draft) + 1)
        seconds += self.costs.round
        experience.speed.observe(result.accepted + 1, seconds)

    def __str__(self) -> str:
        return f"optimal-tree:size={self.size},depth={self.depth},top_k={self.top_k}"
