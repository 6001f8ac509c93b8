"""Compare two measurements: which drafter and policy is faster, with intervals over prompts."""

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from draftsmith.errors import ConfigError
from draftsmith.eval.low_acceptance import Sides, explained
from draftsmith.eval.results import StoredEvaluation, short_policy
from draftsmith.eval.settings import BASELINE, Arm
from draftsmith.metrics import Resamples, Series, percentiles, ratio, resampled_speedups, resampled_taus, speedup, tau

MATTER = ("max_new_tokens", "top_k", "top_p", "seed", "dtype", "attn_implementation")
"""Settings that have to be equal, in addition to the fingerprints of target and prompts. Temperatures, drafters, draft
lengths and rules may differ: they are compared."""
MATTER_SERVED = ("max_new_tokens", "top_k", "top_p")
"""The same where one of the measurements is that of a server."""
MACHINE = ("cpu", "accelerator", "torch_threads")
Condition = tuple[float, int]
"""Temperature and batch size."""


@dataclass(frozen=True)
class Contrast:
    """B's value over A's, with a 95 % interval over resampled prompts."""

    a: float
    b: float
    ratio: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        return self.high > 0 and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Comparison:
    """One arm of A and one of B at a temperature and batch size."""

    a: str
    b: str
    temperature: float
    batch_size: int
    units: list[list[str]]
    """Ids of the prompts of each batch."""
    speedup: Contrast | None
    """None where one side has no measurement of the target alone."""
    tau: Contrast
    served: bool = False
    """Whether a side was measured on a server: each speedup is then relative to the target alone in its own engine."""
    cause: str = ""
    """Why an engine may accept something else than the local decoder, where it does."""

    @property
    def sentence(self) -> str:
        return f"{self._finding} {self.cause}".rstrip()

    @property
    def _finding(self) -> str:
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        ratio, where = self.speedup, f"T={self.temperature:g}{batch}"
        if ratio is None:
            return f"{where}: {self.a} and {self.b}: {self._taus}."
        bounds, prompts = f"[{ratio.low:.3f}, {ratio.high:.3f}]", sum(map(len, self.units))
        if not ratio.real:
            return (
                f"{where}: no difference in speed{'up' * self.served} between {self.a} and {self.b} that {prompts} "
                f"prompts can show (B/A {ratio.ratio:.3f} {bounds}); {self._taus}."
            )
        better, worse, gain = (self.b, self.a, ratio.ratio) if ratio.ratio > 1 else (self.a, self.b, 1 / ratio.ratio)
        if self.served:
            return (
                f"{where}: the speedup of {better} is {gain:.2f} times that of {worse}, each over the target alone in "
                f"its own engine (B/A {ratio.ratio:.3f} {bounds}); {self._taus}."
            )
        return (
            f"{where}: {better} is {gain - 1:.1%} faster than {worse} (B/A {ratio.ratio:.3f} {bounds}); {self._taus}."
        )

    @property
    def _taus(self) -> str:
        taus = f"{self.tau.a:.2f} against {self.tau.b:.2f}"
        return f"tau {taus}, a real difference" if self.tau.real else f"tau does not differ measurably ({taus})"


def compare_evaluations(a: StoredEvaluation, b: StoredEvaluation | None = None) -> list[Comparison]:
    """Compare the contents of two `eval.json`, or, without `b`, the arms in one of them.

    Arms are compared at equal temperature and batch size. Between two files, arms with equal policies are
    compared, and of these only drafters with equal names if both files have that name; if the files have no policy in
    common, every arm of A is compared with every arm of B.

    Raises:
        ConfigError: for measurements that cannot be compared, naming both values, or that share no condition.
    """
    sides = [_measured(a), _measured(b if b is not None else a)]
    if b is not None:
        _require_comparable(a, b)
    comparisons = []
    for condition, ours in sides[0].items():
        if condition not in sides[1]:
            continue
        theirs = sides[1][condition]
        arms = [[arm for arm in side if arm != BASELINE] for side in (ours, theirs)]
        pairs = _pairs(*arms) if b is not None else list(combinations(arms[0], 2))
        found = [_compare(ours, theirs, pair, condition, named=b is not None) for pair in pairs]
        if b is not None and (a.get("server") or b.get("server")):
            found = [replace(each, served=True) for each in found]
        comparisons += (
            found if b is None else [_explained(each, a, b, pair) for each, pair in zip(found, pairs, strict=True)]
        )
    if not comparisons:
        raise ConfigError("no drafters to compare at any common temperature and batch size; expected at least one pair")
    return comparisons


def _measured(evaluation: StoredEvaluation) -> dict[Condition, dict[Arm, Series]]:
    by_condition: dict[Condition, dict[Arm, Series]] = {}
    for entry in evaluation["measurements"]:
        condition = (entry["temperature"], entry["batch_size"])
        by_condition.setdefault(condition, {})[(entry["drafter"], entry["policy"])] = entry
    if not by_condition:
        raise ConfigError("an eval.json without measurements (a model card's) cannot be compared; expected a report's")
    return by_condition


def _require_comparable(a: StoredEvaluation, b: StoredEvaluation) -> None:
    values: list[tuple[str, object, object]] = []
    served = bool(a.get("server") or b.get("server"))
    keys: tuple[Literal["target"], Literal["prompts"]] = ("target", "prompts")
    for key in keys:
        prints = a["identity"].get(key), b["identity"].get(key)
        if prints[0] != prints[1] and not (served and key == "target"):  # a server's weights cannot be read
            values.append((key, f"{a['settings'][key]} ({prints[0]})", f"{b['settings'][key]} ({prints[1]})"))
    matter, machine = (MATTER_SERVED, ()) if served else (MATTER, MACHINE)
    values += [(key, a["settings"].get(key), b["settings"].get(key)) for key in matter]
    values += [(key, a["environment"].get(key), b["environment"].get(key)) for key in machine]
    dated = any("now" in side["identity"] for side in (a, b))
    for key, ours, theirs in values:
        if ours != theirs:
            why = " (the chat template shows the date, which versions before 0.4 compared)"
            why = why if dated and key == "prompts" else ""
            raise ConfigError(
                f"{key}={ours!r} in A, {theirs!r} in B{why}; expected the same: the numbers cannot be compared "
                "otherwise"
            )


def _pairs(a: list[Arm], b: list[Arm]) -> list[tuple[Arm, Arm]]:
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
    a: dict[Arm, Series],
    b: dict[Arm, Series],
    arms: tuple[Arm, Arm],
    condition: Condition,
    *,
    named: bool,
) -> Comparison:
    """Compare two arms by units: each resample has the same prompts on both sides.

    Repeats are drawn separately for two files, and together for one file, whose arms were measured side by side.
    """
    one, other = a[arms[0]], b[arms[1]]
    if one["units"] != other["units"]:
        raise ConfigError(f"batches={one['units']} in A, {other['units']} in B; expected the same")
    if len(one["units"]) < 2:
        raise ConfigError.of("prompts", len(one["units"]), "at least 2: an interval over prompts needs several")
    rng = np.random.default_rng(0)
    draws = Resamples.of(one, rng)
    other_draws = draws.with_repeats_of(other, rng) if named else draws
    taus = resampled_taus(one, draws), resampled_taus(other, other_draws)
    name_a, name_b = (f"{drafter} ({short_policy(policy)})" for drafter, policy in arms)
    temperature, batch_size = condition
    return Comparison(
        f"A's {name_a}" if named else name_a,
        f"B's {name_b}" if named else name_b,
        temperature,
        batch_size,
        units=one["units"],
        speedup=_speedups(a.get(BASELINE), one, draws, b.get(BASELINE), other, other_draws),
        tau=_contrast(tau(one["tokens"], one["rounds"]), tau(other["tokens"], other["rounds"]), *taus),
    )


def _speedups(
    base: Series | None, one: Series, draws: Resamples, other_base: Series | None, other: Series, other_draws: Resamples
) -> Contrast | None:
    """Return the contrast of two speedups; None where one side has no measurement of the target alone."""
    if base is None or other_base is None:
        return None
    speeds = resampled_speedups(base, one, draws), resampled_speedups(other_base, other, other_draws)
    return _contrast(speedup(base, one), speedup(other_base, other), *speeds)


def _explained(comparison: Comparison, a: StoredEvaluation, b: StoredEvaluation, arms: tuple[Arm, Arm]) -> Comparison:
    """Add the likely causes where an engine and the local decoder differ in tau."""
    if bool(a.get("server")) == bool(b.get("server")) or not comparison.tau.real:
        return comparison
    last = bool(b.get("server"))
    local, served = (a, b) if last else (b, a)
    ordered = arms if last else (arms[1], arms[0])
    sides = Sides(local, served, ordered, comparison.temperature, comparison.batch_size)
    return replace(comparison, cause=explained(sides, lower=(comparison.tau.ratio < 1) == last))


def _contrast(a: float, b: float, a_S: NDArray, b_S: NDArray) -> Contrast:
    low, high = percentiles(ratio(b_S, a_S, np.nan))
    return Contrast(a, b, b / a if a else 0.0, low, high)


def comparison_table(comparisons: list[Comparison]) -> Table:
    """Return the comparisons as a table."""
    table = Table(title="Paired by prompt; 95 % intervals of B/A", pad_edge=False)
    for name in ("A", "B"):
        table.add_column(name)
    for name in ("T", "batch", "speedups", "B/A", "taus", "B/A"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        cells = []
        for value in (comparison.speedup, comparison.tau):
            if value is None:
                cells += ["", ""]
                continue
            star = "*" if value.real else ""
            cells += [f"{value.a:.2f}, {value.b:.2f}", f"{value.ratio:.3f}{star}\n[{value.low:.3f}, {value.high:.3f}]"]
        table.add_row(comparison.a, comparison.b, f"{comparison.temperature:g}", str(comparison.batch_size), *cells)
    if len(comparisons) > 1:
        table.caption = (
            f"*: 1 is outside. By chance about {0.05 * len(comparisons):.1f} of {len(comparisons)} lines get one."
        )
    return table
