"""Typed rows of `eval.json` and `cells.jsonl`, and the validation of such files, which may come from anyone.

The `Stored…` types hold the keys that readers of a file rely on, and pydantic validates a file against them; keys that
nothing reads are ignored.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from draftsmith.errors import ConfigError, one_line

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Bounds = Annotated[list[Number], Field(min_length=2, max_length=2)]
"""The lower and the upper end of an interval."""
Grid = list[list[Number]]
"""[unit][repeat]"""


class StoredSettings(TypedDict):
    target: str
    drafters: dict[str, str]
    prompts: str
    max_new_tokens: int
    repeats: int
    dtype: str


class StoredEnvironment(TypedDict):
    cpu: str
    cpu_count: NotRequired[int | None]
    torch_threads: int
    accelerator: NotRequired[str | None]
    versions: dict[str, str]
    date: str


class StoredSitting(TypedDict):
    """The machine of one start of a measurement."""

    cpu: str
    accelerator: str | None


class StoredIdentity(TypedDict):
    """Fingerprints of models and prompts."""

    target: NotRequired[str]
    prompts: NotRequired[str]
    drafters: NotRequired[dict[str, str]]


class Guard(TypedDict):
    """A result that is wrong or unfair: `guard` names the kind, `message` the case."""

    guard: str
    message: str


class RowKey(TypedDict):
    """A drafter with a policy at a temperature and batch size."""

    drafter: str
    drafter_type: str
    policy: str
    draft_length: int | None
    rule: str
    lossless: bool
    temperature: Number
    batch_size: Positive


class StoredNumbers(TypedDict):
    prompts: int
    alpha: Number
    alpha_interval: Bounds | None
    tau: Number
    tau_interval: Bounds | None
    speedup: Number
    speedup_interval: Bounds | None
    acceptance_at: list[Number]
    tested_at: NotRequired[list[int]]
    """Rounds that tested each of these positions; missing in files of versions before 0.2."""
    baseline_tokens_per_second: Number
    tokens_per_second: Number
    draft_share: Number
    verify_share: Number
    overhead_share: Number


class RowNumbers(StoredNumbers):
    """The measured part of a row."""

    speedup_repeats: list[float]
    prefill_seconds: float
    baseline_prefill_seconds: float
    decode_tokens: int
    repeated_4grams: float


class StoredRow(RowKey, StoredNumbers):
    """A row as the model card, plots and comparisons read it."""

    category: str
    expected_tau: NotRequired[Number]
    """Of chains: tau if every draft token were accepted with probability alpha."""


class DivergencePlace(TypedDict):
    """The first token of a greedy text that differs from the target's own text."""

    prompt: str
    position: int


class PositionDiagnostics(TypedDict):
    """Statistics of one draft position; `diagnose` defines them."""

    position: int
    tokens: int
    forward_kl: float
    reverse_kl: float
    tv: float
    top1_agreement: float
    entropy_overlap: float
    ece: float
    cosine: float | None


class Diagnostics(TypedDict):
    positions: list[PositionDiagnostics]
    cosine_correlation: float | None


class EvalRow(StoredRow, RowNumbers):
    """A row of `eval.json`: a drafter, policy, temperature, batch size and category."""

    greedy_identical: NotRequired[list[int]]
    """At temperature 0: greedy texts that equal the target's own, and all of them."""
    first_divergence: NotRequired[DivergencePlace | None]
    diagnostics: NotRequired[Diagnostics]


class StoredSeries(TypedDict):
    """Numbers of each unit and repeat; see `metrics.Series`."""

    units: list[list[str]]
    tokens: Grid
    rounds: Grid
    seconds: Grid
    overlap: Grid
    overlaps: Grid


class StoredMeasurement(StoredSeries):
    """The numbers of a drafter and policy at one temperature and batch size."""

    drafter: str
    policy: str
    temperature: Number
    batch_size: Positive


def _require_one_shape(entry: StoredMeasurement) -> StoredMeasurement:
    grids = (entry["tokens"], entry["rounds"], entry["seconds"], entry["overlap"], entry["overlaps"])
    repeats = {len(row) for grid in grids for row in grid}
    if {len(grid) for grid in grids} != {len(entry["units"])} or len(repeats) != 1 or 0 in repeats:
        raise ValueError("as many rows as units, all equally long")
    return entry


class ServerRow(TypedDict):
    """A served drafter at a temperature and number of requests at a time; None for what the engine does not count."""

    temperature: Number
    concurrency: Positive
    prompts: int
    tokens_per_second: Number
    milliseconds_per_token: Number
    """Between two tokens of one text."""
    alpha: Number | None
    """Share of the tested draft positions that were accepted."""
    tau: Number | None
    tau_interval: Bounds | None
    acceptance_at: list[Number]
    baseline_tokens_per_second: Number | None
    speedup: Number | None
    speedup_interval: Bounds | None


class StoredOnline(TypedDict):
    """A measurement of a drafter that learned while it decoded, which 0.2 wrote."""

    drafter: str
    """The copy that learned: its rows are of weights that changed."""


class StoredEvaluation(TypedDict):
    """The content of an `eval.json` that is read back."""

    settings: StoredSettings
    rows: list[StoredRow]
    environment: StoredEnvironment
    notes: list[str]
    guards: list[Guard]
    measurements: list[Annotated[StoredMeasurement, AfterValidator(_require_one_shape)]]
    identity: StoredIdentity
    server: NotRequired[list[ServerRow]]
    """Rows of a served drafter instead of `rows`."""
    online: NotRequired[StoredOnline | None]


class PlainSpeeds(TypedDict):
    """Tokens per second of the target alone and of transformers' `generate`; see `compare_with_generate`."""

    prompts: int
    identical: int
    generate_tokens_per_second: Number
    baseline_tokens_per_second: Number
    ratio: Number
    best_ratio: Number


class Sample(TypedDict):
    """A decoded text of the report, by round and token."""

    prompt: str
    category: str
    question: str
    drafter: str
    policy: str
    temperature: float
    tau: float
    rounds: list[list[tuple[str, str]]]
    """For each round its tokens: text and kind."""
    cut: bool
    """Whether the text is longer than what is shown."""


def checked(kind: Any, value: Any, place: Path | str, expected: str, *, strict: bool = False) -> Any:
    """Return `value` validated as `kind`; ConfigError naming `place` and the first key that does not fit.

    `strict`: refuse values of another type that could be converted, such as numbers in quotes.
    """
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "it"
        shown = one_line(repr(problem["input"]), 80)
        raise ConfigError(f"{place}: {key}={shown} ({problem['msg']}); expected {expected}") from error
