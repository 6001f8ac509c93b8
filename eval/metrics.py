"""The numbers of a report's row, from measured cells, with bootstrap intervals over prompts and repeats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.journal import Measurement, TextRecord
from draftsmith.eval.results import DivergencePlace, RowNumbers, StoredSeries

# Shapes: U units, R repeats, S resamples.

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Series:
    """Numbers of one variant at one temperature and batch size, [U, R] each.

    A unit is a batch of prompts with all its turns: one prompt at batch size 1. Its seconds are shared by its texts.
    """

    units: list[list[str]]
    """Ids of the prompts of each unit."""
    tokens: NDArray
    """Tokens committed by rounds, without the prefill's."""
    rounds: NDArray
    """Rounds of all texts."""
    seconds: NDArray
    """Decode time, without the prefill."""
    overlap: NDArray
    overlaps: NDArray

    @classmethod
    def of(cls, cells: list[Measurement]) -> "Series":
        """Sum the cells of one variant, temperature and batch size; every unit has every repeat."""
        groups = sorted({cell.group for cell in cells})
        repeats = sorted({cell.repeat for cell in cells})
        sums = {name: np.zeros((len(groups), len(repeats))) for name in NUMBERS}
        units: list[list[str]] = [[] for _ in groups]
        for cell in cells:
            u, r = groups.index(cell.group), repeats.index(cell.repeat)
            if cell.turn == 0:
                units[u] = [text.prompt for text in cell.texts]
            sums["tokens"][u, r] += sum(text.decode_tokens for text in cell.texts)
            sums["rounds"][u, r] += sum(text.decode_rounds for text in cell.texts)
            sums["seconds"][u, r] += cell.seconds
            sums["overlap"][u, r] += sum(text.overlap for text in cell.texts)
            sums["overlaps"][u, r] += sum(text.overlaps for text in cell.texts)
        return cls(units, **sums)

    def as_json(self) -> StoredSeries:
        """Return plain lists, as `eval.json` stores them."""
        return {
            "units": self.units,
            "tokens": self.tokens.tolist(),
            "rounds": self.rounds.tolist(),
            "seconds": self.seconds.tolist(),
            "overlap": self.overlap.tolist(),
            "overlaps": self.overlaps.tolist(),
        }

    @classmethod
    def from_json(cls, value: StoredSeries) -> "Series":
        return cls(value["units"], **{name: np.array(value[name], dtype=float) for name in NUMBERS})

    def pick(self, places: list[int]) -> "Series":
        """Return these units, in this order."""
        return Series([self.units[u] for u in places], **{name: getattr(self, name)[places] for name in NUMBERS})


NUMBERS = ("tokens", "rounds", "seconds", "overlap", "overlaps")


@dataclass(frozen=True)
class Draws:
    """S resamples: indices of units [S, U] and, for each of them, of repeats [S, U, R]."""

    units: NDArray
    repeats: NDArray

    @classmethod
    def of(cls, units: int, repeats: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> "Draws":
        """Draw a two-stage bootstrap: units with replacement, then repeats with replacement within each drawn unit.

        Units account for the choice of prompts, repeats for the noise of the machine. Both levels of a nested design
        are resampled as in Davison and Hinkley 1997, section 3.8; resampling repeats within units makes intervals
        slightly too wide, never too narrow.
        """
        size = (resamples, units, repeats)
        return cls(rng.integers(0, units, size[:2]), rng.integers(0, repeats, size))

    def with_repeats(self, repeats: int, rng: np.random.Generator) -> "Draws":
        """Return the same units with newly drawn repeats, for a second run on the same prompts."""
        return Draws(self.units, rng.integers(0, repeats, (*self.units.shape, repeats)))

    def totals(self, values_UR: NDArray) -> NDArray:
        """Return sums over the drawn units, [S, R]."""
        return values_UR[self.units[:, :, None], self.repeats].sum(axis=1)


def ratio(above: NDArray, below: NDArray, undefined: float = 0.0) -> NDArray:
    """Return above / below, and `undefined` where `below` is not above 0."""
    return np.divide(above, below, out=np.full_like(above, undefined, dtype=float), where=below > 0)


def speedup(baseline: Series, speculative: Series) -> float:
    """Return the median over repeats of the ratio of tokens per second, each over all units."""
    return float(np.median(speedups(baseline, speculative)))


def speedups(baseline: Series, speculative: Series) -> NDArray:
    """Return the ratio of tokens per second of each repeat, [R]."""
    return ratio(speeds(speculative), speeds(baseline))


def speeds(series: Series) -> NDArray:
    """Return tokens per second of each repeat over all units, [R]."""
    return ratio(series.tokens.sum(0), series.seconds.sum(0))


def tau(series: Series) -> float:
    """Return tokens committed per target forward pass, over all units and repeats."""
    return float(ratio(series.tokens.sum(), series.rounds.sum()))


def alpha(series: Series) -> float:
    """Return the mean of sum_v min(p_v, q_v) over the tested draft positions."""
    return float(ratio(series.overlap.sum(), series.overlaps.sum()))


def resampled_speedups(baseline: Series, speculative: Series, draws: Draws) -> NDArray:
    """Return the speedup of each resample, [S]; NaN where a repeat has no decoded token.

    Baseline and drafter of a repeat are drawn together.
    """
    base, spec = (ratio(draws.totals(s.tokens), draws.totals(s.seconds), np.nan) for s in (baseline, speculative))
    return np.median(ratio(spec, base, np.nan), axis=1)


def resampled_taus(series: Series, draws: Draws) -> NDArray:
    """Return tau of each resample, [S]; NaN without rounds."""
    return ratio(draws.totals(series.tokens).sum(1), draws.totals(series.rounds).sum(1), np.nan)


def resampled_alphas(series: Series, draws: Draws) -> NDArray:
    """Return alpha of each resample, [S]; NaN without tested positions."""
    return ratio(draws.totals(series.overlap).sum(1), draws.totals(series.overlaps).sum(1), np.nan)


def percentiles(values_S: NDArray) -> list[float]:
    """Return the middle 95 % of the resampled values that are not NaN; zeros without any."""
    tail, known_S = 100 * (1 - LEVEL) / 2, values_S[~np.isnan(values_S)]
    low, high = np.percentile(known_S, [tail, 100 - tail]) if known_S.size else (0.0, 0.0)
    return [float(low), float(high)]


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


class Intervals(TypedDict):
    """Lower and upper end of each number's 95 % interval; None with a single unit."""

    speedup_interval: list[float] | None
    tau_interval: list[float] | None
    alpha_interval: list[float] | None


def intervals(baseline: Series, speculative: Series, seed: int, resamples: int = RESAMPLES) -> Intervals:
    """Return 95 % bootstrap intervals of speedup, tau and alpha; None for a single unit.

    Resamples without a value, such as those without any tested position, are left out.
    """
    units, repeats = speculative.tokens.shape
    if units < 2:
        return {"speedup_interval": None, "tau_interval": None, "alpha_interval": None}
    draws = Draws.of(units, repeats, np.random.default_rng(seed), resamples)
    return {
        "speedup_interval": percentiles(resampled_speedups(baseline, speculative, draws)),
        "tau_interval": percentiles(resampled_taus(speculative, draws)),
        "alpha_interval": percentiles(resampled_alphas(speculative, draws)),
    }


def row_numbers(baseline: list[Measurement], speculative: list[Measurement], seed: int = 0) -> RowNumbers:
    """Return the measured part of an `eval.json` row; speeds and the speedup are medians over repeats.

    Args:
        baseline: cells of the target alone at one temperature and batch size.
        speculative: cells of one variant over the same batches of prompts.
        seed: seed of the bootstrap.
    """
    base, spec = Series.of(baseline), Series.of(speculative)
    ratios = speedups(base, spec)
    seconds = sum(cell.seconds for cell in speculative) or 1.0
    draft = sum(cell.draft_seconds for cell in speculative) / seconds
    verify = sum(cell.verify_seconds for cell in speculative) / seconds
    texts = [text for cell in speculative for text in cell.texts]
    tested = _summed([text.tested for text in texts], max((len(text.tested) for text in texts), default=0))
    return {
        "prompts": sum(map(len, spec.units)),
        "alpha": alpha(spec),
        "tau": tau(spec),
        "speedup": float(np.median(ratios)),
        **intervals(base, spec, seed),
        "acceptance_at": acceptance_at((text.tested, text.accepted) for text in texts),
        "tested_at": [int(count) for count in tested if count > 0],
        "baseline_tokens_per_second": float(np.median(speeds(base))),
        "tokens_per_second": float(np.median(speeds(spec))),
        "draft_share": draft,
        "verify_share": verify,
        "overhead_share": 1 - draft - verify,
        "speedup_repeats": [float(value) for value in ratios if value > 0],
        "prefill_seconds": median(cell.prefill_seconds for cell in speculative),
        "baseline_prefill_seconds": median(cell.prefill_seconds for cell in baseline),
        "decode_tokens": sum(text.decode_tokens for text in texts),
        "repeated_4grams": repeated_4grams([text.tokens for text in texts]),
    }


def acceptance_at(texts: Iterable[tuple[Sequence[float] | NDArray, Sequence[float] | NDArray]]) -> list[float]:
    """Return acceptance by draft position, given that the positions before it were accepted.

    `texts`: for each text the (expected) rounds that tested each position, and those that accepted it.
    """
    counts = list(texts)
    length = max((len(tested) for tested, _ in counts), default=0)
    tested_K, accepted_K = (_summed(rows, length) for rows in ([t for t, _ in counts], [a for _, a in counts]))
    return [float(share) for share in ratio(accepted_K, tested_K)[tested_K > 0]]


def _summed(rows: Sequence[Sequence[float] | NDArray], length: int) -> NDArray:
    """Return the sum of rows of at most this length."""
    sums_K = np.zeros(length)
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


def expected_tau(alpha: float, draft_length: int) -> float:
    """Return tokens per target forward pass if every draft token were accepted independently with probability alpha.

    E[tau] = (1 - alpha^(gamma + 1)) / (1 - alpha)   (Leviathan et al. 2023, arXiv:2211.17192, equation 1)
    """
    return draft_length + 1.0 if alpha >= 1 else (1 - alpha ** (draft_length + 1)) / (1 - alpha)


def repeated_4grams(texts: list[list[int]]) -> float:
    """Return the share of 4-grams that occur earlier in the same text; repetitive text is easy to draft."""
    repeated = total = 0
    for tokens in texts:
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def greedy_identity(
    baseline: list[Measurement], speculative: list[Measurement]
) -> tuple[list[int], DivergencePlace | None]:
    """Return [greedy texts that equal the target's own, all texts], and the place of the first difference."""
    own = {place: text.tokens for cell in baseline for place, text in _texts(cell)}
    first: DivergencePlace | None = None
    equal, total = 0, 0
    for cell in speculative:
        for place, text in _texts(cell):
            total += 1
            a, b = own[place], text.tokens
            if a == b:
                equal += 1
            elif first is None:
                where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                first = {"prompt": text.prompt, "position": where}
    return [equal, total], first


def _texts(cell: Measurement) -> list[tuple[tuple[str, int, int], TextRecord]]:
    return [((text.prompt, cell.repeat, cell.turn), text) for text in cell.texts]
