"""Numbers worked out by hand, and intervals that cover what they claim to and pair what belongs together."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from draftsmith.decode.sequence import Round
from draftsmith.metrics import (
    Resamples,
    Series,
    acceptance_at,
    alpha,
    as_series,
    few_units,
    intervals,
    median_interval,
    often_tested,
    percentiles,
    position_counts,
    resampled_speedups,
    resampled_taus,
    speedup,
    tau,
)


def series(tokens: Any, rounds: Any, seconds: Any, overlap: ArrayLike = 0.0, overlaps: ArrayLike = 0.0) -> Series:
    grids = np.stack(np.broadcast_arrays(tokens, rounds, seconds, overlap, overlaps)).astype(float)
    return as_series(("d", "chain"), 0.0, 1, [[str(unit)] for unit in range(grids.shape[1])], grids)


def measured(rng: np.random.Generator, units: int, gain: float, repeats: int = 3) -> tuple[Series, Series]:
    """Prompts of different hardness, timed with noise: the true speedup over all prompts is `gain`."""
    hard = rng.uniform(0.5, 1.5, units)[:, None]
    tokens = np.full((units, repeats), 100.0)
    noise = rng.normal(1, 0.05, (2, units, repeats))
    spec = series(tokens, tokens / 2 * hard, tokens * 0.01 / gain * hard * noise[1], 0.7 * tokens * hard, tokens)
    return series(tokens, tokens, tokens * 0.01 * noise[0]), spec


def test_tau_alpha_and_acceptance_by_hand() -> None:
    drafted = [(2, 2, 2, 3, (0.9, 0.7)), (2, 2, 0, 1, (0.4,)), (0, 0, 0, 1, ())]
    rounds = [Round(*numbers, 0, 0, 0) for numbers in drafted]
    assert position_counts(rounds) == ([2, 1], [1, 1])
    assert acceptance_at([position_counts(rounds)]) == [0.5, 1.0]
    assert acceptance_at([([4, 0], [3, 0]), ([4], [1])]) == [0.5], "no position that nothing tested"
    assert tau([3, 1, 1], 3) == pytest.approx(5 / 3)
    assert alpha(0.9 + 0.7 + 0.4, 3) == pytest.approx(2 / 3)
    assert (tau(0, 0), alpha(0, 0), acceptance_at([]), acceptance_at([([], [])])) == (0.0, 0.0, [], [])


@pytest.mark.parametrize(
    ("tested", "shown"),
    [([90, 10, 9, 12], 2), ([9, 3, 1, 1], 4), ([90, 80, 20, 10], 4), (None, 4)],
    ids=["rare positions", "all are rare", "none is rare", "an earlier version's row"],
)
def test_positions_that_few_rounds_tested_are_left_out(tested: list[int] | None, shown: int) -> None:
    row = {"acceptance_at": [0.8, 0.7, 1.0, 0.0]} | ({} if tested is None else {"tested_at": tested})
    assert often_tested(row) == row["acceptance_at"][:shown]


def test_intervals_cover_the_truth_at_their_rate() -> None:
    """40 prompts: E[hard] = 1, so speedup 2, tau 2 and alpha 0.7 are what other prompts would give.

    Percentile intervals of 40 units cover slightly less than 0.95: 0.94 here. At that rate one of three falls below
    0.89 in 200 runs with probability 0.01; the seed is fixed, so that this can only happen when the code changes.
    """
    rng, runs = np.random.default_rng(7), 200
    truth = {"speedup_interval": 2.0, "tau_interval": 2.0, "alpha_interval": 0.7}
    hits = dict.fromkeys(truth, 0)
    for run in range(runs):
        for key, (low, high) in intervals(*measured(rng, 40, gain=2.0, repeats=1), seed=run).items():
            hits[key] += low <= truth[key] <= high
    for key, count in hits.items():
        assert 0.89 <= count / runs <= 0.985, key


def test_an_interval_leaves_out_one_value_of_forty_at_each_end() -> None:
    values = np.arange(1001.0)
    assert percentiles(np.random.default_rng(0).permutation(values)) == pytest.approx([25.0, 975.0])
    assert percentiles(np.concatenate([values, [np.nan] * 500])) == pytest.approx([25.0, 975.0])


@pytest.mark.parametrize(("count", "left_out"), [(5, None), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_an_interval_of_the_median(count: int, left_out: int | None) -> None:
    """Values at each end that it leaves out, as in tables of the sign test: of 12, those beyond the third."""
    values = np.random.default_rng(0).permutation(count).tolist()
    expected = None if left_out is None else [left_out, count - 1 - left_out]
    assert median_interval(values) == expected


def test_the_intervals_are_of_the_numbers_that_are_reported() -> None:
    base, spec = measured(np.random.default_rng(1), 60, gain=1.5)
    found = intervals(base, spec, seed=0)
    values = speedup(base, spec), tau(spec["tokens"], spec["rounds"]), alpha(spec["overlap"], spec["overlaps"])
    for key, value in zip(("speedup", "tau", "alpha"), values, strict=True):
        low, high = found[f"{key}_interval"]
        assert low < value < high
        assert high - low < value / 2
    assert found == intervals(base, spec, seed=0), "a seed gives the same intervals"
    assert intervals(None, spec, seed=0) == {**found, "speedup_interval": None}


def test_a_slow_repeat_of_the_machine_widens_nothing() -> None:
    """Both arms of a repeat are drawn together: where both are ten times slower the ratio stays as it is."""
    base, spec = measured(np.random.default_rng(2), 30, gain=2.0)
    quiet = intervals(base, spec, seed=0)["speedup_interval"]
    for each in (base, spec):
        each["seconds"] = (np.array(each["seconds"]) * [1, 10, 1]).tolist()
    assert intervals(base, spec, seed=0)["speedup_interval"] == pytest.approx(quiet, rel=0.05)


def test_draws_by_hand() -> None:
    draws = Resamples(np.array([[0, 0], [1, 0]]), np.array([[[0, 1], [1, 1]], [[1, 0], [0, 0]]]))
    assert draws.totals([[1.0, 2.0], [10.0, 20.0]]).tolist() == [[1 + 2, 2 + 2], [20 + 1, 10 + 1]]
    base, spec = (series(np.full((2, 2), rate), 1, 1) for rate in (1, 3))
    assert resampled_speedups(base, spec, draws).tolist() == [3.0, 3.0]
    assert resampled_taus(spec, draws).tolist() == [3.0, 3.0]


def test_a_resample_takes_the_median_over_repeats_as_the_speedup_does() -> None:
    """Three repeats of one unit, whose ratios are 1, 2 and 9."""
    draws = Resamples(np.array([[0]]), np.array([[[0, 1, 2]]]))
    base, spec = series(np.ones((1, 3)), 1, 1), series([[1.0, 2.0, 9.0]], 1, 1)
    assert resampled_speedups(base, spec, draws).tolist() == [2.0]
    assert speedup(base, spec) == 2.0


def test_resamples_without_a_value_are_left_out() -> None:
    """Two prompts of twelve have drafts, accepted with 0.85 and 0.9; the other answers are one token long."""
    tokens = np.zeros((12, 3))
    tokens[:2] = 100
    accepted = tokens * 0.9
    accepted[0] = 85
    found = intervals(
        series(tokens, tokens, tokens / 100), series(tokens, tokens / 2, tokens / 300, accepted, tokens), 0
    )
    assert found["alpha_interval"] == pytest.approx([0.85, 0.9])
    assert found["tau_interval"] == pytest.approx([2, 2])
    assert found["speedup_interval"] == pytest.approx([3, 3])
    none = series(np.zeros((12, 3)), 0, 0)
    assert set(map(tuple, intervals(none, none, seed=0).values())) == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ([[["a"]] * 24], []),
        ([[["a"]] * 24, [["a"] * 12] * 2], ["Measured on 24 prompts in 2 batches: differences of a few percent mean"]),
        ([[["a"]] * 19], ["Measured on 19 prompts: differences"]),
    ],
)
def test_few_units_of_the_bootstrap_are_noted(conditions: list[list[list[str]]], said: list[str]) -> None:
    assert [note[: len(text)] for note, text in zip(few_units(conditions), said, strict=True)] == said
