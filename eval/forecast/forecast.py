"""The forecast: which drafter, policy and batch size are worth it, before anything is deployed.

target writes texts ──▶ one teacher-forced pass a drafter ──▶ expected rounds of every policy (expected_rounds.py)
seconds by width and batch (hardware.py) ──▶ E[tokens] / E[seconds] beside the target alone ──▶ the best
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import Chain, Policy, StaticTree, default_policy, policy_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.errors import ConfigError
from draftsmith.eval.diagnostics import difference_measure, summary
from draftsmith.eval.forecast.expected_rounds import (
    ExpectedRounds,
    NotPredicted,
    accepted,
    needs_replay,
    of_rounds,
    retrieved,
)
from draftsmith.eval.forecast.hardware import CostModel, measure_hardware, turns
from draftsmith.eval.forecast.replay import replay
from draftsmith.eval.harness import fastest_threads, threads
from draftsmith.eval.metrics import acceptance_at
from draftsmith.eval.settings import PairSettings
from draftsmith.eval.stages import stage
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

SCHEMA = 1
RESAMPLES, COVERED = 1000, 0.95
"""Resamples of the texts for an interval, and what it covers."""
SECONDS_ERROR = 0.02
"""Standard deviation of the logarithm of measured over forecast seconds of known texts that repeated timings do not
explain: whole texts have other rounds than those that are timed, at another time. Source: `coverage` of
benchmarks/forecast.py on greedy code and prose (26 policies): 2.8 % off, of which the timings explain 1.9 %."""
TREES = ("tree:widths=2x1x1", "tree:widths=3x2x1", "best-first:size=8,depth=4")
"""Forecast beside the chains where nothing else is asked for."""
UNTIMED = "The intervals of speedups are over texts alone: the profile holds no repeated timings"
PLAIN = "copies"
"""In place of a policy, for drafters that only retrieve."""
_NO_COSTS = Costs({1: 1.0}, {1: 1.0})
"""For the names of policies that plan with costs, which are refused."""


@dataclass(frozen=True)
class ForecastSettings(PairSettings):
    """Settings of a forecast; `policies` are compared with the chains, by default a few trees."""

    max_draft_length: int = 8
    """Chains of 1 to `max_draft_length` draft tokens are compared."""
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 96

    def sampling(self, temperature: float) -> Sampling:
        """Temperature with the cuts that go with it."""
        return Sampling(temperature) if temperature == 0 else Sampling(temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Forecast:
    """Rows of `forecast.json`, the best of them, and what was refused."""

    settings: ForecastSettings
    rows: list[dict[str, Any]]
    """One a drafter, temperature and policy; speeds a batch size."""
    best: list[dict[str, Any]]
    """One a temperature and batch size."""
    diagnostics: list[dict[str, Any]]
    """What `eval/diagnostics.py` says of each drafter that has logits, at each temperature."""
    hardware: dict[float, CostModel]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "best": self.best,
            "rows": self.rows,
            "diagnostics": self.diagnostics,
            "hardware": {f"{t:g}": hardware.model_dump(mode="json") for t, hardware in self.hardware.items()},
            "environment": self.environment,
            "settings": asdict(self.settings),
            "notes": self.notes,
        }


def forecast(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: Sequence[list[int]],
    settings: ForecastSettings,
    hardware: CostModel | None = None,
    *,
    progress: bool = False,
) -> Forecast:
    """Forecast every drafter under every policy.

    Args:
        prompts: as the target will be asked; each is answered once at every temperature.
        hardware: another machine's seconds; without one, this machine's are measured.
        progress: name each stage on stderr.

    Raises:
        ConfigError: for a drafter whose context is too short, or whose seconds the hardware does not know.
    """
    if not prompts:
        raise ConfigError("prompts=0; expected at least 1")
    if hardware is not None:
        hardware.require(drafters)
    with threads(fastest_threads(target, list(prompts[0]))):
        parts = [_at(target, drafters, prompts, settings, hardware, heat, progress) for heat in settings.temperatures]
        where = environment()
    best = [entry for part in parts for entry in part.best]
    return Forecast(
        settings,
        [row for part in parts for row in part.rows],
        best,
        [entry for part in parts for entry in part.diagnostics],
        dict(zip(settings.temperatures, (part.hardware for part in parts), strict=True)),
        where,
        [note for part in parts for note in part.notes] + _notes(best, len(prompts)),
    )


class _Part(NamedTuple):
    """A forecast at one temperature."""

    rows: list[dict[str, Any]]
    best: list[dict[str, Any]]
    diagnostics: list[dict[str, Any]]
    hardware: CostModel
    notes: list[str]


def _at(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: Sequence[list[int]],
    settings: ForecastSettings,
    hardware: CostModel | None,
    temperature: float,
    progress: bool,
) -> _Part:
    sampling = settings.sampling(temperature)
    new, seed = settings.max_new_tokens, settings.seed
    with stage(f"T={temperature:g}: the target writes texts", shown=progress):
        texts = sample_texts(target, prompts, sampling, max_new_tokens=new, seed=seed)
        texts = [text for text in texts if text.anchors > 0]
    if not texts:
        raise ConfigError(f"texts of one token at T={temperature:g}; expected prompts that are answered longer")
    found = {}
    with stage(f"T={temperature:g}: reading the texts with each drafter", len(drafters), shown=progress) as done:
        for name, drafter in drafters.items():
            found[name] = predict(target, drafter, texts, settings, sampling)
            done()
    if hardware is None:
        lengths = {"draft_length": settings.max_draft_length, "batches": settings.batch_sizes}
        with stage(f"T={temperature:g}: timing rounds", turns(settings.batch_sizes), shown=progress) as done:
            hardware = measure_hardware(target, drafters, texts, sampling=sampling, **lengths, done=done)
    untimed = len(hardware.repeats) < 2
    rows = [
        {"drafter": name, "temperature": temperature, "policy": policy}
        | numbers(per_text, name, hardware, settings.batch_sizes, settings.seed)
        for name, predicted in found.items()
        for policy, per_text in predicted.plans
    ]
    return _Part(
        rows,
        [best_of(rows, temperature, batch) for batch in settings.batch_sizes],
        [
            {"drafter": name, "temperature": temperature, **summary(predicted.tables)}
            for name, predicted in found.items()
            if predicted.tables
        ],
        hardware,
        [f"{name} at T={temperature:g}: {reason}" for name, predicted in found.items() for reason in predicted.refused]
        + [f"{UNTIMED} (T={temperature:g})."] * untimed,
    )


@dataclass(frozen=True)
class Predicted:
    """One drafter on all texts."""

    plans: list[tuple[str, list[ExpectedRounds]]]
    """Policy, and what it does on each text."""
    tables: list[PositionStats]
    refused: list[str]


def predict(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[TargetText],
    settings: ForecastSettings,
    sampling: Sampling,
) -> Predicted:
    """Expected rounds under every policy; one pass serves them all."""
    tables: list[PositionStats] = []
    policies = candidates(drafter, settings)
    if not drafter.only_retrieves:
        measures = [acceptance_measure(Processors(sampling)), difference_measure(drafter, sampling.temperature)]
        tables = agreement(
            target, drafter, texts, max(depth(policy) for policy in policies if policy is not None), measures
        )
    copies = [retrieved(drafter, text) for text in texts]
    plans, refused = [], []
    for policy in policies:
        try:
            if policy is not None and needs_replay(policy, sampling):
                rounds = replay(target, drafter, policy, texts, sampling, TOGETHER)
                per_text = [of_rounds(text, records) for text, records in zip(texts, rounds, strict=True)]
            else:
                rest = {"sampling": sampling, "rule": settings.rule, "reach": drafter.max_draft_length}
                per_text = [
                    accepted(policy, table, text, retrieved=copied, **rest)
                    for table, text, copied in zip(tables or [{}] * len(texts), texts, copies, strict=True)
                ]
        except NotPredicted as reason:
            refused.append(f"no forecast: {reason}")
            continue
        plans.append((PLAIN if policy is None else str(policy), per_text))
    return Predicted(plans, tables, refused)


def candidates(drafter: Drafter, settings: ForecastSettings) -> list[Policy | None]:
    """The chains, and what was asked for beside them; None for a drafter that takes no policy."""
    if drafter.only_retrieves:
        return [None]
    longest = min(settings.max_draft_length, drafter.max_draft_length or settings.max_draft_length)
    chains = [*map(Chain, range(1, longest + 1)), default_policy(drafter)]
    others = [policy_named(text, _NO_COSTS) for text in settings.policies or TREES]
    return list({str(policy): policy for policy in [*chains, *others]}.values())


def depth(policy: Policy) -> int:
    """Draft tokens on the longest path that `policy` may draft."""
    if isinstance(policy, StaticTree):
        return max(len(path) for path in policy.shape)
    return getattr(policy, "draft_length", None) or getattr(policy, "depth", 1)


def numbers(
    per_text: Sequence[ExpectedRounds], drafter: str, hardware: CostModel, batches: Sequence[int], seed: int
) -> dict[str, Any]:
    """The measured-like part of a row: all tokens over all rounds, and over all seconds."""
    tokens_S = np.array([text.tokens for text in per_text], float)
    rounds_S = np.array([text.rounds for text in per_text])
    rng = np.random.default_rng(seed)
    draws_RS = rng.integers(len(per_text), size=(RESAMPLES, len(per_text)))
    row: dict[str, Any] = {
        "texts": len(per_text),
        "tau": float(tokens_S.sum() / rounds_S.sum()),
        "tau_interval": _interval(tokens_S[draws_RS].sum(1) / rounds_S[draws_RS].sum(1)),
        "acceptance_at": acceptance_at((text.tested_K, text.accepted_K) for text in per_text),
        "drafted_per_round": float(sum(n * w for text in per_text for (n, _), w in text.work.items()) / rounds_S.sum()),
        "speed": [],
    }
    for batch in batches:
        seconds_S, token = seconds(per_text, drafter, hardware, batch), hardware.token_seconds(batch)
        repeated = [
            repeat.token_seconds(batch) * tokens_S.sum() / seconds(per_text, drafter, repeat, batch).sum()
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


def seconds(per_text: Sequence[ExpectedRounds], drafter: str, hardware: CostModel, batch: int) -> np.ndarray:
    """Expected seconds of each text, [S]."""
    keys = {key for text in per_text for key in text.work}
    cost = {key: hardware.round_seconds(drafter, *key, batch) for key in keys}
    return np.array([sum(weight * cost[key] for key, weight in text.work.items()) for text in per_text])


def timing_errors(speedups: Sequence[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` factors by which a speedup may be off, given the speedups that repeated timings say, [count].

    With s the standard deviation of the logarithms of n of them, exp(t s / sqrt(n) + SECONDS_ERROR z), t of Student's
    distribution with n - 1 degrees of freedom and z of the normal one: a bootstrap of so few would be too narrow. 1 for
    fewer than two timings.
    """
    if len(speedups) < 2:
        return np.ones(count)
    spread = np.log(speedups).std(ddof=1)
    t = rng.standard_t(len(speedups) - 1, count)
    return np.exp(t * spread / len(speedups) ** 0.5 + rng.normal(0, SECONDS_ERROR, count))


def _interval(values: np.ndarray) -> list[float]:
    """Percentile bootstrap."""
    rest = (1 - COVERED) / 2
    return [float(value) for value in np.quantile(values, [rest, 1 - rest])]


def best_of(rows: Sequence[dict[str, Any]], temperature: float, batch: int) -> dict[str, Any]:
    """The fastest row at a batch size, or the target alone where nothing is faster."""
    alone = {"temperature": temperature, "batch_size": batch, "drafter": None, "policy": None}
    alone |= {"speedup": 1.0, "speedup_interval": [1.0, 1.0], "tau": 1.0}
    found = alone
    for row in rows:
        speed = next(entry for entry in row["speed"] if entry["batch_size"] == batch)
        if speed["speedup"] > found["speedup"]:
            kept = {key: row[key] for key in ("drafter", "policy", "tau")}
            kept |= {key: speed[key] for key in ("speedup", "speedup_interval")}
            found = {**alone, **kept}
    return found


def _notes(best: Sequence[dict[str, Any]], prompts: int) -> list[str]:
    notes = []
    if prompts < 20:
        notes.append(f"Forecast from {prompts} prompts: the intervals say how far other texts may differ.")
    for temperature in dict.fromkeys(entry["temperature"] for entry in best):
        lost = [e["batch_size"] for e in best if e["temperature"] == temperature and e["drafter"] is None]
        if lost:
            notes.append(f"At T={temperature:g} speculation stops paying at batch size {min(lost)}.")
    return notes
