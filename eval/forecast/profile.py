"""Profiles of machines, measured (hardware.py) or read from a file, and the speeds that follow.

A profile holds the seconds of rounds by batch size:

    name: one A10, bf16                  # optional
    alone: {1: 0.0241, 8: 0.0252}        # batch: seconds in which the target alone decodes one token of every text
    verify:                              # batch: tokens of each text: seconds of the target's forward pass
      1: {1: 0.0238, 5: 0.0241, 9: 0.0249}
      8: {1: 0.0247, 5: 0.0262, 9: 0.0291}
    drafters:
      my-drafter:                        # the name in the command; `*` stands for all other drafters
        draft: {1: {1: 0.0011, 8: 0.0086}, 8: {1: 0.0013, 8: 0.0101}}   # batch: draft tokens: seconds of drafting
        round: {1: 0.0003, 8: 0.0006}    # batch: remaining seconds of a round; default 0
        policies:                        # policy: batch: seconds of a round beyond those of a chain with as many draft
          best-first:size=9,depth=3: {1: 0.0004} # tokens and drafter passes; default 0
    repeats: []                          # optional: profiles from repeated timings of the same machine

YAML or JSON. Curves are interpolated linearly, and extrapolated with the slope of the last two points.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from pydantic import TypeAdapter, ValidationError

from draftsmith.decode.costs import Costs
from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.forecast.expected_rounds import ExpectedRounds
from draftsmith.heads.base import Drafter
from draftsmith.metrics import acceptance_at, percentiles, tau
from draftsmith.reading import parse_yaml, read_text

Profile = dict[str, Costs]
"""Costs by drafter, and those of the target alone; all have the same seconds of the target."""
ANY, TARGET = "*", ""
OF_TARGET = ("name", "alone", "verify")
OF_DRAFTER = {"draft": "chains", "round": "round", "policies": "policies"}
"""Keys of a drafter in a file, and the fields of `Costs` that they hold."""
EXPECTED = "name, alone, verify or drafters, with draft, round and policies in a drafter"


def costs_of(profile: Profile, drafter: str) -> Costs:
    """Return the costs of a drafter; those of the target alone if the profile has none."""
    return profile.get(drafter) or profile.get(ANY) or profile[TARGET]


def require_known(profile: Profile, drafters: Mapping[str, Drafter]) -> None:
    """Raise ConfigError unless the profile has the seconds of every drafter with logits."""
    for name, drafter in drafters.items():
        if not drafter.only_retrieves and not {name, ANY} & profile.keys():
            known = ", ".join(profile.keys() - {TARGET}) or "none"
            raise ConfigError(f"profile has no drafters.{name}; expected its seconds, or `*` (there are: {known})")


def profile_values(profile: Profile) -> dict[str, Any]:
    """Return the content of the file that describes a profile."""
    target, drafters = profile[TARGET], {name: costs for name, costs in profile.items() if name != TARGET}
    return {
        **{key: getattr(target, key) for key in OF_TARGET},
        "drafters": {
            name: {key: getattr(costs, of) for key, of in OF_DRAFTER.items()} for name, costs in drafters.items()
        },
        "repeats": [
            profile_values({name: costs.repeats[turn] for name, costs in profile.items()})
            for turn in range(len(target.repeats))
        ],
    }


def profile_from(values: Mapping[str, Any]) -> Profile:
    """Return the profile that such values describe; ConfigError naming the first invalid key."""
    target = {key: value for key, value in values.items() if key not in ("drafters", "repeats")}
    profile, key = {}, "drafters"
    try:
        drafters = _SECTIONS.validate_python({TARGET: {}, **values.get("drafters", {})})
        key = "repeats"
        repeats = [profile_from(turn) for turn in _TURNS.validate_python(values.get("repeats", ()))]
        for name, own in drafters.items():
            key = f"drafters.{name}" if name else ""
            if name and not own.get("draft"):
                raise ConfigError(f"{key}.draft is missing; expected seconds")
            fields = {OF_DRAFTER.get(field, field): value for field, value in own.items()}
            turns = [turn[name] for turn in repeats if name in turn]
            profile[name] = _COSTS.validate_python({**target, **fields, "repeats": turns})
    except ValidationError as error:
        raise ConfigError(_problem(error, key)) from error
    return profile


def read_profile(path: Path) -> Profile:
    """Read a profile; ConfigError naming the first invalid key."""
    try:
        values = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"profile={path} cannot be read ({reason_of(error, whole=True)}); expected YAML or JSON"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"profile={path} holds {type(values).__name__}; expected keys alone, verify and drafters")
    try:
        return profile_from(values)
    except ConfigError as error:
        raise ConfigError(f"{error} (profile {path})") from error


_COSTS = TypeAdapter(Costs)
_SECTIONS, _TURNS = TypeAdapter(dict[str, dict[str, Any]]), TypeAdapter(list[dict[str, Any]])


def _problem(error: ValidationError, where: str) -> str:
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if part != "[key]"]
    if where and place[0] not in OF_TARGET:
        field = {of: key for key, of in OF_DRAFTER.items()}.get(place[0], place[0])
        place = [where, field, *place[1:]]
    key = ".".join(place)
    if problem["type"] == "missing":
        return f"{key} is missing; expected seconds"
    if problem["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}; expected {EXPECTED}"
    return f"{key}={problem['input']!r}; expected {problem['msg'].removeprefix('Input should be ')}"


# Shapes: S texts, R resamples.

RESAMPLES = 1000
"""Of the texts, for an interval."""
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


class ForecastRow(TypedDict):
    """A drafter with a policy at one temperature."""

    drafter: str
    temperature: float
    policy: str
    texts: int
    tau: float
    tau_interval: list[float]
    acceptance_at: list[float]
    drafted_per_round: float
    speed: list[ForecastSpeed]


def forecast_row(
    per_text: Sequence[ExpectedRounds],
    drafter: str,
    costs: Costs,
    batches: Sequence[int],
    seed: int,
    policy: str = "",
    temperature: float = 0.0,
) -> ForecastRow:
    """Return tau and speeds of a row: all tokens over all rounds, and over all seconds."""
    tokens_S = np.array([text.tokens for text in per_text], float)
    rounds_S = np.array([text.rounds for text in per_text])
    rng = np.random.default_rng(seed)
    draws_RS = rng.integers(len(per_text), size=(RESAMPLES, len(per_text)))
    row: ForecastRow = {
        "drafter": drafter,
        "temperature": temperature,
        "policy": policy,
        "texts": len(per_text),
        "tau": tau(tokens_S, rounds_S),
        "tau_interval": percentiles(tokens_S[draws_RS].sum(1) / rounds_S[draws_RS].sum(1)),
        "acceptance_at": acceptance_at((text.tested_K, text.accepted_K) for text in per_text),
        "drafted_per_round": float(sum(n * w for text in per_text for (n, _), w in text.work.items()) / rounds_S.sum()),
        "speed": [],
    }
    for batch in batches:
        seconds_S, token = seconds(per_text, costs, batch, policy), costs.token_seconds(batch)
        repeated = [
            repeat.token_seconds(batch) * tokens_S.sum() / seconds(per_text, repeat, batch, policy).sum()
            for repeat in costs.repeats
        ]
        of_texts_R = token * tokens_S[draws_RS].sum(1) / seconds_S[draws_RS].sum(1)
        row["speed"].append(
            {
                "batch_size": batch,
                "speedup": float(token * tokens_S.sum() / seconds_S.sum()),
                "speedup_interval": percentiles(of_texts_R * timing_errors(repeated, RESAMPLES, rng)),
                "timings": len(repeated),
                "tokens_per_second": float(batch * tokens_S.sum() / seconds_S.sum()),
            }
        )
    return row


def seconds(per_text: Sequence[ExpectedRounds], costs: Costs, batch: int, policy: str) -> np.ndarray:
    """Return the expected seconds of each text, [S]."""
    keys = {key for text in per_text for key in text.work}
    of = {key: costs.round_seconds(*key, batch, policy) for key in keys}
    return np.array([sum(weight * of[key] for key, weight in text.work.items()) for text in per_text])


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
