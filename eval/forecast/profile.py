"""Profiles of machines, measured (hardware.py, served.py) or read from a file, and the speeds that follow from them.

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

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.decode.costs import interpolated
from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.forecast.expected_rounds import ExpectedRounds
from draftsmith.heads.base import Drafter
from draftsmith.metrics import acceptance_at, percentiles, tau
from draftsmith.reading import parse_yaml, read_text
from draftsmith.storage import write_json

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
ANY = "*"


class DrafterSeconds(BaseModel):
    """Seconds that one drafter adds to a round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft: dict[Count, Annotated[dict[Count, NotNegative], Field(min_length=1)]] = Field(min_length=1)
    round: dict[Count, NotNegative] = {1: 0.0}
    policies: dict[str, dict[Count, Annotated[float, Field(allow_inf_nan=False)]]] = {}


class CostModel(BaseModel):
    """A profile, as described above."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    alone: Annotated[dict[Count, Seconds], Field(min_length=1)]
    verify: Annotated[dict[Count, Annotated[dict[Count, Seconds], Field(min_length=1)]], Field(min_length=1)]
    drafters: dict[str, DrafterSeconds] = {}
    repeats: tuple["CostModel", ...] = ()
    """Profiles of single turns over all lengths; the seconds above are means over all turns."""

    def token_seconds(self, batch: int) -> float:
        """Return the seconds in which the target alone decodes one token of each of `batch` texts."""
        return interpolated(self.alone, batch)

    def verify_seconds(self, width: float, batch: int) -> float:
        """Return the seconds of a target forward pass over `width` tokens of each of `batch` texts."""
        return _at(self.verify, batch, width)

    def round_seconds(self, drafter: str, nodes: float, passes: float, batch: int, policy: str = "") -> float:
        """Return the seconds of a round that verifies `nodes` draft tokens per text after `passes` drafter passes."""
        own = self.of(drafter)
        seconds = self.verify_seconds(nodes + 1, batch)
        if own is None:
            return seconds
        beyond = own.policies.get(policy)
        more = interpolated(beyond, batch) if beyond and passes else 0.0
        # Noise may make a difference, or the extrapolation beyond the longest timed draft, negative.
        drafting = max(_at(own.draft, batch, passes) + more, 0.0) if passes else 0.0
        return seconds + interpolated(own.round, batch) + drafting

    def of(self, drafter: str) -> DrafterSeconds | None:
        """Return the seconds of a drafter; None if the profile has none."""
        return self.drafters.get(drafter, self.drafters.get(ANY))

    def knows(self, drafter: str, policy: str) -> bool:
        """Return whether the profile has the seconds of this policy's rounds."""
        own = self.of(drafter)
        return own is not None and policy in own.policies

    def require(self, drafters: dict[str, Drafter]) -> None:
        """Raise ConfigError unless the profile has the seconds of every drafter with logits."""
        for name, drafter in drafters.items():
            if not drafter.only_retrieves and self.of(name) is None:
                known = ", ".join(self.drafters) or "none"
                raise ConfigError(f"profile has no drafters.{name}; expected its seconds, or `*` (there are: {known})")

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> "CostModel":
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
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{_problem(error)} (profile {path})") from error


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "missing":
        return f"{key} is missing; expected seconds"
    if problem["type"] == "extra_forbidden":
        return (
            f"unknown key {key}; expected name, alone, verify or drafters, with draft, round and policies in a drafter"
        )
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{key}={problem['input']!r}; expected {expected}"


def _at(curves: dict[int, dict[int, float]], batch: int, width: float) -> float:
    """Interpolate over the width at every batch size, then over the batch size."""
    return interpolated({size: interpolated(curve, width) for size, curve in curves.items()}, batch)


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


def numbers(
    per_text: Sequence[ExpectedRounds],
    drafter: str,
    hardware: CostModel,
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
        seconds_S, token = seconds(per_text, drafter, hardware, batch, policy), hardware.token_seconds(batch)
        repeated = [
            repeat.token_seconds(batch) * tokens_S.sum() / seconds(per_text, drafter, repeat, batch, policy).sum()
            for repeat in hardware.repeats
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


def seconds(
    per_text: Sequence[ExpectedRounds], drafter: str, hardware: CostModel, batch: int, policy: str
) -> np.ndarray:
    """Return the expected seconds of each text, [S]."""
    keys = {key for text in per_text for key in text.work}
    cost = {key: hardware.round_seconds(drafter, *key, batch, policy) for key in keys}
    return np.array([sum(weight * cost[key] for key, weight in text.work.items()) for text in per_text])


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
