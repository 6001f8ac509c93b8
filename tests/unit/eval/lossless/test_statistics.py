"""Tail probabilities against closed forms, exact distributions and simulation."""

import math

import pytest
import torch

from draftsmith.eval.lossless.hypotheses import (
    chi_square_detects,
    chi_square_tail,
    holm,
    kolmogorov_tail,
    ks_detects,
    ks_distance,
    ks_p_value,
    poisson_tail,
)


def exact_ks_tail(distance: float, n: int) -> float:
    """P(D_n > d), exactly: Durbin's matrix (Marsaglia, Tsang and Wang 2003)."""
    k = int(n * distance) + 1
    m, h = 2 * k - 1, k - n * distance
    H = torch.tensor([[float(i - j + 1 >= 0) for j in range(m)] for i in range(m)], dtype=torch.float64)
    for i in range(m):
        H[i, 0] -= h ** (i + 1)
        H[m - 1, i] -= h ** (m - i)
    H[m - 1, 0] += max(2 * h - 1, 0.0) ** m
    for i in range(m):
        for j in range(m):
            if i - j + 1 > 0:
                H[i, j] /= float(math.factorial(i - j + 1))
    return 1 - math.factorial(n) / n**n * float(torch.linalg.matrix_power(H, n)[k - 1, k - 1])


@pytest.mark.parametrize(("x", "tail"), [(1.2239, 0.10), (1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)])
def test_kolmogorov_quantiles(x: float, tail: float) -> None:
    """The table that every textbook has."""
    assert kolmogorov_tail(x) == pytest.approx(tail, rel=1e-3)


def test_both_series_of_kolmogorov_are_one_function() -> None:
    assert kolmogorov_tail(1 - 1e-12) == pytest.approx(kolmogorov_tail(1.0), abs=1e-10)
    assert kolmogorov_tail(0.0) == kolmogorov_tail(0.1) == 1.0


@pytest.mark.parametrize("n", [10, 30, 60])
@pytest.mark.parametrize("x", [0.6, 0.9, 1.2, 1.6])
def test_ks_p_values_are_the_exact_ones(n: int, x: float) -> None:
    """Stephens' correction is very good in the tail, where tests reject, and a little conservative elsewhere."""
    distance = x / math.sqrt(n)
    exact = exact_ks_tail(distance, n)
    assert -0.001 < ks_p_value(distance, n) - exact < (0.001 if x > 1 else 0.025)


def test_ks_distance_by_hand() -> None:
    assert ks_distance(torch.tensor([0.9, 0.2])) == pytest.approx(0.4)  # F_n is 0.5 up to 0.9
    assert ks_distance(torch.tensor([0.5])) == pytest.approx(0.5)
    assert ks_p_value(0.3, 10, tolerance=0.3) == 1.0


@pytest.mark.parametrize("x", [0.5, 3.0, 20.0, 60.0])
def test_chi_square_closed_forms(x: float) -> None:
    assert chi_square_tail(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-9)
    assert chi_square_tail(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-9)
    assert chi_square_tail(x, 4) == pytest.approx(math.exp(-x / 2) * (1 + x / 2), rel=1e-9)


@pytest.mark.parametrize("noncentrality", [0.3, 4.0, 50.0, 900.0])
@pytest.mark.parametrize("x", [2.0, 40.0, 1000.0])
def test_noncentral_chi_square_closed_form(x: float, noncentrality: float) -> None:
    """With one degree of freedom it is (Z + sqrt(lambda))^2."""
    root, mean = math.sqrt(x), math.sqrt(noncentrality)
    tail = (math.erfc((root - mean) / math.sqrt(2)) + math.erfc((root + mean) / math.sqrt(2))) / 2
    assert chi_square_tail(x, 1, noncentrality) == pytest.approx(tail, abs=1e-9)


def test_poisson_tail_is_the_sum() -> None:
    terms = [math.exp(-2.5) * 2.5**k / math.factorial(k) for k in range(60)]
    for count in (0, 1, 4, 12):
        assert poisson_tail(count, 2.5) == pytest.approx(sum(terms[count:]), rel=1e-9)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_ks_finds_what_it_says_it_finds() -> None:
    """Of shifts of that size 90 % are found. With 400 samples fewer than 86 % come up with probability 0.4 %."""
    n, level = 1000, 1e-3
    shift = ks_detects(n, level, 0.9)
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        low = torch.rand(n, generator=generator) < 0.5 + shift
        u = torch.where(low, 0.0, 0.5) + torch.rand(n, generator=generator) / 2
        found += ks_p_value(ks_distance(u), n) < level
    assert found / 400 > 0.86
    assert shift < 0.1


def test_chi_square_finds_what_it_says_it_finds() -> None:
    """A deviation that is spread over all cells, where the bound is sharp; the limits are 4 standard deviations."""
    cells, n, level = 20, 2000, 1e-3
    variation = chi_square_detects(cells - 1, n, level, 0.9)
    p = torch.full((cells,), 1 / cells)
    p[: cells // 2] += 2 * variation / cells
    p[cells // 2 :] -= 2 * variation / cells
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        counts = torch.bincount(torch.multinomial(p, n, replacement=True, generator=generator), minlength=cells)
        found += chi_square_tail(float(((counts - n / cells) ** 2 / (n / cells)).sum()), cells - 1) < level
    assert 0.84 < found / 400 < 0.96


def test_nothing_drawn_finds_nothing() -> None:
    assert ks_detects(0, 0.01, 0.9) == chi_square_detects(0, 10, 0.01, 0.9) == 1.0
    assert ks_p_value(0.0, 0) == 1.0
