"""Two measurements beside each other: which arm is better, and whether that is more than chance."""

from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from draftsmith.errors import ConfigError
from draftsmith.eval.metrics import Draws, Series, percentiles, ratio, resampled_speedups, resampled_taus, speedup, tau
from draftsmith.eval.plots import short_policy
from draftsmith.eval.results import StoredEvaluation
from draftsmith.eval.settings import BASELINE, Variant

MATTER = ("max_new_tokens", "top_k", "top_p", "seed", "dtype")
"""Settings that decide what is decoded; target and prompts are compared by fingerprint, wherever they lie.
Temperatures, drafters, draft lengths and rules are what is compared."""
MACHINE = ("cpu", "accelerator", "torch_threads")
Condition = tuple[float, int]
"""Temperature and batch size."""


@dataclass(frozen=True)
class Contrast:
    """B's value over A's, with the middle 95 % of what resampled prompts gave."""

    a: float
    b: float
    ratio: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        return not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Comparison:
    """One arm of A beside one of B at a temperature and batch size."""

    a: str
    b: str
    temperature: float
    batch_size: int
    prompts: int
    speedup: Contrast
    tau: Contrast

    @property
    def sentence(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        found, where = self.speedup, f"T={self.temperature:g}{batch}"
        bounds = f"[{found.low:.3f}, {found.high:.3f}]"
        if not found.real:
            return (
                f"{where}: no difference in speed between {self.a} and {self.b} that {self.prompts} prompts can show "
                f"(B/A {found.ratio:.3f} {bounds}); {self._taus}."
            )
        better, worse, gain = (self.b, self.a, found.ratio) if found.ratio > 1 else (self.a, self.b, 1 / found.ratio)
        return (
            f"{where}: {better} is {gain - 1:.1%} faster than {worse} (B/A {found.ratio:.3f} {bounds}); {self._taus}."
        )

    @property
    def _taus(self) -> str:
        found = self.tau
        if not found.real:
            return f"tau does not differ either way ({found.a:.2f}, {found.b:.2f})"
        return f"tau {found.a:.2f} against {found.b:.2f}, a real difference"


def compare_evaluations(a: StoredEvaluation, b: StoredEvaluation | None) -> list[Comparison]:
    """Comparisons of the contents of two `eval.json`, or for the arms of one among each other.

    Arms meet at equal temperature and batch size. Between two files those with equal policies meet (and of these the
    drafters of one name, where both files have it); without any equal policy, all meet all.

    Raises:
        ConfigError: for measurements whose numbers cannot be compared, with both values, or that have no arm in common.
    """
    sides = [_measured(a), _measured(b if b is not None else a)]
    if b is not None:
        _require_comparable(a, b)
    comparisons = []
    for place in sides[0]:
        if place not in sides[1]:
            continue
        arms = [[arm for arm in side[place] if arm != BASELINE] for side in sides]
        pairs = _pairs(*arms) if b is not None else list(combinations(arms[0], 2))
        comparisons += [_compare(sides[0][place], sides[1][place], pair, place, named=b is not None) for pair in pairs]
    if not comparisons:
        raise ConfigError("the two have no temperature and batch size with arms to compare; expected at least one")
    return comparisons


def _measured(evaluation: StoredEvaluation) -> dict[Condition, dict[Variant, Series]]:
    found: dict[Condition, dict[Variant, Series]] = {}
    for entry in evaluation["measurements"]:
        place = (entry["temperature"], entry["batch_size"])
        found.setdefault(place, {})[(entry["drafter"], entry["policy"])] = Series.from_json(entry)
    if not found:
        raise ConfigError("an eval.json without measurements (a model card's) cannot be compared; expected a report's")
    return found


def _require_comparable(a: StoredEvaluation, b: StoredEvaluation) -> None:
    values: list[tuple[str, object, object]] = []
    keys: tuple[Literal["target"], Literal["prompts"]] = ("target", "prompts")
    for key in keys:
        prints = a["identity"].get(key), b["identity"].get(key)
        if prints[0] != prints[1]:
            values.append((key, f"{a['settings'][key]} ({prints[0]})", f"{b['settings'][key]} ({prints[1]})"))
    values += [(key, a["settings"].get(key), b["settings"].get(key)) for key in MATTER]
    values += [(key, a["environment"].get(key), b["environment"].get(key)) for key in MACHINE]
    for key, ours, theirs in values:
        if ours != theirs:
            raise ConfigError(f"{key}={ours!r} in A, {theirs!r} in B; expected the same, or the numbers say nothing")


def _pairs(a: list[Variant], b: list[Variant]) -> list[tuple[Variant, Variant]]:
    common = [policy for policy in dict.fromkeys(policy for _, policy in a) if any(policy == own for _, own in b)]
    if not common:
        return list(product(a, b))
    pairs = []
    for policy in common:
        ours, theirs = ([arm for arm in side if arm[1] == policy] for side in (a, b))
        same = [arm for arm in ours if arm in theirs]
        pairs += [(arm, arm) for arm in same]
        pairs += product(*([arm for arm in side if arm not in same] for side in (ours, theirs)))
    return pairs


def _compare(
    a: dict[Variant, Series], b: dict[Variant, Series], arms: tuple[Variant, Variant], place: Condition, *, named: bool
) -> Comparison:
    """Paired by unit: every resample has the same prompts on both sides, and each side's own repeats within them.

    Within one file both sides' repeats ran side by side and are drawn together.
    """
    one, other = a[arms[0]], b[arms[1]]
    base, other_base = a[BASELINE], b[BASELINE]
    if one.units != other.units:
        raise ConfigError(f"batches={one.units} in A, {other.units} in B; expected the same")
    units, repeats = one.tokens.shape
    if units < 2:
        raise ConfigError.of("prompts", units, "at least 2: one prompt says nothing of others")
    rng = np.random.default_rng(0)
    draws = Draws.of(units, repeats, rng)
    other_draws = draws.with_repeats(other.tokens.shape[1], rng) if named else draws
    speeds = resampled_speedups(base, one, draws), resampled_speedups(other_base, other, other_draws)
    taus = resampled_taus(one, draws), resampled_taus(other, other_draws)
    name_a, name_b = (f"{drafter} ({short_policy(policy)})" for drafter, policy in arms)
    temperature, batch_size = place
    return Comparison(
        f"A's {name_a}" if named else name_a,
        f"B's {name_b}" if named else name_b,
        temperature,
        batch_size,
        prompts=sum(map(len, one.units)),
        speedup=_contrast(speedup(base, one), speedup(other_base, other), *speeds),
        tau=_contrast(tau(one), tau(other), *taus),
    )


def _contrast(a: float, b: float, a_S: NDArray, b_S: NDArray) -> Contrast:
    low, high = percentiles(ratio(b_S, a_S))
    return Contrast(a, b, b / a if a else 0.0, low, high)


def comparison_table(comparisons: list[Comparison]) -> Table:
    """The same in columns."""
    table = Table(title="Paired by prompt; 95 % intervals of B/A", pad_edge=False)
    for name in ("A", "B"):
        table.add_column(name)
    for name in ("T", "batch", "speedups", "B/A", "taus", "B/A"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        cells = []
        for found in (comparison.speedup, comparison.tau):
            star = "*" if found.real else ""
            cells += [f"{found.a:.2f}, {found.b:.2f}", f"{found.ratio:.3f}{star}\n[{found.low:.3f}, {found.high:.3f}]"]
        table.add_row(comparison.a, comparison.b, f"{comparison.temperature:g}", str(comparison.batch_size), *cells)
    if len(comparisons) > 1:
        table.caption = (
            f"*: 1 is outside. Of {len(comparisons)} lines about {0.05 * len(comparisons):.1f} get one by chance."
        )
    return table
