"""Sampled texts against the target: the tests they go through, what those would have found, and what follows.

The negative control: a rule that is lossy on purpose. A check that does not find it has shown nothing.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Rng
from draftsmith.decode.verification import Rule, VerifyResult, verify
from draftsmith.decode.verification_rules import typical_rule
from draftsmith.eval.lossless.draws import (
    Continuations,
    Done,
    Plan,
    SampledTarget,
    Texts,
    chi_square,
    draw_continuations,
    draw_texts,
)
from draftsmith.eval.lossless.pit import PLACES, Verify, Watch
from draftsmith.eval.lossless.statistics import (
    chi_square_detects,
    chi_square_tail,
    holm,
    ks_detects,
    ks_distance,
    ks_p_value,
    poisson_tail,
)
from draftsmith.heads.draft_tree import Draft

SHARE = 0.5
"""Of the rounds that are verified the wrong way: a wrong rule that is half right is harder to find."""


def lossy(rule: Rule | None) -> Verify:
    """`rule`, but in half of all rounds draft tokens are kept because the target finds them likely."""

    def verify_wrongly(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
        if rng.bernoulli(SHARE):
            return typical_rule(p_PV, draft, rng)
        return verify(rule, p_PV, draft, rng)

    return verify_wrongly


POWER = 0.9
GRID = 4
"""Pairs of u are counted in 4 x 4 cells."""
EDGE = 1e-5
"""Share of tokens that top-k or top-p may let through at their edge, where rounding decides."""
TESTS = PLACES + 5
ALL_TOKENS, JOINT = "all tokens, by p", "continuations"


@dataclass(frozen=True)
class Test:
    """One test of one hypothesis: these texts are the target's."""

    __test__ = False  # not one of pytest's

    name: str
    count: int
    statistic: float
    p_value: float
    detects: float
    """The deviation that it finds with probability `POWER`: in u's distribution function for the KS tests, in total
    variation of what is counted for the chi-squared ones, as a share of all tokens for impossible ones."""
    adjusted: float = 1.0
    """The p-value after Holm's correction for all tests of this sample."""


@dataclass(frozen=True)
class Sample:
    """What one rule has drawn, and its tests."""

    tests: list[Test]
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    tolerance: float
    continued: str
    """The prompt behind whose end the continuations are."""

    def found(self, level: float) -> list[Test]:
        """Tests that reject."""
        return [test for test in self.tests if test.adjusted < level]


@dataclass(frozen=True)
class SamplingCheck:
    """The rule and the negative control at the same size, and what follows."""

    verdict: Literal["lossless", "lossy", "inconclusive"]
    level: float
    """The chance that a lossless rule is called lossy, all tests together."""
    rule: Sample
    control: Sample


def check_sampling(
    target: PreTrainedModel, decoder: SpeculativeDecoder, plan: Plan, level: float, done: Done
) -> SamplingCheck:
    """Draw with the decoder's rule and with the negative control, at the same size, and test both alike."""
    honest = sample(target, decoder, plan, level, done)
    control = sample(target, decoder, replace(plan, seed=plan.seed + 1), level, done, lossy(decoder.rule))
    if honest.found(level):
        verdict = "lossy"
    elif control.found(level) and decoder.lossless:
        verdict = "lossless"
    else:  # the tests are too weak at this size, or the rule is known to be lossy and was not caught
        verdict = "inconclusive"
    return SamplingCheck(verdict, level, honest, control)


def sample(
    target: PreTrainedModel,
    decoder: SpeculativeDecoder,
    plan: Plan,
    level: float,
    done: Done,
    change: Verify | None = None,
) -> Sample:
    """Draw with the decoder's rule, or with `change` in its place, and put what is drawn through every test."""
    rule, p = decoder.rule, SampledTarget(target, plan.sampling)
    watch = Watch(rule, plan.seed)
    decoder.rule = watch.watched(change)
    try:
        texts = draw_texts(p, decoder, plan, done)
        continued = draw_continuations(p, decoder, plan, done)
    finally:
        decoder.rule = rule
    tests = _tests(texts, watch, continued, level / TESTS)
    assert len(tests) == TESTS
    adjusted = holm([test.p_value for test in tests])
    tests = [replace(test, adjusted=value) for test, value in zip(tests, adjusted, strict=True)]
    counts = {"tokens": texts.tokens, "rounds": texts.rounds, "drafted": texts.drafted, "accepted": texts.accepted}
    return Sample(tests, **counts, tolerance=texts.tolerance, continued=continued.prompt)


def _tests(texts: Texts, watch: Watch, continued: Continuations, level: float) -> list[Test]:
    tolerance = texts.tolerance
    by_place = watch.by_place()
    return [
        _uniform(ALL_TOKENS, torch.cat(texts.u), level, tolerance),
        # Under the p that the rule was given: rounding has no part in it.
        _uniform("drafted rounds, by q/p", torch.cat(by_place), level, 0.0),
        *(_uniform(_place_name(place), u, level, 0.0) for place, u in enumerate(by_place)),
        _independent("first two of a round", torch.cat(texts.pairs), level, tolerance),
        _counted(JOINT, continued.counts_C, continued.expected_C, level, continued.shift),
        _impossible("impossible tokens", texts, level),
    ]


def _place_name(place: int) -> str:
    return f"  behind {place}{' or more' if place == PLACES - 1 else ''} accepted"


def _uniform(name: str, u: Tensor, level: float, tolerance: float) -> Test:
    distance = ks_distance(u) if len(u) else 0.0
    p_value = ks_p_value(distance, len(u), tolerance)
    return Test(name, len(u), distance, p_value, ks_detects(len(u), level, POWER, tolerance))


def _independent(name: str, pairs_n2: Tensor, level: float, tolerance: float) -> Test:
    """Pairs of u, counted in a grid. Rounding moves up to 2 `tolerance` into some cells and out of others: at worst one
    of each, a noncentrality of 2 n (2 tolerance)^2 GRID^2."""
    cells = (pairs_n2 * GRID).long().clamp(0, GRID - 1)
    counts = torch.bincount(cells[:, 0] * GRID + cells[:, 1], minlength=GRID**2).double()
    shift = 8 * len(pairs_n2) * (tolerance * GRID) ** 2
    return _counted(name, counts, torch.full_like(counts, len(pairs_n2) / GRID**2), level, shift)


def _counted(name: str, counts_C: Tensor, expected_C: Tensor, level: float, shift: float) -> Test:
    count = int(counts_C.sum())
    statistic, freedom = chi_square(counts_C, expected_C)
    p_value = chi_square_tail(statistic, freedom, shift) if freedom else 1.0
    return Test(name, count, statistic, p_value, chi_square_detects(freedom, count, level, POWER, shift))


def _impossible(name: str, texts: Texts, level: float) -> Test:
    """Tokens that top-k or top-p rule out, or any of probability zero."""
    count, share = texts.tokens, max(texts.tolerance, EDGE)
    critical = next(k for k in range(1, count + 2) if poisson_tail(k, count * share) < level)
    least = next(k for k in range(critical, 100 * critical) if poisson_tail(critical, k) >= POWER)
    p_value = poisson_tail(texts.impossible, count * share)
    return Test(name, count, float(texts.impossible), p_value, min(1.0, least / count))
