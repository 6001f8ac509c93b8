"""Test sampled texts against the target's distribution, with the power of each test and a negative control.

The negative control is a deliberately lossy rule: a check that does not detect it has no power. Tail probabilities,
the power of tests and multiple testing are in fp64, from torch's special functions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.draws import Draws
from draftsmith.decode.verification import RULES, Outcome, Rule, VerifyBatch, verify_batch
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
from draftsmith.eval.lossless.pit import PLACES, Watch
from draftsmith.heads.draft_tree import DraftBatch

SHARE = 0.5
"""Share of rounds in which the control verifies wrongly: a rule that is half right is harder to detect."""


def lossy(rule: Rule | None, seed: int = 0) -> VerifyBatch:
    """Return `rule` with typical acceptance, which is lossy, in half of all rounds."""
    coin = torch.Generator().manual_seed(seed)

    def verify_wrongly(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Outcome:
        wrong = torch.rand((), generator=coin) < SHARE
        return verify_batch(RULES["typical"] if wrong else rule, p_BPV, draft, draws)

    return verify_wrongly


POWER = 0.9
GRID = 4
"""Pairs of u are counted in 4 x 4 cells."""
EDGE = 1e-5
"""Share of tokens that may pass top-k or top-p at their threshold because of rounding."""
TESTS = PLACES + 5
ALL_TOKENS, JOINT, IMPOSSIBLE = "all tokens, by p", "continuations", "impossible tokens"


@dataclass(frozen=True)
class Test:
    """A test of the hypothesis that the texts have the target's distribution."""

    __test__ = False  # not a test class of pytest

    name: str
    count: int
    statistic: float
    p_value: float
    detects: float
    """The deviation that it detects with probability `POWER`: of u's distribution function for KS tests, in total
    variation of the counts for chi-squared tests, as a share of all tokens for impossible tokens."""
    adjusted: float = 1.0
    """The p-value after Holm's correction over all tests of this sample."""


@dataclass(frozen=True)
class Sample:
    """Texts sampled with one rule: their tests and counts."""

    tests: list[Test]
    tokens: int
    rounds: int | None
    """None, as for the two counts below: a server does not tell."""
    drafted: int | None
    accepted: int | None
    tolerance: float
    continued: str
    """The prompt whose end is continued for the joint test."""

    def rejects(self, level: float) -> list[Test]:
        """Return the tests that reject at `level`."""
        return [test for test in self.tests if test.adjusted < level]


@dataclass(frozen=True)
class SamplingCheck:
    """Samples of the rule and of the control of the same size, and the verdict."""

    verdict: Literal["lossless", "lossy", "inconclusive"]
    level: float
    """Probability that a lossless rule is called lossy, over all tests."""
    rule: Sample
    control: Sample


def check_sampling(
    target: PreTrainedModel, decoder: SpeculativeDecoder, plan: Plan, level: float, done: Done
) -> SamplingCheck:
    """Sample with the decoder's rule and with the control, and apply the same tests to both."""
    honest = sample(target, decoder, plan, level, done)
    control = sample(target, decoder, replace(plan, seed=plan.seed + 1), level, done, lossy(decoder.rule))
    return judged(honest, control, level, lossless=decoder.lossless)


def judged(honest: Sample, control: Sample, level: float, *, lossless: bool = True) -> SamplingCheck:
    """Return both samples with the verdict; `lossless`: whether the rule is known to be."""
    if honest.rejects(level):
        verdict = "lossy"
    elif control.rejects(level) and lossless:
        verdict = "lossless"
    else:  # the tests are too weak at this size, or the rule is known to be lossy and was not detected
        verdict = "inconclusive"
    return SamplingCheck(verdict, level, honest, control)


def sample(
    target: PreTrainedModel,
    decoder: SpeculativeDecoder,
    plan: Plan,
    level: float,
    done: Done,
    change: VerifyBatch | None = None,
) -> Sample:
    """Sample with the decoder's rule, or with `change` instead, and apply every test."""
    rule, p = decoder.rule, SampledTarget(target, plan.sampling)
    watch = Watch(rule, plan.seed)
    decoder.rule = watch.watched(change)
    try:
        texts = draw_texts(p, decoder, plan, done)
        continued = draw_continuations(p, decoder, plan, done)
    finally:
        decoder.rule = rule
    tests = adjusted(_tests(texts, watch, continued, level / TESTS))
    assert len(tests) == TESTS
    return Sample(
        tests, texts.tokens, texts.rounds, texts.drafted, texts.accepted, texts.tolerance, continued=continued.prompt
    )


def adjusted(tests: list[Test]) -> list[Test]:
    """Return the tests of one sample with their p-values after Holm's correction."""
    values = holm([test.p_value for test in tests])
    return [replace(test, adjusted=value) for test, value in zip(tests, values, strict=True)]


def _tests(texts: Texts, watch: Watch, continued: Continuations, level: float) -> list[Test]:
    tolerance = texts.tolerance
    by_place = watch.by_place()
    return [
        uniform_test(ALL_TOKENS, torch.cat(texts.u), level, tolerance),
        # Relative to the p that the rule received: without rounding differences.
        uniform_test("drafted rounds, by q/p", torch.cat(by_place), level, 0.0),
        *(uniform_test(_place_name(place), u, level, 0.0) for place, u in enumerate(by_place)),
        _independent("first two of a round", torch.cat(texts.pairs), level, tolerance),
        counted_test(JOINT, continued.counts_C, continued.expected_C, level, continued.shift),
        impossible_test(texts.impossible, texts.tokens, texts.tolerance, level),
    ]


def _place_name(place: int) -> str:
    return f"  after {place}{' or more' if place == PLACES - 1 else ''} accepted"


def uniform_test(name: str, u: Tensor, level: float, tolerance: float) -> Test:
    """Return the KS test of u, whose distribution may be `tolerance` from uniform."""
    distance = ks_distance(u) if len(u) else 0.0
    p_value = ks_p_value(distance, len(u), tolerance)
    return Test(name, len(u), distance, p_value, ks_detects(len(u), level, POWER, tolerance))


def _independent(name: str, pairs_n2: Tensor, level: float, tolerance: float) -> Test:
    """Test pairs of u, counted in a grid.

    Rounding moves up to 2 `tolerance` of probability between cells: at worst from one cell to another, a noncentrality
    of 2 n (2 tolerance)^2 GRID^2.
    """
    cells = (pairs_n2 * GRID).long().clamp(0, GRID - 1)
    counts = torch.bincount(cells[:, 0] * GRID + cells[:, 1], minlength=GRID**2).double()
    shift = 8 * len(pairs_n2) * (tolerance * GRID) ** 2
    return counted_test(name, counts, torch.full_like(counts, len(pairs_n2) / GRID**2), level, shift)


def counted_test(name: str, counts_C: Tensor, expected_C: Tensor, level: float, shift: float) -> Test:
    """Return the chi-squared test of counts in the cells of one table."""
    return summed_test(name, *chi_square(counts_C, expected_C), int(counts_C.sum()), level, shift)


def summed_test(name: str, statistic: float, freedom: int, count: float, level: float, shift: float) -> Test:
    """Return the test of a chi-squared statistic, or of a sum of them: `detects` is then the draws' mean."""
    p_value = chi_square_tail(statistic, freedom, shift) if freedom else 1.0
    detects = chi_square_detects(freedom, int(count), level, POWER, shift)
    return Test(name, int(count), statistic, p_value, detects)


def impossible_test(impossible: int, count: int, tolerance: float, level: float) -> Test:
    """Test the number of tokens of probability zero, which top-k or top-p may have excluded."""
    share = max(tolerance, EDGE)
    critical = next(k for k in range(1, count + 2) if poisson_tail(k, count * share) < level)
    least = next(k for k in range(critical, 100 * critical) if poisson_tail(critical, k) >= POWER)
    p_value = poisson_tail(impossible, count * share)
    return Test(IMPOSSIBLE, count, float(impossible), p_value, min(1.0, least / count))


TERMS = 100
"""Terms of the Kolmogorov series; terms after the tenth are 0 in fp64."""


def kolmogorov_tail(x: float) -> float:
    """Return P(K > x) for Kolmogorov's distribution, the limit of sqrt(n) sup |F_n - F|.

    2 sum_k (-1)^(k-1) exp(-2 k^2 x^2), and for small x, where that converges slowly, one minus
    sqrt(2 pi) / x sum_k exp(-(2k - 1)^2 pi^2 / (8 x^2)) (Kolmogorov 1933; Feller 1948).
    """
    if x <= 0:
        return 1.0
    if x < 1:
        series = sum(math.exp(-((2 * k - 1) ** 2) * math.pi**2 / (8 * x * x)) for k in range(1, TERMS))
        return max(0.0, 1 - math.sqrt(2 * math.pi) / x * series)
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, TERMS)))


def _stretch(count: int) -> float:
    """Return the factor from sup |F_n - F| of `count` values to Kolmogorov's variable (Stephens 1970).

    At ten values the tail below 0.1 is accurate to 0.001, and the middle is too high by up to 0.025.
    """
    return math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)


def ks_distance(values: Tensor) -> float:
    """Return sup |F_n(u) - u| of values in [0, 1]."""
    ordered, count = values.double().sort().values, len(values)
    ranks = torch.arange(count + 1, dtype=torch.float64, device=ordered.device) / count
    return max(0.0, float((ranks[1:] - ordered).max()), float((ordered - ranks[:-1]).max()))


def ks_p_value(distance: float, count: int, tolerance: float = 0.0) -> float:
    """Return the p-value of a KS distance of `count` values whose distribution is within `tolerance` of uniform."""
    return kolmogorov_tail(_stretch(count) * (distance - tolerance)) if count else 1.0


def ks_detects(count: int, level: float, power: float, tolerance: float = 0.0) -> float:
    """Return the smallest sup |F(u) - u| that a KS test at `level` detects with probability `power`, for any F.

    At the supremum F_n is a binomial share, whose standard deviation is at most 1 / (2 sqrt n).
    """
    if not count:
        return 1.0
    critical = _solve(kolmogorov_tail, level, 10.0) / _stretch(count)
    return min(1.0, critical + tolerance + NormalDist().inv_cdf(power) / (2 * math.sqrt(count)))


def chi_square_tail(x: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return P(X > x) for a (noncentral) chi-squared X: a Poisson mixture of central ones."""
    if x <= 0:
        return 1.0
    half = noncentrality / 2
    reach = int(half + 12 * math.sqrt(half) + 20) if half else 0
    counts = torch.arange(reach + 1, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(counts, torch.full_like(counts, half)) - half - torch.lgamma(counts + 1))
    tails = torch.special.gammaincc(freedom / 2 + counts, torch.full_like(counts, x / 2))
    return min(1.0, float((weights * tails).sum()))


def chi_square_detects(freedom: int, count: int, level: float, power: float, noncentrality: float = 0.0) -> float:
    """Return the total variation that a chi-squared test of `count` draws at `level` detects with probability `power`.

    The noncentrality n sum d^2 / p is at least n (sum |d|)^2 = 4 n TV^2 (Cauchy-Schwarz), so any deviation of that
    total variation is detected at least as often. `noncentrality`: the one that the null hypothesis allows.
    """
    if not (freedom and count):
        return 1.0
    critical = _solve(
        lambda x: chi_square_tail(x, freedom, noncentrality), level, 10.0 * (freedom + noncentrality + 10)
    )
    wanted = _solve(lambda x: 1 - chi_square_tail(critical, freedom, x), 1 - power, 10.0 * critical)
    return min(1.0, math.sqrt(wanted / (4 * count)))


def poisson_tail(count: int, mean: float) -> float:
    """Return P(X >= count) for a Poisson X."""
    if count <= 0:
        return 1.0
    return float(torch.special.gammainc(*torch.tensor([count, mean], dtype=torch.float64)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple testing: rejecting below a level errs at most that often (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _solve(falling: Callable[[float], float], value: float, high: float) -> float:
    """Return where a function that falls on [0, high] has `value`, by bisection."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return high
