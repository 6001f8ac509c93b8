"""Readings of the metrics of a run: whether tau still rises, and where its time went."""

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


@dataclass(frozen=True)
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


def training_cost(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the steps, trained tokens and minutes of a run's training steps; None without any step."""
    rows = [row for row in metrics if row.get("seconds") and row.get("tokens_per_second")]
    if not rows:
        return None
    tokens, seconds = (
        sum(values)
        for values in zip(*((r["tokens_per_second"] * r["seconds"], r["seconds"]) for r in rows), strict=True)
    )
    return f"{len(rows):,} training steps over {tokens:,.0f} tokens took {seconds / 60:.1f} minutes"


def time_split(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the time of a run's training steps by part; None for a run that did not measure it.

    `metrics`: rows of the run's `metrics.jsonl`. The first step, in which libraries choose kernels, is left out.
    """
    rows = [row["seconds_by_part"] for row in metrics if row.get("seconds_by_part")]
    rows = rows[1:] or rows
    totals = {part: sum(row.get(part, 0.0) for row in rows) for part in (rows[-1] if rows else {})}
    whole = sum(totals.values())
    if not whole:
        return None
    shares = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in totals.items())
    return f"A training step took {1000 * whole / len(rows):.0f} ms: {shares}"
