"""Tau, alpha, acceptance by draft position, speedups and their intervals, computed in this one place.

Shapes: U units, R repeats, S resamples, K draft positions. A unit is a batch of prompts with all its turns: one prompt
at batch size 1. Its seconds are shared by its texts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import FiniteFloat, PositiveInt
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

RESAMPLES = 2000
LEVEL = 0.95


def ratio(above: ArrayLike, below: ArrayLike, undefined: float = 0.0) -> NDArray[np.float64]:
    """Return above / below, and `undefined` where `below` is not above 0."""
    above, below = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    return np.divide(above, below, out=np.full_like(above, undefined), where=below > 0)


def tau(tokens: ArrayLike, rounds: ArrayLike) -> float:
    """Return tokens committed per target forward pass, over all texts; 0 without rounds.

    `tokens`: those that rounds committed, without the prefill's. `rounds`: target forward passes after the prefill.
    """
    return float(ratio(np.sum(tokens), np.sum(rounds)))


def alpha(overlap: ArrayLike, overlaps: ArrayLike) -> float:
    """Return the mean of sum_v min(p_v, q_v) over the tested draft positions; 0 without any.

    `overlap`: sums over tested positions. `overlaps`: numbers of such positions.
    """
    return float(ratio(np.sum(overlap), np.sum(overlaps)))


class Tested(Protocol):
    """A round of the decoder: the number of draft positions that it tested, and of those that it accepted."""

    @property
    def tested(self) -> int: ...

    @property
    def accepted(self) -> int: ...


PositionCounts = Sequence[float] | NDArray[np.float64]


def position_counts(rounds: Sequence[Tested]) -> tuple[list[int], list[int]]:
    """Return by draft position the rounds that tested it, and those of them that accepted it.

    A round tests a position if it accepted all positions before it and has a draft token there.
    """
    deepest = max((record.tested for record in rounds), default=0)
    reached = [[record for record in rounds if record.tested > place] for place in range(deepest)]
    accepted = [sum(record.accepted > place for record in records) for place, records in enumerate(reached)]
    return [len(records) for records in reached], accepted


def acceptance_at(texts: Iterable[tuple[PositionCounts, PositionCounts]]) -> list[float]:
    """Return acceptance by draft position, given that the positions before it were accepted.

    `texts`: for each text the (expected) rounds that tested each position, and those that accepted it.
    """
    counts = list(texts)
    tested_K, accepted_K = (summed([pair[side] for pair in counts]) for side in (0, 1))
    return ratio(accepted_K, tested_K)[tested_K > 0].tolist()


def summed(rows: Sequence[PositionCounts]) -> NDArray[np.float64]:
    """Return the sum of rows of different lengths."""
    sums_K = np.zeros(max(map(len, rows), default=0))
    for row in rows:
        sums_K[: len(row)] += row
    return sums_K


FEW = 10
"""Rounds; acceptance at a position that fewer have tested is left out of tables and pictures."""


def often_tested(row: Mapping[str, Any]) -> list[float]:
    """Return acceptance by draft position at those first positions that at least `FEW` rounds tested.

    All positions, where no position was tested as often, or where an earlier version wrote the row without counts.
    """
    often = [count >= FEW for count in row.get("tested_at", ())]
    return row["acceptance_at"][: often.index(False)] if any(often) and not all(often) else row["acceptance_at"]


Grid = list[list[FiniteFloat]]
"""[U, R]"""


class Series(TypedDict):
    """Sums over the texts of each unit and repeat, of an arm at one temperature and batch size."""

    drafter: str
    policy: str
    temperature: FiniteFloat
    batch_size: PositiveInt
    units: list[list[str]]
    """Ids of the prompts of each unit."""
    tokens: Grid
    """Tokens committed by rounds, without the prefill's."""
    rounds: Grid
    """Rounds of all texts."""
    seconds: Grid
    """Decode time, without the prefill."""
    overlap: Grid
    overlaps: Grid


def as_series(
    arm: tuple[str, str], temperature: float, batch_size: int, units: list[list[str]], sums_5UR: NDArray[np.float64]
) -> Series:
    """Return a series from its sums: tokens, rounds, seconds, overlap and overlaps, [U, R] each.

    `arm`: the drafter's name and its policy.
    """
    tokens, rounds, seconds, overlap, overlaps = sums_5UR.tolist()
    return {
        "drafter": arm[0],
        "policy": arm[1],
        "temperature": temperature,
        "batch_size": batch_size,
        "units": units,
        "tokens": tokens,
        "rounds": rounds,
        "seconds": seconds,
        "overlap": overlap,
        "overlaps": overlaps,
    }


@dataclass(frozen=True, eq=False)
class Resamples:
    """S resamples: indices of units [S, U] and, for each of them, of repeats [S, U, R]."""

    units: NDArray
    repeats: NDArray

    @classmethod
    def of(cls, series: Series, rng: np.random.Generator, resamples: int = RESAMPLES) -> "Resamples":
        """Draw a two-stage bootstrap: units with replacement, then repeats with replacement within each drawn unit.

        Units account for the choice of prompts, repeats for the noise of the machine. Both levels of a nested design
        are resampled as in Davison and Hinkley 1997, section 3.8; resampling repeats within units makes intervals
        slightly too wide, never too narrow.
        """
        units, repeats = np.shape(series["tokens"])
        size = (resamples, units, repeats)
        return cls(rng.integers(0, units, size[:2]), rng.integers(0, repeats, size))

    def with_repeats_of(self, series: Series, rng: np.random.Generator) -> "Resamples":
        """Return the same units with newly drawn repeats, for a second run on the same prompts."""
        repeats = np.shape(series["tokens"])[1]
        return Resamples(self.units, rng.integers(0, repeats, (*self.units.shape, repeats)))

    def totals(self, values_UR: ArrayLike) -> NDArray:
        """Return sums over the drawn units, [S, R]."""
        return np.asarray(values_UR)[self.units[:, :, None], self.repeats].sum(axis=1)


def speeds(series: Series) -> NDArray[np.float64]:
    """Return tokens per second of each repeat over all units, [R]."""
    return ratio(np.sum(series["tokens"], 0), np.sum(series["seconds"], 0))


def speedups(baseline: Series, speculative: Series) -> NDArray[np.float64]:
    """Return the ratio of tokens per second of each repeat, [R]; its median is the speedup."""
    return ratio(speeds(speculative), speeds(baseline))


def speedup(baseline: Series, speculative: Series) -> float:
    """Return the median over repeats of the ratio of tokens per second, each over all units."""
    return float(np.median(speedups(baseline, speculative)))


def resampled_speedups(baseline: Series, speculative: Series, draws: Resamples) -> NDArray[np.float64]:
    """Return the speedup of each resample, [S]; NaN where a repeat has no decoded token.

    Baseline and drafter of a repeat are drawn together.
    """
    base, spec = (
        ratio(draws.totals(series["tokens"]), draws.totals(series["seconds"]), np.nan)
        for series in (baseline, speculative)
    )
    return np.median(ratio(spec, base, np.nan), axis=1)


def resampled_taus(series: Series, draws: Resamples) -> NDArray[np.float64]:
    """Return tau of each resample, [S]; NaN without rounds."""
    return ratio(draws.totals(series["tokens"]).sum(1), draws.totals(series["rounds"]).sum(1), np.nan)


def resampled_alphas(series: Series, draws: Resamples) -> NDArray[np.float64]:
    """Return alpha of each resample, [S]; NaN without tested positions."""
    return ratio(draws.totals(series["overlap"]).sum(1), draws.totals(series["overlaps"]).sum(1), np.nan)


def percentiles(values_S: NDArray) -> list[float]:
    """Return the middle 95 % of the resampled values that are not NaN; zeros without any."""
    tail, known_S = 100 * (1 - LEVEL) / 2, values_S[~np.isnan(values_S)]
    return np.percentile(known_S, [tail, 100 - tail]).tolist() if known_S.size else [0.0, 0.0]


def median_interval(values: Iterable[float]) -> list[float] | None:
    """Return the interval of the median at `LEVEL`, between two of the values; None for fewer than six.

    Whatever their distribution, each of n values lies below its median with probability 1/2. So fewer than k of them
    lie on one side as often as a binomial distribution says (David and Nagaraja 2003, section 7.1).
    """
    ordered = sorted(values)
    n, k, tail = len(ordered), 0, 0.5 ** len(ordered)
    while tail <= (1 - LEVEL) / 2:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return [ordered[k - 1], ordered[n - k]] if k else None


class Intervals(TypedDict):
    """Lower and upper end of each number's 95 % interval; None with a single unit."""

    speedup_interval: list[float] | None
    tau_interval: list[float] | None
    alpha_interval: list[float] | None


def intervals(baseline: Series | None, speculative: Series, seed: int) -> Intervals:
    """Return 95 % bootstrap intervals of speedup, tau and alpha; None for a single unit, or without a baseline.

    Resamples without a value, such as those without any tested position, are left out.
    """
    if len(speculative["units"]) < 2:
        return {"speedup_interval": None, "tau_interval": None, "alpha_interval": None}
    draws = Resamples.of(speculative, np.random.default_rng(seed))
    faster = None if baseline is None else percentiles(resampled_speedups(baseline, speculative, draws))
    return {
        "speedup_interval": faster,
        "tau_interval": percentiles(resampled_taus(speculative, draws)),
        "alpha_interval": percentiles(resampled_alphas(speculative, draws)),
    }


FEW_UNITS = 20
"""Number of units below which intervals are too narrow: those of tau over 5 cover the truth in 88 % of simulated runs,
those over 2 in half of them."""


def few_units(conditions: Iterable[Sequence[Sequence[object]]]) -> list[str]:
    """Return a note if the fewest units of a condition are too few for intervals; a unit is a batch of prompts."""
    units = min(conditions, key=len)
    prompts = sum(map(len, units))
    batches = f" in {len(units)} batches" if prompts > len(units) else ""
    meaning = "differences of a few percent mean little, and intervals are too narrow"
    return [f"Measured on {prompts} prompts{batches}: {meaning}."] if len(units) < FEW_UNITS else []
