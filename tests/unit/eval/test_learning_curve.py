"""Curves of tau by step with known answers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftsmith.eval.learning_curve import LearningCurve

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
    assert LearningCurve.of(_metrics(lambda step: 2.0, [1, 2], prompts=1)) is None
