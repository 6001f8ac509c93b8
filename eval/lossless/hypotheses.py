"""Tests of the hypothesis that texts have the target's distribution, their power, and one verdict over all of them.

Samples of the decoder (sampled_texts.py) and answers of a server (served_check.py) are tested alike by `apply_tests`:
beside a sample of the rule there is a control of the same size, which is wrong on purpose, and p-values are corrected
by Holm's method. Tail probabilities and power are in fp64, from torch's special functions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

# Shapes: C cells.

POWER = 0.9
EDGE = 1e-5
"""Share of tokens that may pass top-k or top-p at their threshold because of rounding."""
LEAST = 10
"""Minimum of expected draws in a cell, for the chi-squared approximation (Cochran 1954 requires 5)."""
ALL_TOKENS, JOINT, IMPOSSIBLE = "all tokens, by p", "continuations", "impossible tokens"
String = tuple[int, ...]
Terms = tuple[float, int, float]
"""A chi-squared statistic, or a sum of them, its degrees of freedom, and the noncentrality that rounding may cause."""


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
class RuleSample:
    """Texts sampled with one rule: their tests and counts."""

    tests: list[Test]
    tokens: int
    tolerance: float
    """How far p, and so the distribution of u, may be off by rounding."""
    drafted: int | None = None
    """None: a server does not tell."""

    def rejects(self, level: float) -> list[Test]:
        """Return the tests that reject at `level`."""
        return [test for test in self.tests if test.adjusted < level]


@dataclass(frozen=True)
class SamplingCheck:
    """Samples of the rule and of the control of the same size, and the verdict."""

    verdict: Literal["lossless", "lossy", "inconclusive"]
    level: float
    """Probability that a lossless rule is called lossy, over all tests."""
    rule: RuleSample
    control: RuleSample
    failure: str | None = None
    """The error that ended the pass in twice the precision: there are no tests then."""


def judged(honest: RuleSample, control: RuleSample, level: float, *, lossless: bool = True) -> SamplingCheck:
    """Return both samples with the verdict; `lossless`: whether the rule is known to be."""
    if honest.rejects(level):
        verdict = "lossy"
    elif control.rejects(level) and lossless:
        verdict = "lossless"
    else:  # the tests are too weak at this size, or the rule is known to be lossy and was not detected
        verdict = "inconclusive"
    return SamplingCheck(verdict, level, honest, control)


def apply_tests(
    level: float,
    tokens: int,
    uniform: Mapping[str, tuple[Tensor, float]] = {},
    summed: Mapping[str, tuple[Terms, float]] = {},
    impossible: int | None = None,
    tolerance: float = 0.0,
    drafted: int | None = None,
) -> RuleSample:
    """Return every test of a sample.

    Args:
        level: for all tests together.
        uniform: by test, numbers that are uniform on [0, 1], and how far rounding may move their distribution.
        summed: by test, chi-squared statistics, and the number of draws.
        impossible: tokens to which the target assigns probability 0; None: not known.
    """
    level /= len(uniform) + len(summed) + (impossible is not None)
    tests = [_uniform_test(name, *values, level) for name, values in uniform.items()]
    tests += [_summed_test(name, *terms, level) for name, terms in summed.items()]
    if impossible is not None:
        tests.append(_impossible_test(impossible, tokens, tolerance, level))
    adjusted = holm([test.p_value for test in tests])
    tests = [replace(test, adjusted=value) for test, value in zip(tests, adjusted, strict=True)]
    return RuleSample(tests, tokens, tolerance, drafted)


def _uniform_test(name: str, u: Tensor, tolerance: float, level: float) -> Test:
    """Return the KS test of u, whose distribution may be `tolerance` from uniform."""
    distance = ks_distance(u) if len(u) else 0.0
    p_value = ks_p_value(distance, len(u), tolerance)
    return Test(name, len(u), distance, p_value, ks_detects(len(u), level, POWER, tolerance))


def _summed_test(name: str, terms: Terms, count: float, level: float) -> Test:
    """Return the test of a chi-squared statistic, or of a sum of them: `detects` is then the draws' mean."""
    statistic, freedom, shift = terms
    p_value = chi_square_tail(statistic, freedom, shift) if freedom else 1.0
    detects = chi_square_detects(freedom, int(count), level, POWER, shift)
    return Test(name, int(count), statistic, p_value, detects)


def _impossible_test(impossible: int, count: int, tolerance: float, level: float) -> Test:
    """Test the number of tokens of probability zero, which top-k or top-p may have excluded."""
    share = max(tolerance, EDGE)
    critical = next(k for k in range(1, count + 2) if poisson_tail(k, count * share) < level)
    least = next(k for k in range(critical, 100 * critical) if poisson_tail(critical, k) >= POWER)
    p_value = poisson_tail(impossible, count * share)
    return Test(IMPOSSIBLE, count, float(impossible), p_value, min(1.0, least / count))


def chi_square(counts_C: Tensor, expected_C: Tensor) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom, without cells of expectation 0."""
    possible = expected_C > 0
    terms = (counts_C[possible] - expected_C[possible]) ** 2 / expected_C[possible]
    return float(terms.sum()), max(0, int(possible.sum()) - 1)


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


Drawn = list[list[String]]
"""By context, the continuations that were sampled after it."""
NAMES = ("first token", "first two tokens", "first three tokens")


def against_others(others: Drawn, by_place: bool, drawn: Drawn, level: float) -> RuleSample:
    """Return the tests of continuations against others that are known to have the target's distribution.

    Args:
        others: by context, as many as the tested ones, or more.
        by_place: the first one, two and three tokens are tested, too; for texts, characters are no tokens.
    """
    depths = {JOINT: None, **({name: depth for depth, name in enumerate(NAMES, 1)} if by_place else {})}
    summed = {}
    for name, depth in depths.items():
        statistic, freedom, count = 0.0, 0, 0.0
        for ours, theirs in zip(drawn, others, strict=True):
            terms = homogeneity(ours, theirs, depth)
            statistic, freedom = statistic + terms[0], freedom + terms[1]
            # n sum d^2 / p of one sample becomes n m / (n + m) sum d^2 / p of two.
            count += len(ours) * len(theirs) / (len(ours) + len(theirs))
        summed[name] = (statistic, freedom, 0.0), count
    return apply_tests(level, sum(len(text) for texts in drawn for text in texts), summed=summed)


END = -1
"""The element after the last one of a text."""


def homogeneity(ours: Sequence[String], theirs: Sequence[String], depth: int | None = None) -> tuple[float, int]:
    """Return the chi-squared statistic of two samples of texts, and its degrees of freedom.

    Cells are prefixes that occur often in both samples taken together: given those, each text is equally likely to be
    in either sample if both have one distribution.

    Args:
        depth: the first elements of each text that are compared; None: all.
    """
    both = [(*text[:depth], END) for text in (*ours, *theirs)]
    tables = torch.tensor(
        [[sum(i < len(ours) for i in cell), sum(i >= len(ours) for i in cell)] for cell in _cells(both)],
        dtype=torch.float64,
    )
    expected = tables.sum(1, keepdim=True) * tables.sum(0, keepdim=True) / tables.sum()
    return float(((tables - expected) ** 2 / expected).sum()), len(tables) - 1


def _cells(texts: Sequence[String]) -> list[list[int]]:
    """Return the indices of texts in each cell; a cell expects `LEAST` of each sample, if both are of one size."""
    cells, waiting = [], [(list(range(len(texts))), 0)]
    while waiting:
        members, depth = waiting.pop()
        groups: dict[int, list[int]] = {}
        for index in members:
            groups.setdefault(texts[index][depth], []).append(index)
        large = {first: group for first, group in groups.items() if len(group) >= 2 * LEAST}
        rest = [index for first, group in groups.items() if first not in large for index in group]
        if len(rest) >= 2 * LEAST or not large:
            cells += [rest] if rest else []
        elif rest:  # too few for a cell of their own
            smallest = min(large, key=lambda first: len(large[first]))
            cells.append([*large.pop(smallest), *rest])
        for first, group in large.items():
            if first == END:
                cells.append(group)
            else:
                waiting.append((group, depth + 1))
    return cells
