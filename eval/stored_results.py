"""What result files may hold, checked before anything is made of them: they may have come from anyone.

Keys that nothing reads are left alone.
"""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from draftsmith.errors import ConfigError, one_line

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Bounds = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
Grid = list[list[Number]]
"""[unit][repeat]"""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class StoredSettings(_Stored):
    target: str
    drafters: dict[str, str]
    prompts: str
    max_new_tokens: int
    repeats: int
    dtype: str


class StoredEnvironment(_Stored):
    cpu: str
    cpu_count: int | None = None
    torch_threads: int
    accelerator: str | None = None
    versions: dict[str, str]
    date: str


class StoredSitting(_Stored):
    """The machine of a journal's start."""

    cpu: str
    accelerator: str | None


class StoredIdentity(_Stored):
    target: str = ""
    prompts: str = ""
    drafters: dict[str, str] = {}


class StoredGuard(_Stored):
    guard: str
    message: str


class StoredRow(_Stored):
    drafter: str
    drafter_type: str
    policy: str
    draft_length: int | None
    rule: str
    lossless: bool
    temperature: Number
    batch_size: Positive
    category: str
    prompts: int
    alpha: Number
    alpha_interval: Bounds
    tau: Number
    tau_interval: Bounds
    speedup: Number
    speedup_interval: Bounds
    acceptance_at: list[Number]
    baseline_tokens_per_second: Number
    tokens_per_second: Number
    draft_share: Number
    verify_share: Number
    overhead_share: Number
    expected_tau: Number = 0.0


class StoredMeasurement(_Stored):
    """The numbers of an arm, all of one shape."""

    drafter: str
    policy: str
    temperature: Number
    batch_size: Positive
    units: list[list[str]]
    tokens: Grid
    rounds: Grid
    seconds: Grid
    overlap: Grid
    overlaps: Grid

    @model_validator(mode="after")
    def _require_one_shape(self) -> Self:
        repeats = {len(row) for grid in self._grids for row in grid}
        if {len(grid) for grid in self._grids} != {len(self.units)} or len(repeats) != 1 or 0 in repeats:
            raise ValueError("as many rows as units, all equally long")
        return self

    @property
    def _grids(self) -> tuple[Grid, ...]:
        return self.tokens, self.rounds, self.seconds, self.overlap, self.overlaps


class StoredEvaluation(_Stored):
    """The content of an `eval.json`."""

    settings: StoredSettings
    rows: list[StoredRow]
    environment: StoredEnvironment
    notes: list[str]
    guards: list[StoredGuard]
    measurements: list[StoredMeasurement]
    identity: StoredIdentity


class PlainSpeeds(_Stored):
    """What `compare_with_generate` found."""

    prompts: int
    identical: int
    generate_tokens_per_second: Number
    baseline_tokens_per_second: Number
    ratio: Number
    best_ratio: Number


def checked(kind: Any, value: Any, place: Path | str, expected: str) -> Any:
    """Return `value` as `kind`; ConfigError naming `place` and the first key that does not fit."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "it"
        found = one_line(repr(problem["input"]), 80)
        raise ConfigError(f"{place}: {key}={found} ({problem['msg']}); expected {expected}") from error
