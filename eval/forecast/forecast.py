"""The forecast of tau and speedup for every drafter, policy and batch size, without decoding with the drafters.

texts of the target ──▶ one teacher-forced pass per drafter ──▶ expected rounds of every policy (expected_rounds.py)
seconds by width and batch (hardware.py) ──▶ E[tokens] / E[seconds] relative to the target alone ──▶ the best policy
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from transformers import PreTrainedModel

from draftsmith.decode.arguments import capabilities
from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import Chain, Policy, check_policy, default_policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.errors import ConfigError
from draftsmith.eval.baseline import fastest_threads, threads
from draftsmith.eval.evaluation import above_tau
from draftsmith.eval.forecast.expected_rounds import (
    ExpectedRounds,
    NotPredicted,
    accepted,
    needs_replay,
    of_rounds,
    replay,
    retrieved,
)
from draftsmith.eval.forecast.hardware import measure_hardware, pass_costs, timeable
from draftsmith.eval.forecast.profile import ForecastRow, Profile, costs_of, forecast_row, profile_values, require_known
from draftsmith.eval.settings import ForecastSettings
from draftsmith.eval.teacher_forced import (
    TOGETHER,
    PositionStats,
    TargetText,
    acceptance_measure,
    agreement,
    sample_texts,
)
from draftsmith.heads.base import Drafter
from draftsmith.provenance import environment
from draftsmith.terminal import stage

SCHEMA = 1
TREES = ("best-first:size=4,depth=3", "best-first:size=8,depth=4")
"""Policies that are compared with the chains by default."""
UNTIMED = "The intervals of speedups are over texts alone: the profile holds no repeated timings"
ASSUMED = (
    "The profile holds no seconds of rounds of {} (T={}): a chain of as many levels and tokens is assumed, which is "
    "faster."
)
PLAIN = "copies"
"""Name of the policy of drafters that only retrieve."""


class BestPolicy(TypedDict):
    """The fastest drafter and policy of a temperature and batch size; None for the target alone."""

    temperature: float
    batch_size: int
    drafter: str | None
    policy: str | None
    speedup: float
    speedup_interval: list[float]
    tau: float
    why: NotRequired[str]
    """Where it is the target alone: what a round of the nearest drafter costs."""


@dataclass(frozen=True)
class Forecast:
    """The content of `forecast.json`: rows, the best of them, costs and notes."""

    settings: ForecastSettings
    rows: list[ForecastRow]
    """One per drafter, temperature and policy, with speeds by batch size."""
    best: list[BestPolicy]
    """One per temperature and batch size."""
    hardware: dict[float, Profile]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "best": self.best,
            "rows": self.rows,
            "hardware": {f"{t:g}": profile_values(hardware) for t, hardware in self.hardware.items()},
            "environment": self.environment,
            "settings": self.settings.model_dump(),
            "notes": self.notes,
        }


def forecast(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: Sequence[list[int]],
    settings: ForecastSettings,
    hardware: Profile | None = None,
    *,
    progress: bool = False,
) -> Forecast:
    """Forecast every drafter with every policy.

    Args:
        prompts: token ids; the target continues each of them once at every temperature.
        hardware: seconds of another machine; by default those of this machine are measured.
        progress: show each stage on stderr.

    Raises:
        ConfigError: for a drafter whose context is too short, or without seconds in `hardware`.
    """
    if not prompts:
        raise ConfigError("prompts=0; expected at least 1")
    if hardware is not None:
        require_known(hardware, drafters)
    with stage("choosing the number of threads", shown=progress):
        count = fastest_threads(target, list(prompts[0]))
    with threads(count):
        timed = progress and hardware is None
        with stage("timing the passes of each drafter", shown=timed):
            known = {} if hardware else pass_costs(target, drafters, prompts[0])
        parts = [
            _at_temperature(target, drafters, prompts, settings, known, hardware, t, progress)
            for t in settings.temperatures
        ]
        where = environment()
    best = [entry for part in parts for entry in part.best]
    return Forecast(
        settings,
        [row for part in parts for row in part.rows],
        best,
        {t: hardware for part in parts for t, hardware in part.hardware.items()},
        where,
        [note for part in parts for note in part.notes] + noisy(best) + _notes(best, len(prompts)),
    )


def _at_temperature(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: Sequence[list[int]],
    settings: ForecastSettings,
    widths: dict[str, Costs],
    hardware: Profile | None,
    temperature: float,
    progress: bool,
) -> Forecast:
    """Return the forecast at one temperature."""
    sampling = settings.sampling(temperature)
    length = settings.max_new_tokens
    name = f"T={temperature:g}: generating texts with the target"
    with stage(name, length * len(prompts), shown=progress) as done:
        texts = sample_texts(target, prompts, sampling, max_new_tokens=length, seed=settings.seed, done=done)
        texts = [text for text in texts if text.anchors > 0]
    if not texts:
        raise ConfigError(f"texts of one token at T={temperature:g}; expected prompts with longer continuations")
    predicted: dict[str, Predicted] = {}
    reads = len(texts) * sum(1 + len(_policies(target, drafter, settings)) for drafter in drafters.values())
    with stage(f"T={temperature:g}: reading the texts with each drafter", reads, shown=progress) as done:
        for name, drafter in drafters.items():
            predicted[name] = predict(target, drafter, texts, settings, sampling, done)
    trees = {name: [p for p in predicted[name].policies if p.fixed_length is None] for name in drafters}
    if hardware is None:
        lengths = {"draft_length": settings.max_draft_length, "batches": settings.batch_sizes, "policies": trees}
        shown = f"T={temperature:g}: timing rounds" if progress else ""
        timed = timeable(target, texts)
        hardware = measure_hardware(target, drafters, timed, widths, sampling=sampling, **lengths, shown=shown)
    costs = {name: costs_of(hardware, name) for name in drafters}
    untimed = any(len(one.repeats) < 2 for one in costs.values())
    assumed = [str(policy) for name, own in trees.items() for policy in own if str(policy) not in costs[name].policies]
    rows: list[ForecastRow] = [
        forecast_row(per_text, name, costs[name], settings.batch_sizes, settings.seed, policy, temperature)
        for name, drafter in predicted.items()
        for policy, per_text in drafter.by_policy
    ]
    return Forecast(
        settings,
        rows,
        [best_of(rows, temperature, batch) for batch in settings.batch_sizes],
        {temperature: hardware},
        {},
        [f"{name} at T={temperature:g}: {reason}" for name, drafter in predicted.items() for reason in drafter.refused]
        + [f"{UNTIMED} (T={temperature:g})."] * untimed
        + [ASSUMED.format(", ".join(dict.fromkeys(assumed)), f"{temperature:g}")] * bool(assumed),
    )


@dataclass(frozen=True, eq=False)
class Predicted:
    """The expected rounds of one drafter on all texts."""

    by_policy: list[tuple[str, list[ExpectedRounds]]]
    """The expected rounds of each text by the name of the policy."""
    policies: list[Policy]
    """The policies of `by_policy`; none for a drafter that only retrieves."""
    refused: list[str]


def _policies(target: PreTrainedModel, drafter: Drafter, settings: ForecastSettings) -> list[Policy | None]:
    """Return the candidates that target and drafter can read."""
    trees = not any(capability.no_trees for capability in capabilities(target, drafter))
    return candidates(drafter, settings, trees=trees)


def predict(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[TargetText],
    settings: ForecastSettings,
    sampling: Sampling,
    done: Callable[..., None] = lambda texts=1: None,
) -> Predicted:
    """Return the expected rounds with every policy, from one teacher-forced pass.

    `done` is called with counts of texts: for those of which the pass, or a policy, is finished.
    """
    tables: list[PositionStats] = []
    policies = _policies(target, drafter, settings)
    together = 1 if any(capability.no_ragged for capability in capabilities(target, drafter)) else TOGETHER
    if drafter.only_retrieves:
        done(len(texts))
    else:
        longest = max(policy.longest for policy in policies if policy is not None)
        tables = agreement(target, drafter, texts, longest, acceptance_measure(Processors(sampling)), done)
    from_text = [retrieved(drafter, text) for text in texts]
    by_policy, predicted, refused = [], [], []
    for policy in policies:
        try:
            if policy is not None and needs_replay(policy, sampling):
                rounds = replay(target, drafter, policy, texts, sampling, together, done)
                per_text = [of_rounds(text, records) for text, records in zip(texts, rounds, strict=True)]
            else:
                reach = drafter.max_draft_length
                per_text = [
                    accepted(policy, table, text, sampling, settings.rule, retrieved=found, reach=reach)
                    for table, text, found in zip(tables or [{}] * len(texts), texts, from_text, strict=True)
                ]
                done(len(texts))
        except NotPredicted as reason:
            refused.append(f"no forecast: {reason}")
            done(len(texts))
            continue
        by_policy.append((PLAIN if policy is None else str(policy), per_text))
        predicted += [] if policy is None else [policy]
    return Predicted(by_policy, predicted, refused)


def candidates(drafter: Drafter, settings: ForecastSettings, *, trees: bool = True) -> list[Policy | None]:
    """Return the policies to compare, by default chains and `trees`; [None] for a drafter that only retrieves."""
    if drafter.only_retrieves:
        return [None]
    longest = min(settings.max_draft_length, drafter.max_draft_length or settings.max_draft_length)
    chains = [*map(Chain, range(1, longest + 1)), default_policy(drafter)]
    others = [check_policy(text) for text in settings.policies or (TREES if trees else ())]
    return list({str(policy): policy for policy in [*chains, *others]}.values())


def best_of(rows: Sequence[ForecastRow], temperature: float, batch: int) -> BestPolicy:
    """Return the fastest row at a batch size, or the target alone if nothing is faster."""
    best: BestPolicy = {
        "temperature": temperature,
        "batch_size": batch,
        "drafter": None,
        "policy": None,
        "speedup": 1.0,
        "speedup_interval": [1.0, 1.0],
        "tau": 1.0,
    }
    here = [(row, entry) for row in rows for entry in row["speed"] if entry["batch_size"] == batch]
    for row, speed in here:
        if speed["speedup"] > best["speedup"]:
            best["drafter"], best["policy"], best["tau"] = row["drafter"], row["policy"], row["tau"]
            best["speedup"], best["speedup_interval"] = speed["speedup"], speed["speedup_interval"]
    if best["drafter"] is None and here:
        row, speed = max(here, key=lambda entry: entry[1]["speedup"])
        passes = row["tau"] / speed["speedup"]
        best["why"] = (
            f"{row['drafter']} with {row['policy']} is the nearest, {speed['speedup']:.2f}x: a round commits "
            f"{row['tau']:.2f} tokens and takes as long as {passes:.2f} passes of the target alone"
        )
    return best


def noisy(best: Sequence[BestPolicy]) -> list[str]:
    """Return notes on best policies whose forecast speedup at batch size 1 exceeds tau."""
    return [
        f"{one['drafter']} ({one['policy']}) at T={one['temperature']:g}: {above_tau(one['speedup'], one['tau'])}"
        for one in best
        if one["drafter"] is not None and one["batch_size"] == 1 and one["speedup"] > one["tau"]
    ]


def _notes(best: Sequence[BestPolicy], prompts: int) -> list[str]:
    few = f"Forecast from {prompts} prompts: the intervals show the variation between texts."
    notes = [few] if prompts < 20 else []
    for temperature in dict.fromkeys(entry["temperature"] for entry in best):
        lost = [e["batch_size"] for e in best if e["temperature"] == temperature and e["drafter"] is None]
        if lost:
            notes.append(f"At T={temperature:g} speculation stops paying at batch size {min(lost)}.")
    return notes
