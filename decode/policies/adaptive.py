"""The chain that maximizes tokens per second on this machine, from measured costs and learned acceptance.

Speed is the ratio E[tokens] / E[seconds]. For the maximum speed lambda, drafting a token increases speed if its
acceptance probability is at least lambda times the seconds that it adds; lambda is the fixed point at which the speed
of the plan is lambda (Dinkelbach 1967). The policy keeps a running estimate of lambda.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Self

from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.requests import Growing, Request
from draftsmith.decode.policies.experience import Experience
from draftsmith.decode.policies.policy import ForecastLayout, Policy, require_counts
from draftsmith.heads.draft_tree import ROOT, Draft

if TYPE_CHECKING:
    from draftsmith.decode.drafts.builder import DraftBuilder
    from draftsmith.decode.rules.outcome import VerifyResult

EXPLORED = 8
"""Depth of drafts during `calibrate`, so that a policy observes tokens that it would not draft otherwise."""
PERFECT = 0.9
"""Acceptance probability that drafters hardly exceed; `AdaptiveChain.may_pay` decides with it for a whole batch."""


@dataclass
class AdaptiveChain(Policy):
    """A chain that continues while the next token increases the expected tokens per second; often it is empty.

    Before the drafter's step, acceptance is estimated from earlier rounds; after the step, whose cost is then spent,
    from the maximum of q. Both decisions are made before the token is drawn. Where no draft pays, one token is drafted
    from time to time to learn whether that is still so. A retrieved draft is cut where its next token does not pay, and
    gives way to the drafter's own drafts where these have gained more.
    """

    name: ClassVar[str] = "adaptive"
    learns: ClassVar[bool] = True
    plans: ClassVar[bool] = True
    branches: ClassVar[bool] = False
    costs: Costs
    draft_length: int = 16
    explores: bool = field(default=False, kw_only=True)
    """Draft deeper than is fastest, to learn; see `SpeculativeDecoder.calibrate`."""
    batch_size: int = field(default=1, kw_only=True)
    """Number of sequences that are decoded together; `costs` are the share of each."""
    experience: dict[bool, Experience] = field(default_factory=dict, repr=False, kw_only=True)
    """By whether decoding is greedy. Each sequence starts with a copy, see `fresh`."""

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")
        for greedy in (False, True):
            self.experience.setdefault(greedy, Experience(self.costs, greedy=greedy))

    def fresh(self) -> Self:
        return replace(self, experience=deepcopy(self.experience))

    @property
    def longest(self) -> int:
        return self.draft_length

    def layout(self, *, greedy: bool) -> ForecastLayout:
        return ForecastLayout(refused="learns while it decodes: its drafts depend on all earlier rounds")

    def may_pay(self, *, retrieved: bool) -> bool:
        """Return whether some draft pays if each of its tokens is accepted with probability `PERFECT`.

        `retrieved`: drafts may be retrieved, which costs nothing.
        """
        speed, depths = 1 / self.costs.token_seconds(), range(1, self.draft_length + 1)
        gains = accumulate(PERFECT**depth - speed * self.batch_size * self._check(depth) for depth in depths)
        return (retrieved and max(gains) > 0) or self._pays(speed, depths, lambda depth: PERFECT**depth)

    @cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        """By depth, from 1 on: the seconds of a draft's token there, and those by which the verification is longer."""
        at = self.costs
        return [
            (at.drafting(depth) - at.drafting(depth - 1), at.verify_seconds(depth + 1) - at.verify_seconds(depth))
            for depth in range(1, self.draft_length + 1)
        ]

    def _check(self, depth: int) -> float:
        """Return the seconds that a verification takes longer with a token at this depth."""
        if depth <= self.draft_length:
            return self._seconds[depth - 1][1]
        return self.costs.verify_seconds(depth + 1) - self.costs.verify_seconds(depth)  # of a longer retrieved draft

    def _pays(self, speed: float, depths: range, rate: Callable[[int], float], *, drafted: bool = False) -> bool:
        """Return whether a draft that ends at some of these depths is worth the seconds of its tokens there.

        The first tokens alone may not be worth it: a pass over two tokens can take as long as one over eight.

        Args:
            rate: the probability that the tokens up to a depth are accepted.
            drafted: the drafter's pass for the first of them is over.
        """
        gain = speed * self._seconds[depths.start - 1][0] if drafted else 0.0
        for depth in depths:
            step, check = self._seconds[depth - 1]
            gain += rate(depth) - speed * (step + check)
            if gain >= 0:
                return True
        return False

    def grow(self, builder: "DraftBuilder") -> Growing:
        experience = self.experience[builder.greedy]
        speed = experience.speed.tokens_per_second
        node: int | None = ROOT
        survival, most = 1.0, min(self.draft_length, builder.room)
        while node is not None and (depth := builder.depth(node)) < most:
            explores = (self.explores and depth < EXPLORED) or (depth == 0 and experience.curious)
            depths = range(depth + 1, most + 1)
            if not explores and not self._pays(speed, depths, experience.ahead(survival, depth)):
                break
            look = yield Request([node])
            builder.passes += 1
            confidence = builder.estimates.get(node, look.values[0][0])
            survival *= experience.accepted.rate(confidence)
            if not explores and not self._pays(speed, depths, experience.ahead(survival, depth + 1), drafted=True):
                break
            node = yield from builder.follow(look)
            if node is not None:
                builder.confidence.append(confidence)
                builder.survival.append(survival)
        return builder.draft()

    def retrieved(self, draft: Draft, *, greedy: bool) -> Draft:
        # Other sequences of a batch seldom have a match in the same round, and are padded to the length of this draft.
        experience = self.experience[greedy]
        if not draft.is_chain:
            return draft
        rate, speed = experience.retrieved.rate(len(draft)), experience.speed.tokens_per_second
        gain, best, kept = 0.0, max(experience.gain, 0.0), 0
        for depth in range(1, len(draft) + 1):
            gain += rate**depth - speed * self.batch_size * self._check(depth)
            if gain > best:
                best, kept = gain, depth
        return draft.keep([*range(kept)])

    def observe_retrieved(self, length: int, verified: int, accepted: int, *, greedy: bool) -> None:
        experience = self.experience[greedy]
        experience.retrieved.observe(length, verified, accepted)
        experience.speed.observe(accepted + 1, self.costs.round_seconds(verified, 0))

    def observe(self, builder: "DraftBuilder", draft: Draft, result: "VerifyResult") -> None:
        experience = self.experience[builder.greedy]
        for confidence, overlap in zip(builder.confidence, result.overlap, strict=False):
            experience.accepted.observe(confidence, overlap)
        for depth, survival in enumerate(builder.survival, 1):
            experience.survival.observe(survival, depth, depth <= result.accepted)
        seconds = self.costs.round_seconds(len(draft), builder.passes)
        speed = experience.speed.tokens_per_second
        experience.drafted(len(draft), result.accepted - speed * (seconds - self.costs.token_seconds()))
        experience.speed.observe(result.accepted + 1, seconds)
