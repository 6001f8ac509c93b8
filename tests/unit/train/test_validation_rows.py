"""The metrics of the periodic evaluation, and where a run ends before its last step."""

from typing import Any

import numpy as np
import pytest

from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.errors import ConfigError
from draftsmith.train.recipe import Recipe, parse_recipe
from draftsmith.train.validation import METRICS, early_end, tau_estimate, tau_rise


def _output(*rounds: tuple[int, tuple[float, ...]]) -> DecodeOutput:
    """Return a text of rounds with a draft of two tokens, of which some were accepted."""
    times = {"draft_seconds": 0.0, "verify_seconds": 0.0, "seconds": 0.0}
    records = [
        Round(drafted=2, depth=2, accepted=accepted, committed=accepted + 1, overlap=overlap, **times)
        for accepted, overlap in rounds
    ]
    return DecodeOutput([5, 6], list(range(1 + sum(record.committed for record in records))), records, 0.0, "length")


def test_metrics_are_those_of_all_rounds_of_all_texts() -> None:
    texts = [_output((2, (0.5, 1.0)), (0, (0.25,))), _output((1, (1.0, 0.0)))]
    found = {name: metric(texts) for name, metric in METRICS.items()}
    assert found == {
        "alpha": pytest.approx(2.75 / 5),
        "tau": pytest.approx((3 + 1 + 2) / 3),
        "tokens": [4, 2],
        "rounds": [2, 1],
        "acceptance_at": [pytest.approx(2 / 3), pytest.approx(1 / 2)],
    }
    assert (METRICS["alpha"]([_output()]), METRICS["tau"]([_output()])) == (0, 1), "texts of one token have no round"


def _recipe(**train: Any) -> Recipe:
    values = {"name": "x", "output": "y", "drafter": {"type": "medusa"}, "train": {"steps": 100, **train}}
    return parse_recipe(values, "here")


def _rows(*taus: float) -> list[dict[str, Any]]:
    """Evaluations at steps 0, 10, …; two prompts, one of them 0.2 higher than the other."""
    return [
        {"step": 10 * i, "evaluation": {"tokens": [100 * (tau - 0.1), 100 * (tau + 0.1)], "rounds": [100, 100]}}
        for i, tau in enumerate(taus)
    ]


def test_a_rise_is_judged_on_the_same_prompts() -> None:
    """Prompts differ by far more than tau rises; a rise that all share is significant all the same."""
    spread_P = np.random.default_rng(0).normal(0, 0.5, 20)
    taus_E1 = 2 + np.arange(0, 60, 10)[:, None] / 1000
    tokens_EP = np.round(1000 * (taus_E1 + spread_P - spread_P.mean()))
    rounds_EP = np.full_like(tokens_EP, 1000.0)
    rise = tau_rise(tokens_EP, rounds_EP, 3)
    assert rise is not None
    assert rise.value == pytest.approx(0.03, abs=1e-3)
    assert 0.025 < rise.interval[0] < rise.interval[1] < 0.035
    last = tau_estimate(tokens_EP[-1], rounds_EP[-1])
    assert last.value == pytest.approx(2.05, abs=1e-3)
    # 20 prompts whose tau has a deviation of 0.5: the mean's interval is about 2 * 1.96 * 0.5 / sqrt(20) = 0.44 wide.
    assert 0.25 < last.interval[1] - last.interval[0] < 0.65
    assert tau_rise(tokens_EP, rounds_EP, 4) is None
    rise = tau_rise(tokens_EP, rounds_EP, 1)
    assert rise is not None
    assert rise.value == pytest.approx(0.01, abs=1e-3)


def test_a_run_ends_when_tau_has_stopped_rising() -> None:
    recipe = _recipe(patience=2)
    assert early_end(recipe.train, _rows(1.0, 1.5, 2.0, 2.1), 30, decaying=False) is None
    assert early_end(recipe.train, _rows(2.0, 2.0, 2.0), 20, decaying=False) is None, "too early to say"
    end = early_end(recipe.train, _rows(1.0, 2.0, 2.1, 2.0, 2.1), 40, decaying=False)
    assert end == (40, "tau has stopped rising: +0.00 [0.00, 0.00] from 2 evaluations to the next 2")


def test_a_stable_run_decays_first_if_there_is_time() -> None:
    rows = _rows(2.0, 2.0, 2.0, 2.0)
    recipe = _recipe(patience=2, schedule="wsd", decay_fraction=0.2)
    end = early_end(recipe.train, rows, 30, decaying=False)
    assert end is not None
    assert end[0] == 50
    assert early_end(recipe.train, rows, 30, decaying=True) is None
    assert early_end(recipe.train, rows, 80, decaying=False) is None, "the decay has begun anyway"


def test_a_run_ends_when_the_interval_of_tau_is_above_the_goal() -> None:
    rows = _rows(1.0, 3.0)  # the last interval is [2.9, 3.1]
    assert early_end(_recipe(target_tau=3.0).train, rows, 10, decaying=False) is None
    for decaying in (False, True):
        end = early_end(_recipe(target_tau=2.9).train, rows, 10, decaying)
        assert end is not None
        assert end == (10, "tau 3.00 [2.90, 3.10] has reached train.target_tau=2.9")


def test_one_prompt_gives_no_interval() -> None:
    values = {"name": "x", "output": "y", "drafter": {"type": "medusa"}, "evaluation": {"count": 1}}
    for train in ({"patience": 2}, {"target_tau": 3}):
        with pytest.raises(ConfigError, match=r"with evaluation\.count=1; expected at least 2 prompts"):
            parse_recipe({**values, "train": train}, "here")
    alone = [{"step": 0, "evaluation": {"tokens": [9], "rounds": [1]}}] * 2
    assert early_end(_recipe(target_tau=3.0, patience=1).train, alone, 0, decaying=False) is None
