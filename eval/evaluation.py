"""The public `evaluate`, and the content of `eval.json`: rows, the underlying numbers, samples, guards and notes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.errors import ConfigError
from draftsmith.eval.guards import dtype_of, guards, notes
from draftsmith.eval.harness import Run
from draftsmith.eval.journal import ACCEPTED, BONUS, CORRECTION, OWN, SCHEMA, BatchKey, Journal, Measurement
from draftsmith.eval.metrics import Series, expected_tau, greedy_identity, row_numbers
from draftsmith.eval.prompts import OVERALL, Prompt
from draftsmith.eval.results import (
    Diagnostics,
    EvalRow,
    Guard,
    PlainSpeeds,
    RowKey,
    Sample,
    StoredEvaluation,
    StoredMeasurement,
    StoredRow,
    checked,
)
from draftsmith.eval.settings import BASELINE, Settings, Variant
from draftsmith.eval.stages import stage
from draftsmith.heads.base import Drafter
from draftsmith.provenance import environment
from draftsmith.reading import read_json

PROMPTS, TOKENS = 3, 160
"""Texts per variant and temperature, and tokens shown of each."""
KINDS = {ACCEPTED: "accepted", CORRECTION: "corrected", BONUS: "bonus", OWN: "target"}
Piece = tuple[str, str]
"""The text of a token, and its kind."""


def samples(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the texts of the first repeat for a few prompts of different categories, for every drafter and policy."""
    chosen = {prompt.id: prompt for prompt in _chosen(run.prompts)}
    size = run.settings.batch_sizes[0]
    shown: list[Sample] = []
    for prompt in chosen.values():
        for temperature in run.settings.temperatures:
            for arm in run.arms:
                if arm == BASELINE:
                    continue
                for cell in run.cells(arm, temperature, size):
                    if cell.repeat == cell.turn == 0:
                        shown += [_sample(cell, place, prompt, tokenizer) for place in _places(cell, prompt)]
    return shown


def _chosen(prompts: list[Prompt]) -> list[Prompt]:
    first = list({prompt.category: prompt for prompt in reversed(prompts)}.values())[::-1]
    return (first + [prompt for prompt in prompts if prompt not in first])[:PROMPTS]


def _places(cell: Measurement, prompt: Prompt) -> list[int]:
    return [place for place, text in enumerate(cell.texts) if text.prompt == prompt.id]


def _sample(cell: Measurement, place: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sample:
    text = cell.texts[place]
    pieces = token_texts(text.tokens[:TOKENS], tokenizer, prompt.input_ids)
    rounds, start = [], 0
    for kinds in text.rounds:
        shown = list(zip(pieces[start : start + len(kinds)], (KINDS[kind] for kind in kinds), strict=False))
        if shown:
            rounds.append(shown)
        start += len(kinds)
    return {
        "prompt": prompt.id,
        "category": prompt.category,
        "question": _question(prompt, tokenizer),
        "drafter": cell.drafter,
        "policy": cell.policy,
        "temperature": cell.temperature,
        "tau": text.decode_tokens / text.decode_rounds if text.decode_rounds else 0.0,
        "rounds": rounds,
        "cut": len(text.tokens) > TOKENS,
    }


def _question(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt's text, in which the placeholder of an image stands once."""
    ids = [token for token, _ in groupby(prompt.input_ids)] if prompt.inputs else prompt.input_ids
    return str(tokenizer.decode(ids))


def token_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> list[str]:
    """Return the text that each token adds after `prompt`; a character that spans tokens belongs to its last token."""
    text = IncrementalText(tokenizer, prompt, skip_special_tokens=False)
    texts = [text.add(token) for token in tokens]
    return [*texts[:-1], *(last + text.rest() for last in texts[-1:])]


EVALUATION = "eval.json"
Diagnose = Callable[..., dict[str, Diagnostics]]
"""`diagnose(target, drafter, texts, *, temperature, draft_length, done)`: statistics by draft position for each group
of texts, which are given as (token ids, length of the prompt)."""


@dataclass(frozen=True)
class Evaluation:
    """The content of `eval.json`; docs/guide/evaluate.md has its schema."""

    settings: Settings
    rows: list[EvalRow]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    measurements: list[StoredMeasurement] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    plain: PlainSpeeds | None = None

    def as_json(self) -> StoredEvaluation:
        """Return the content of `eval.json`, which has more keys than its readers need."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "settings"}
        return cast(StoredEvaluation, {"schema": SCHEMA, "settings": asdict(self.settings), **values})


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
        raise ConfigError(f"{file} is not JSON ({error}); expected what `draftsmith eval` wrote") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{file}: schema={schema!r}; expected {SCHEMA}: measure again with this version")
    checked(StoredEvaluation, value, file, "what `draftsmith eval` wrote", strict=True)
    return cast(StoredEvaluation, value)  # with the keys that are not checked


def frozen_rows(evaluation: StoredEvaluation) -> list[StoredRow]:
    """Return the rows without those of a drafter that learned while it was measured, which 0.2 wrote."""
    online = evaluation.get("online")
    return [row for row in evaluation["rows"] if online is None or row["drafter"] != online["drafter"]]


def evaluate(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    settings: Settings,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Any = None,
    journal: Path | None = None,
    diagnose: Diagnose | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure every drafter against the target alone.

    For each repeat, temperature, batch size and batch of prompts, all variants decode one after the other. The first
    variant changes from batch to batch, so that a temporary slowdown of the machine affects all of them alike. Times
    are decode times; the prefill is reported separately.

    Args:
        tokenizer: the target's, for prompts of several turns and for samples in the report.
        processor: the target's, for prompts of several turns with images.
        journal: file to which every finished cell is appended; an existing file is continued.
        diagnose: computes statistics of each drafter by draft position.

    Raises:
        ConfigError: for models or prompts that do not fit together, or a journal of another run.
    """
    run = Run(target, drafters, prompts, settings, tokenizer, Journal(journal), processor)
    run.measure(progress)
    rows = []
    with stage("computing the numbers and their intervals", len(run.arms) - 1, shown=progress) as done:
        for arm, decoder in run.arms.items():
            if arm != BASELINE:
                rows += _rows(run, arm, decoder)
                done()
    undiagnosed: list[str] = []
    if any(asked.inputs for asked in prompts):
        undiagnosed = ["No diagnostics by draft position: prompts have images."]
    elif diagnose is not None:
        undiagnosed = _diagnose(run, rows, diagnose, progress)
    dtypes = {"target": dtype_of(target), **{name: dtype_of(drafter) for name, drafter in drafters.items()}}
    where = {**environment(), "torch_threads": run.journal.facts["threads"]}
    return Evaluation(
        settings=settings,
        rows=rows,
        environment=where,
        notes=notes(run, rows) + undiagnosed,
        guards=guards(rows, run.journal.facts["plain"], dtypes),
        measurements=_measurements(run),
        samples=[] if tokenizer is None else samples(run, tokenizer),
        identity={key: value for key, value in run.identity().items() if key != "settings"},
        plain=run.journal.facts["plain"],
    )


def _rows(run: Run, arm: Variant, decoder: SpeculativeDecoder) -> list[EvalRow]:
    """Return, for each temperature and batch size, the row over all prompts and one row per category."""
    settings = run.settings
    categories = sorted({prompt.category for prompt in run.prompts})
    rows = []
    for temperature in settings.temperatures:
        for size in settings.batch_sizes:
            head: RowKey = {
                "drafter": arm[0],
                "drafter_type": run.drafters[arm[0]].type,
                "policy": arm[1],
                "draft_length": getattr(decoder.policy, "draft_length", None) if is_chain(arm[1]) else None,
                "rule": settings.rule or "best lossless",
                "lossless": decoder.lossless or temperature == 0,
                "temperature": temperature,
                "batch_size": size,
            }
            for category in (None, *(categories if len(categories) > 1 else ())):
                base, spec = (run.cells(which, temperature, size, category) for which in (BASELINE, arm))
                if not spec:
                    continue  # no batch of this size holds this category alone
                numbers = row_numbers(base, spec, settings.seed)
                row: EvalRow = {**head, **numbers, "category": category or OVERALL}
                length = head["draft_length"]
                if length is not None and len(row["acceptance_at"]) <= length:  # a hybrid's copies are longer
                    row["expected_tau"] = expected_tau(row["alpha"], length)
                if temperature == 0:
                    row["greedy_identical"], row["first_divergence"] = greedy_identity(base, spec)
                rows.append(row)
    return rows


def is_chain(policy: str) -> bool:
    """Return whether a policy's name is that of a chain of fixed length."""
    return policy.partition(":")[0] == "chain"


def _measurements(run: Run) -> list[StoredMeasurement]:
    """Return the numbers from which rows are computed, [unit][repeat] each, for comparisons prompt by prompt."""
    entries: list[StoredMeasurement] = []
    for arm in run.arms:
        for temperature in run.settings.temperatures:
            for size in run.settings.batch_sizes:
                series = Series.of(run.cells(arm, temperature, size)).as_json()
                entries.append(
                    {
                        "drafter": arm[0],
                        "policy": arm[1],
                        "temperature": temperature,
                        "batch_size": size,
                        **series,
                    }
                )
    return entries


def _diagnose(run: Run, rows: list[EvalRow], diagnose: Diagnose, progress: bool) -> list[str]:
    """Add `diagnostics` to the rows; all policies of a drafter, temperature and category share them.

    Returns a note for each drafter without diagnostics; its measured rows are kept.
    """
    by_place: dict[tuple[str, float], dict[str, list[EvalRow]]] = {}
    for row in rows:
        if not run.drafters[row["drafter"]].only_retrieves:
            categories = by_place.setdefault((row["drafter"], row["temperature"]), {})
            categories.setdefault(row["category"], []).append(row)
    refused: dict[str, str] = {}
    for number, ((name, temperature), categories) in enumerate(by_place.items(), 1):
        deepest = max(len(other["acceptance_at"]) for other in rows if other["drafter"] == name)
        texts = {of: _texts(run, temperature, None if of == OVERALL else of) for of in categories}
        total = len({(tuple(ids), length) for group in texts.values() for ids, length in group})
        title = f"comparing {name} with the target by draft position (T={temperature:g}, {number} of {len(by_place)})"
        with stage(title, total, shown=progress) as done:
            options = {"temperature": temperature, "draft_length": max(1, deepest), "done": done}
            try:
                statistics = diagnose(run.target, run.drafters[name], texts, **options)
            except ConfigError as error:
                refused[name] = f"{name}: no diagnostics by draft position ({error})."
                continue
        for category, found in statistics.items():
            for row in categories[category]:
                row["diagnostics"] = found
    return list(refused.values())


def _texts(run: Run, temperature: float, category: str | None) -> list[tuple[list[int], int]]:
    """Return the texts of the target alone in the first repeat, prompts included, and the lengths of the prompts."""
    texts = []
    for cell in run.cells(BASELINE, temperature, run.settings.batch_sizes[0], category):
        if cell.repeat == 0:
            place = BatchKey(0, temperature, cell.batch_size, cell.group, cell.turn)
            asked = {prompt.id: prompt.input_ids for prompt in run.asked(place)}
            texts += [(asked[text.prompt] + text.tokens, len(asked[text.prompt])) for text in cell.texts]
    return texts
