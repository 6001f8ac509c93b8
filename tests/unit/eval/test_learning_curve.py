"""Curves of tau by step with known answers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftsmith.eval.learning_curve import LearningCurve, outlook, time_split

ROUNDS = 1000


def _metrics(tau: Callable[[int], float], steps: Sequence[int], prompts: int = 20, noise: float = 0.0) -> list[dict]:
    """Rows of a run whose prompts have a tau of their own, around the one of the step."""
    rng = np.random.default_rng(0)
    own = rng.normal(0, noise, prompts)
    own -= own.mean()
    rows: list[dict[str, Any]] = [{"step": steps[0], "loss": 1.0, "alpha": [0.5]}]
    for step in steps:
        tokens = [round(ROUNDS * (tau(step) + shift)) for shift in own]
        rows.append({"step": step, "evaluation": {"tau": tau(step), "tokens": tokens, "rounds": [ROUNDS] * prompts}})
    return rows


def _curve(*arguments: Any, **options: Any) -> LearningCurve:
    curve = LearningCurve.of(_metrics(*arguments, **options))
    assert curve is not None
    return curve


@pytest.mark.parametrize("exponent", [0.3, 1.0])
def test_a_power_law_is_extrapolated(exponent: float) -> None:
    """The grid's nearest exponent is within 6 %; at twice the steps this moves tau by less than 0.01."""

    def tau(step: int) -> float:
        return 4 - 6 * step**-exponent

    expected = _curve(tau, range(50, 501, 50)).expected(2)
    assert expected is not None
    now, then = expected
    assert now.value == pytest.approx(tau(500), abs=0.01)
    assert then.value == pytest.approx(tau(1000), abs=0.01)
    assert then.interval[0] <= then.value <= then.interval[1]


def test_a_flat_or_falling_curve_promises_nothing() -> None:
    for tau in (lambda step: 2.0, lambda step: 3 - step / 1000):
        expected = _curve(tau, range(0, 600, 100)).expected(2)
        assert expected is not None
        assert expected[1].value == pytest.approx(expected[0].value)


def test_step_0_is_no_part_of_the_fit_and_fewer_than_five_evaluations_have_none() -> None:
    steps = [0, 100, 200, 300, 400]
    assert _curve(lambda step: 2 - 1 / (1 + step), steps).expected(2) is None
    assert outlook(_metrics(lambda step: 2 - 1 / (1 + step), steps)) is None
    assert outlook([{"step": 1, "loss": 1.0, "alpha": [0.5]}]) is None
    old = [{"step": step, "evaluation": {"tau": 2.0}} for step in range(9)]
    assert outlook(old) is None, "runs of earlier versions have no numbers by prompt"
    text = outlook(_metrics(lambda step: 3 - max(1, step) ** -0.5, [0, 100, 200, 300, 400, 500]))
    assert text is not None
    assert text.startswith("Twice the steps (1000) would bring about tau 2.97 [")
    assert "at step 500: a fit of a - b / step^c to 5 evaluations on 20 held-out prompts" in text


def test_a_rise_is_judged_on_the_same_prompts() -> None:
    """Prompts differ by far more than the curve rises; a rise that all share is significant all the same."""
    curve = _curve(lambda step: 2 + step / 1000, range(0, 60, 10), noise=0.5)
    rise = curve.rise(3)
    assert rise is not None
    assert rise.value == pytest.approx(0.03, abs=1e-3)
    assert 0.025 < rise.interval[0] < rise.interval[1] < 0.035
    last = curve.last()
    assert last.value == pytest.approx(2.05, abs=1e-3)
    # 20 prompts whose tau has a deviation of 0.5: the mean's interval is about 2 * 1.96 * 0.5 / sqrt(20) = 0.44 wide.
    assert 0.25 < last.interval[1] - last.interval[0] < 0.65
    assert curve.rise(4) is None
    rise = curve.rise(1)
    assert rise is not None
    assert rise.value == pytest.approx(0.01, abs=1e-3)


def test_averaged_weights_have_a_curve_of_their_own_and_a_single_prompt_has_none() -> None:
    rows = [{"step": 1, "average": {"tau": 2.0, "tokens": [4, 6], "rounds": [2, 2]}}]
    assert LearningCurve.of(rows) is None
    curve = LearningCurve.of(rows, "average")
    assert curve is not None
    assert curve.taus_E.tolist() == [2.5]
    assert LearningCurve.of(_metrics(lambda step: 2.0, [1, 2], prompts=1)) is None


def test_the_time_of_a_step_is_divided_without_the_first_step() -> None:
    rows = [{"step": 1, "seconds_by_part": {"teacher": 9.0, "backward": 1.0}}, {"step": 1}]
    rows += [{"step": n, "seconds_by_part": {"teacher": 0.3 * n, "backward": 0.1 * n}} for n in (2, 3)]
    assert time_split(rows) == "A training step took 1000 ms: teacher 75%, backward 25%"
    assert time_split(rows[:1]) == "A training step took 10000 ms: teacher 90%, backward 10%"
    assert time_split([{"step": 1}]) is None
