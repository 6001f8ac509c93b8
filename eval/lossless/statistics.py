"""Tail probabilities, power of tests, and multiple testing; in fp64, from torch's special functions."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch

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


def ks_distance(values: torch.Tensor) -> float:
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
