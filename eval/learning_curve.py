"""Readings of the metrics of a run: whether tau still rises, what more steps would bring, and where its time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from draftsmith.metrics import RESAMPLES, percentiles, ratio

# Shapes: E evaluations, P prompts, S resamples.

EXPONENTS = np.geomspace(0.05, 3, 40)
FEWEST = 5
"""Evaluations that a fit of three numbers needs at least."""


class Measured(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    interval: list[float]

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


@dataclass(frozen=True)
class LearningCurve:
    """Tokens and rounds of the same held-out prompts at several steps of a run, [E, P]; at least two prompts."""

    steps_E: NDArray
    tokens_EP: NDArray
    rounds_EP: NDArray

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]], key: str = "evaluation") -> Self | None:
        """Read the rows of a run's `metrics.jsonl`; None without evaluations of two prompts or more.

        `key`: 'evaluation', or 'average' for those of averaged weights.
        """
        rows = [row for row in metrics if row.get(key, {}).get("tokens")]
        last = len(rows[-1][key]["tokens"]) if rows else 0
        alike = [row for row in rows if len(row[key]["tokens"]) == last == len(row[key].get("rounds", []))]
        if last < 2 or not alike:
            return None
        counts = [np.array([row[key][name] for row in alike], dtype=float) for name in ("tokens", "rounds")]
        return cls(np.array([row["step"] for row in alike], dtype=float), *counts)

    def last(self) -> Measured:
        """Return tau of the last evaluation."""
        taus_SE = self._resampled(self.tokens_EP[-1:], self.rounds_EP[-1:])
        return Measured(float(self.taus_E[-1]), percentiles(taus_SE[:, 0]))

    def rise(self, window: int) -> Measured | None:
        """Return the difference between tau over the last `window` evaluations and over the `window` before them.

        The interval is for the choice of prompts, which are the same on both sides. None with fewer evaluations.
        """
        if len(self.steps_E) < 2 * window:
            return None
        sums = [
            np.stack([counts[-2 * window : -window].sum(0), counts[-window:].sum(0)])
            for counts in (self.tokens_EP, self.rounds_EP)
        ]
        before, after = ratio(*(total.sum(1) for total in sums))
        taus_S2 = self._resampled(*sums)
        return Measured(float(after - before), percentiles(taus_S2[:, 1] - taus_S2[:, 0]))

    def expected(self, factor: float) -> tuple[Measured, Measured] | None:
        """Return tau at the last step and at `factor` times that step, by a fit of tau = a - b * step^-c, b >= 0.

        Least squares over the evaluations after step 0. Intervals resample prompts and evaluations. None with fewer
        than `FEWEST` evaluations.
        """
        later = self.steps_E > 0
        if later.sum() < FEWEST:
            return None
        x_E = self.steps_E[later] / self.steps_E[-1]
        tokens_EP, rounds_EP = self.tokens_EP[later], self.rounds_EP[later]
        whole = _extrapolated(x_E, self.taus_E[None, later], np.ones((1, len(x_E))), factor)
        rng = np.random.default_rng(1)
        taus_SE = self._resampled(tokens_EP, rounds_EP)
        weights_SE = rng.multinomial(len(x_E), np.full(len(x_E), 1 / len(x_E)), size=len(taus_SE)).astype(float)
        drawn = _extrapolated(x_E, taus_SE, weights_SE, factor)
        now, then = (Measured(float(one[0]), percentiles(many)) for one, many in zip(whole, drawn, strict=True))
        return now, then

    @property
    def taus_E(self) -> NDArray:
        """Tau of each evaluation."""
        return ratio(self.tokens_EP.sum(1), self.rounds_EP.sum(1))

    def _resampled(self, tokens_EP: NDArray, rounds_EP: NDArray) -> NDArray:
        """Return tau of each evaluation over resampled prompts, [S, E]."""
        prompts = tokens_EP.shape[1]
        drawn_SP = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        return ratio(drawn_SP @ tokens_EP.T, drawn_SP @ rounds_EP.T)


def _extrapolated(x_E: NDArray, taus_SE: NDArray, weights_SE: NDArray, factor: float) -> tuple[NDArray, NDArray]:
    """Fit a - b * x^-c to each row with the exponent of the least error; return its values at x = 1 and `factor`, [S].

    `weights_SE`: of the evaluations, by row.
    """
    total_S = weights_SE.sum(1)
    mean_S = (weights_SE * taus_SE).sum(1) / total_S
    centred_SE = taus_SE - mean_S[:, None]
    least_S, now_S, then_S = np.full(len(taus_SE), np.inf), mean_S, mean_S
    for exponent in EXPONENTS:
        basis_E = x_E**-exponent
        offset_S = weights_SE @ basis_E / total_S
        moved_SE = basis_E - offset_S[:, None]
        slope_S = np.minimum(0, ratio((weights_SE * moved_SE * centred_SE).sum(1), (weights_SE * moved_SE**2).sum(1)))
        error_S = (weights_SE * (centred_SE - slope_S[:, None] * moved_SE) ** 2).sum(1)
        better_S, least_S = error_S < least_S, np.minimum(error_S, least_S)
        now_S = np.where(better_S, mean_S + slope_S * (1 - offset_S), now_S)
        then_S = np.where(better_S, mean_S + slope_S * (factor**-exponent - offset_S), then_S)
    return now_S, then_S


def outlook(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on what twice the steps of a run would bring; None for a run with too few evaluations.

    `metrics`: rows of the run's `metrics.jsonl`.
    """
    curve = LearningCurve.of(metrics)
    expected = None if curve is None else curve.expected(2)
    if curve is None or expected is None:
        return None
    steps, prompts = int(curve.steps_E[-1]), curve.tokens_EP.shape[1]
    now, then = expected
    return (
        f"Twice the steps ({2 * steps}) would bring about tau {then}, against {now} at step {steps}: a fit of "
        f"a - b / step^c to {int((curve.steps_E > 0).sum())} evaluations on {prompts} held-out prompts"
    )


def time_split(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the time of a run's training steps by part; None for a run that did not measure it.

    `metrics`: as for `outlook`. The first step is left out: libraries allocate and choose kernels in it.
    """
    rows = [row["seconds_by_part"] for row in metrics if row.get("seconds_by_part")]
    rows = rows[1:] or rows
    totals = {part: sum(row.get(part, 0.0) for row in rows) for part in (rows[-1] if rows else {})}
    whole = sum(totals.values())
    if not whole:
        return None
    shares = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in totals.items())
    return f"A training step took {1000 * whole / len(rows):.0f} ms: {shares}"
