"""The content of `eval.json`: rows and series, computed from a journal's cells, and the reading of such files.

Files may come from anyone: pydantic validates the keys that readers rely on; other keys are ignored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NotRequired, cast

import numpy as np
from pydantic import AfterValidator, Field, FiniteFloat, PositiveInt
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from draftsmith.errors import ConfigError
from draftsmith.eval.journal import (
    ACCEPTED,
    CORRECTION,
    OURS,
    SCHEMA,
    Cell,
    PlainSpeeds,
    ServedCell,
    TextRecord,
    checked,
)
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.settings import Settings
from draftsmith.metrics import (
    PositionCounts,
    Series,
    acceptance_at,
    alpha,
    as_series,
    intervals,
    speeds,
    speedups,
    summed,
    tau,
)
from draftsmith.reading import read_json

EVALUATION = "eval.json"
Bounds = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
"""The lower and the upper end of an interval."""
SHORTEST = 128
"""Contexts below this length form the first bin; each further bin is twice as long as the one before it."""


class ContextBin(TypedDict):
    """Rounds whose context has at least `start` and fewer than `end` tokens."""

    start: int
    end: int
    rounds: int
    tau: float
    accepted: float
    """Share of the tested draft tokens that were accepted."""


DivergenceKind = Literal["near tie", "bug", "difference not judged"]
"""Whether rounding explains a greedy token that is not the target's; not judged if the pass that measures it failed."""


class FirstDivergence(TypedDict):
    """The first token of a greedy text that differs from the target's own text."""

    prompt: str
    position: int
    kind: NotRequired[DivergenceKind]
    """Missing where that was not tested."""


class ResultRow(TypedDict):
    """A drafter with a policy at one temperature and batch size, over all prompts or those of one category."""

    drafter: str
    drafter_type: str
    policy: str
    draft_length: int | None
    """Of chains of a fixed length."""
    rule: str
    lossless: bool
    temperature: FiniteFloat
    batch_size: PositiveInt
    category: str
    prompts: int
    alpha: FiniteFloat
    alpha_interval: Bounds | None
    tau: FiniteFloat
    tau_interval: Bounds | None
    speedup: FiniteFloat
    speedup_interval: Bounds | None
    speedup_repeats: list[FiniteFloat]
    acceptance_at: list[FiniteFloat]
    tested_at: NotRequired[list[int]]
    """Rounds that tested each of these positions; missing in files of versions before 0.2."""
    baseline_tokens_per_second: FiniteFloat
    tokens_per_second: FiniteFloat
    draft_share: FiniteFloat
    verify_share: FiniteFloat
    overhead_share: FiniteFloat
    prefill_seconds: FiniteFloat
    baseline_prefill_seconds: FiniteFloat
    decode_tokens: int
    repeated_4grams: FiniteFloat
    greedy_identical: NotRequired[list[int]]
    """At temperature 0: greedy texts that equal the target's own, and all of them."""
    first_divergence: NotRequired[FirstDivergence | None]
    by_context: NotRequired[list[ContextBin]]


def series_of(cells: Sequence[Cell] | Sequence[ServedCell], units: list[list[str]] | None = None) -> Series:
    """Return the sums of the cells of one arm, temperature and batch size; every batch has every repeat.

    Without overlaps where the counters of a server do not determine them.

    Args:
        units: ids of the prompts of each batch; default: those of the cells' texts.
    """
    groups, repeats = (sorted({getattr(cell.place, key) for cell in cells}) for key in ("group", "repeat"))
    if units is None:
        asked = {cell.place.group: [text.prompt for text in cell.texts] for cell in cells if cell.place.turn == 0}
        units = [asked[group] for group in groups]
    sums = np.zeros((5, len(groups), len(repeats)))
    for cell in cells:
        sums[:, groups.index(cell.place.group), repeats.index(cell.place.repeat)] += cell.sums
    if not all(cell.lengths_known for cell in cells):
        sums[3:] = 0.0
    return as_series(cells[0].arm, cells[0].place.temperature, cells[0].place.batch_size, units, sums)


def positions(cells: Sequence[Cell] | Sequence[ServedCell]) -> list[tuple[PositionCounts, PositionCounts]]:
    """Return for each text, or batch of a server, the rounds that tested and that accepted each position.

    Only the first position, of which a server's counters always tell it, if they do not of another one in some batch.
    """
    depth = None if all(cell.lengths_known for cell in cells) else 1
    return [(tested[:depth], accepted[:depth]) for cell in cells for tested, accepted in cell.positions]


def row_of(
    baseline: Sequence[Cell],
    speculative: Sequence[Cell],
    *,
    category: str = OVERALL,
    drafter_type: str = "",
    draft_length: int | None = None,
    rule: str | None = None,
    lossless: bool = True,
    seed: int = 0,
) -> ResultRow:
    """Return the row of one arm at one temperature and batch size; speeds and the speedup are medians over repeats.

    Args:
        baseline: cells of the target alone over the same batches of prompts.
        speculative: cells of the arm.
        category: of the prompts.
        seed: seed of the bootstrap.
    """
    base, spec = series_of(baseline), series_of(speculative)
    ratios = speedups(base, spec)
    seconds = sum(cell.seconds for cell in speculative) or 1.0
    draft = sum(cell.draft_seconds for cell in speculative) / seconds
    verify = sum(cell.verify_seconds for cell in speculative) / seconds
    texts = [text for cell in speculative for text in cell.texts]
    row: ResultRow = {
        "drafter": spec["drafter"],
        "drafter_type": drafter_type,
        "policy": spec["policy"],
        "draft_length": draft_length,
        "rule": rule or "best lossless",
        "lossless": lossless or spec["temperature"] == 0,
        "temperature": spec["temperature"],
        "batch_size": spec["batch_size"],
        "category": category,
        "prompts": sum(map(len, spec["units"])),
        "alpha": alpha(spec["overlap"], spec["overlaps"]),
        "tau": tau(spec["tokens"], spec["rounds"]),
        "speedup": float(np.median(ratios)),
        **intervals(base, spec, seed),
        "acceptance_at": acceptance_at(positions(speculative)),
        "tested_at": [int(count) for count in summed([text.tested for text in texts]) if count > 0],
        "baseline_tokens_per_second": float(np.median(speeds(base))),
        "tokens_per_second": float(np.median(speeds(spec))),
        "draft_share": draft,
        "verify_share": verify,
        "overhead_share": 1 - draft - verify,
        "speedup_repeats": [value for value in ratios.tolist() if value > 0],
        "prefill_seconds": median(cell.prefill_seconds for cell in speculative),
        "baseline_prefill_seconds": median(cell.prefill_seconds for cell in baseline),
        "decode_tokens": sum(text.decode_tokens for text in texts),
        "repeated_4grams": repeated_4grams([text.tokens for text in texts]),
        "by_context": by_context(texts),
    }
    if row["temperature"] == 0:
        row["greedy_identical"], row["first_divergence"] = greedy_identity(baseline, speculative)
    return row


def by_context(texts: Iterable[TextRecord]) -> list[ContextBin]:
    """Return tau and acceptance by context length, shortest first; bins without a round are left out."""
    counts: dict[int, list[int]] = {}
    for text in texts:
        length = text.prompt_tokens
        if not length:
            continue  # from a journal of a version that did not store it
        for number, kinds in enumerate(text.rounds):
            if number:  # the first string is the token that the prefill gave
                index = (length // SHORTEST).bit_length()
                accepted = kinds.count(ACCEPTED)
                values = (1, len(kinds), accepted, accepted + kinds.count(CORRECTION))
                counts[index] = [a + b for a, b in zip(counts.get(index, (0,) * 4), values, strict=True)]
            length += len(kinds)
    return [
        {
            "start": SHORTEST << index >> 1 if index else 0,
            "end": SHORTEST << index,
            "rounds": rounds,
            "tau": tokens / rounds,
            "accepted": accepted / tested if tested else 0.0,
        }
        for index, (rounds, tokens, accepted, tested) in sorted(counts.items())
    ]


def repeated_4grams(texts: list[list[int]]) -> float:
    """Return the share of 4-grams that occur earlier in the same text; repetitive text is easy to draft."""
    repeated = total = 0
    for tokens in texts:
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def greedy_identity(baseline: Sequence[Cell], speculative: Sequence[Cell]) -> tuple[list[int], FirstDivergence | None]:
    """Return [greedy texts that equal the target's own, all texts], and the first difference."""
    texts, differing = sum(len(cell.texts) for cell in speculative), differing_texts(baseline, speculative)
    first: FirstDivergence | None = None
    if differing:
        _, text, own = differing[0]
        pairs = enumerate(zip(own, text.tokens, strict=False))
        position = next((i for i, (x, y) in pairs if x != y), min(len(own), len(text.tokens)))
        first = {"prompt": text.prompt, "position": position}
    return [texts - len(differing), texts], first


def differing_texts(baseline: Sequence[Cell], speculative: Sequence[Cell]) -> list[tuple[Cell, TextRecord, list[int]]]:
    """Return the texts that are not the target's own, with their cells and the target's tokens."""
    own = {(text.prompt, cell.repeat, cell.turn): text.tokens for cell in baseline for text in cell.texts}
    texts = [(cell, text, own[text.prompt, cell.repeat, cell.turn]) for cell in speculative for text in cell.texts]
    return [(cell, text, tokens) for cell, text, tokens in texts if text.tokens != tokens]


def short_policy(policy: str) -> str:
    """Return the policy's name without settings, or `γ=` and the length of a chain."""
    name, _, settings = policy.partition(":")
    return f"γ={settings.removeprefix('draft_length=')}" if name == "chain" else name


class ServerRow(TypedDict):
    """A served drafter at a temperature and number of requests at a time; None for what the engine does not count."""

    temperature: FiniteFloat
    concurrency: PositiveInt
    prompts: int
    tokens_per_second: FiniteFloat
    milliseconds_per_token: FiniteFloat
    """Between two tokens of one text."""
    alpha: FiniteFloat | None
    """Share of the tested draft positions that were accepted."""
    tau: FiniteFloat | None
    tau_interval: Bounds | None
    acceptance_at: list[FiniteFloat]
    baseline_tokens_per_second: FiniteFloat | None
    speedup: FiniteFloat | None
    speedup_interval: Bounds | None
    turns_left_out: NotRequired[int]
    """Later turns that were not asked, since an answer before them could not be continued; missing before 0.4."""


Guard = dict[str, str]
"""A result that is wrong or unfair: `guard` names the kind, `message` the case."""


class TextSample(TypedDict):
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


@dataclass(frozen=True)
class Evaluation:
    """A measurement, which `eval.json` stores; docs/guide/evaluate.md has its schema."""

    settings: Settings
    rows: list[ResultRow]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    measurements: list[Series] = field(default_factory=list)
    """The sums from which rows are computed, for comparisons prompt by prompt."""
    samples: list[TextSample] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    plain: PlainSpeeds | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    """Of each drafter that has any."""
    server: list[ServerRow] = field(default_factory=list)
    """Rows of a served drafter instead of `rows`."""

    def as_json(self) -> "StoredEvaluation":
        """Return the content of `eval.json`, which has more keys than its readers need."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "settings"}
        if not self.server:
            del values["server"]
        return cast(StoredEvaluation, {"schema": SCHEMA, "settings": self.settings.model_dump(), **values})


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


def _require_one_shape(series: Series) -> Series:
    grids = (series["tokens"], series["rounds"], series["seconds"], series["overlap"], series["overlaps"])
    repeats = {len(row) for grid in grids for row in grid}
    if {len(grid) for grid in grids} != {len(series["units"])} or len(repeats) != 1 or 0 in repeats:
        raise ValueError("as many rows as units, all equally long")
    return series


class StoredEvaluation(TypedDict):
    """The content of an `eval.json` that is read back."""

    settings: StoredSettings
    rows: list[ResultRow]
    environment: StoredEnvironment
    notes: list[str]
    guards: list[Guard]
    measurements: list[Annotated[Series, AfterValidator(_require_one_shape)]]
    identity: dict[str, Any]
    """Fingerprints of target, prompts and drafters."""
    server: NotRequired[list[ServerRow]]


def read_evaluation(path: Path) -> StoredEvaluation:
    """Return the content of an `eval.json`, or of the one in a folder.

    Raises:
        ConfigError: for a file that is missing, that `draftsmith eval` did not write, or that has another schema.
    """
    file = path / EVALUATION if path.is_dir() else path
    try:
        value = read_json(file)
    except OSError as error:
        raise ConfigError(f"{path}; expected an eval.json or the folder of one, and there is none") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); expected {OURS}") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{file}: schema={schema!r}; expected {SCHEMA}: measure again with this version")
    if value.get("online"):  # of 0.2
        raise ConfigError(f"{file} has a drafter that learned while it decoded; expected {OURS} without one")
    checked(StoredEvaluation, value, file, strict=True)
    return cast(StoredEvaluation, value)  # with the keys that are not checked
