"""Tau over the evaluations of a run, with intervals: whether it still rises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from draftsmith.metrics import RESAMPLES, percentiles, ratio, tau

# Shapes: E evaluations, P prompts, S resamples.


class Measured(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    interval: list[float]

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """Tokens and rounds of the same held-out prompts at several steps of a run, [E, P]; at least two prompts."""

    tokens_EP: NDArray
    rounds_EP: NDArray

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> Self | None:
        """Read the rows of a run's `metrics.jsonl`; None without evaluations of two prompts or more."""
        rows = [row["evaluation"] for row in metrics if "evaluation" in row]
        if not rows or len(rows[0]["tokens"]) < 2:
            return None
        return cls(*(np.array([row[name] for row in rows], dtype=float) for name in ("tokens", "rounds")))

    def last(self) -> Measured:
        """Return tau of the last evaluation."""
        tokens_P, rounds_P = self.tokens_EP[-1], self.rounds_EP[-1]
        taus_S1 = self._resampled(tokens_P[None], rounds_P[None])
        return Measured(tau(tokens_P, rounds_P), percentiles(taus_S1[:, 0]))

    def rise(self, window: int) -> Measured | None:
        """Return the difference between tau over the last `window` evaluations and over the `window` before them.

        The interval is for the choice of prompts, which are the same on both sides. None with fewer evaluations.
        """
        if len(self.tokens_EP) < 2 * window:
            return None
        sums = [
            np.stack([counts[-2 * window : -window].sum(0), counts[-window:].sum(0)])
            for counts in (self.tokens_EP, self.rounds_EP)
        ]
        before, after = ratio(*(total.sum(1) for total in sums))
        taus_S2 = self._resampled(*sums)
        return Measured(float(after - before), percentiles(taus_S2[:, 1] - taus_S2[:, 0]))

    def _resampled(self, tokens_EP: NDArray, rounds_EP: NDArray) -> NDArray:
        """Return tau of each evaluation over resampled prompts, [S, E]."""
        prompts = tokens_EP.shape[1]
        drawn_SP = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        return ratio(drawn_SP @ tokens_EP.T, drawn_SP @ rounds_EP.T)
