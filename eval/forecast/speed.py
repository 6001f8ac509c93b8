"""tau and speedups of a policy, with intervals, from its expected rounds and the seconds of a profile."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from draftsmith.eval.forecast.expected_rounds import ExpectedRounds
from draftsmith.eval.forecast.profile import CostModel
from draftsmith.eval.metrics import acceptance_at

RESAMPLES, COVERED = 1000, 0.95
"""Resamples of the texts for an interval, and its coverage."""
SECONDS_ERROR = 0.02
"""Standard deviation of log(measured / forecast seconds) of known texts that repeated timings do not explain: whole
texts have other rounds than the timed ones, at another time. Source: `coverage` of
benchmarks/forecast.py on greedy code and prose (26 policies): 2.8 % off, of which the timings explain 1.9 %."""


class ForecastSpeed(TypedDict):
    """Speed of a drafter and policy at one batch size."""

    batch_size: int
    speedup: float
    speedup_interval: list[float]
    timings: int
    """Repeated timings that the interval accounts for."""
    tokens_per_second: float


class ForecastNumbers(TypedDict):
    """The computed part of a row."""

    texts: int
    tau: float
    tau_interval: list[float]
    acceptance_at: list[float]
    drafted_per_round: float
    speed: list[ForecastSpeed]


def numbers(
    per_text: Sequence[ExpectedRounds],
    drafter: str,
    hardware: CostModel,
    batches: Sequence[int],
    seed: int,
    policy: str = "",
) -> ForecastNumbers:
    """Return tau and speeds of a row: all tokens over all rounds, and over all seconds."""
    tokens_S = np.array([text.tokens for text in per_text], float)
    rounds_S = np.array([text.rounds for text in per_text])
    rng = np.random.default_rng(seed)
    draws_RS = rng.integers(len(per_text), size=(RESAMPLES, len(per_text)))
    row: ForecastNumbers = {
        "texts": len(per_text),
        "tau": float(tokens_S.sum() / rounds_S.sum()),
        "tau_interval": _interval(tokens_S[draws_RS].sum(1) / rounds_S[draws_RS].sum(1)),
        "acceptance_at": acceptance_at((text.tested_K, text.accepted_K) for text in per_text),
        "drafted_per_round": float(sum(n * w for text in per_text for (n, _), w in text.work.items()) / rounds_S.sum()),
        "speed": [],
    }
    for batch in batches:
        seconds_S, token = seconds(per_text, drafter, hardware, batch, policy), hardware.token_seconds(batch)
        repeated = [
            repeat.token_seconds(batch) * tokens_S.sum() / seconds(per_text, drafter, repeat, batch, policy).sum()
            for repeat in hardware.repeats
        ]
        of_texts_R = token * tokens_S[draws_RS].sum(1) / seconds_S[draws_RS].sum(1)
        row["speed"].append(
            {
                "batch_size": batch,
                "speedup": float(token * tokens_S.sum() / seconds_S.sum()),
                "speedup_interval": _interval(of_texts_R * timing_errors(repeated, RESAMPLES, rng)),
                "timings": len(repeated),
                "tokens_per_second": float(batch * tokens_S.sum() / seconds_S.sum()),
            }
        )
    return row


def seconds(
    per_text: Sequence[ExpectedRounds], drafter: str, hardware: CostModel, batch: int, policy: str
) -> np.ndarray:
    """Return the expected seconds of each text, [S]."""
    keys = {key for text in per_text for key in text.work}
    cost = {key: hardware.round_seconds(drafter, *key, batch, policy) for key in keys}
    return np.array([sum(weight * cost[key] for key, weight in text.work.items()) for text in per_text])


def timing_errors(speedups: Sequence[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` error factors of a speedup from the speedups of repeated timings, [count].

    With s the standard deviation of the logarithms of n speedups: exp(t s / sqrt(n) + SECONDS_ERROR z), t from
    Student's distribution with n - 1 degrees of freedom and z standard normal; a bootstrap of few timings would be too
    narrow. Return ones for fewer than two timings.
    """
    if len(speedups) < 2:
        return np.ones(count)
    spread = np.log(speedups).std(ddof=1)
    t = rng.standard_t(len(speedups) - 1, count)
    return np.exp(t * spread / len(speedups) ** 0.5 + rng.normal(0, SECONDS_ERROR, count))


def _interval(values: np.ndarray) -> list[float]:
    """Return the percentile interval."""
    rest = (1 - COVERED) / 2
    return [float(value) for value in np.quantile(values, [rest, 1 - rest])]
