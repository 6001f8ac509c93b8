"""`draftsmith eval`: the public `evaluate`, and `measure`, which loads what it needs and writes the report."""

from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.policies import Chain
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.errors import ConfigError
from draftsmith.eval.guards import dtype_of, guards, notes
from draftsmith.eval.harness import Run
from draftsmith.eval.journal import ACCEPTED, BONUS, CORRECTION, JOURNAL, KEPT, OWN, Cell, Journal, TextRecord
from draftsmith.eval.prompts import OVERALL, Prompt, PromptRows
from draftsmith.eval.report import check_report_folder, summary_table, verdict, write_report
from draftsmith.eval.results import Evaluation, Row, Sample, row_of, series_of
from draftsmith.eval.settings import BASELINE, Settings, Variant, load_session, require_valid
from draftsmith.heads.base import Drafter
from draftsmith.metrics import tau
from draftsmith.provenance import environment
from draftsmith.storage import hold_folder, writing
from draftsmith.terminal import Terminal, stage

MOST_REPEATS = 1000
"""Every repeat decodes all texts again."""
PROMPTS, TOKENS = 3, 160
"""Texts per variant and temperature, and tokens shown of each."""
KINDS = {ACCEPTED: "accepted", CORRECTION: "corrected", BONUS: "bonus", OWN: "target"}


def samples(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the texts of the first repeat for a few prompts of different categories, for every drafter and policy."""
    first = list({prompt.category: prompt for prompt in reversed(run.prompts)}.values())[::-1]
    chosen = (first + [prompt for prompt in run.prompts if prompt not in first])[:PROMPTS]
    return [
        _sample(cell, text, prompt, tokenizer)
        for prompt in chosen
        for temperature in run.settings.temperatures
        for arm in run.arms
        if arm != BASELINE
        for cell in run.cells(arm, temperature, run.settings.batch_sizes[0])
        if cell.repeat == cell.turn == 0
        for text in cell.texts
        if text.prompt == prompt.id
    ]


def _sample(cell: Cell, text: TextRecord, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sample:
    pieces = token_texts(text.tokens[:TOKENS], tokenizer, prompt.input_ids)
    rounds, start = [], 0
    for kinds in text.rounds:
        shown = list(zip(pieces[start : start + len(kinds)], (KINDS[kind] for kind in kinds), strict=False))
        if shown:
            rounds.append(shown)
        start += len(kinds)
    # The placeholder of an image stands once in the question.
    asked = [token for token, _ in groupby(prompt.input_ids)] if prompt.inputs else prompt.input_ids
    return {
        "prompt": prompt.id,
        "category": prompt.category,
        "question": str(tokenizer.decode(asked)),
        "drafter": cell.drafter,
        "policy": cell.policy,
        "temperature": cell.temperature,
        "tau": tau(text.decode_tokens, text.decode_rounds),
        "rounds": rounds,
        "cut": len(text.tokens) > TOKENS,
    }


def token_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> list[str]:
    """Return the text that each token adds after `prompt`; a character that spans tokens belongs to its last token."""
    text = IncrementalText(tokenizer, prompt, skip_special_tokens=False)
    texts = [text.add(token) for token in tokens]
    return [*texts[:-1], *(last + text.rest() for last in texts[-1:])]


def evaluate(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    settings: Settings,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Any = None,
    journal: Path | None = None,
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
    dtypes = {"target": dtype_of(target), **{name: dtype_of(drafter) for name, drafter in drafters.items()}}
    places = [(arm, t, size) for arm in run.arms for t in settings.temperatures for size in settings.batch_sizes]
    return Evaluation(
        settings=settings,
        rows=rows,
        environment={**environment(), "torch_threads": run.journal.facts["threads"]},
        notes=notes(run, rows),
        guards=guards(rows, run.journal.facts["plain"], dtypes),
        measurements=[series_of(run.cells(*place)) for place in places],
        samples=[] if tokenizer is None else samples(run, tokenizer),
        identity=run.fingerprints,
        plain=run.journal.facts["plain"],
    )


def _rows(run: Run, arm: Variant, decoder: SpeculativeDecoder) -> list[Row]:
    """Return, for each temperature and batch size, the row over all prompts and one row per category."""
    settings, policy = run.settings, decoder.policy
    categories = sorted({prompt.category for prompt in run.prompts})
    rows = []
    for temperature in settings.temperatures:
        for size in settings.batch_sizes:
            for category in (None, *(categories if len(categories) > 1 else ())):
                base, spec = (run.cells(which, temperature, size, category) for which in (BASELINE, arm))
                if not spec:
                    continue  # no batch of this size holds this category alone
                row = row_of(
                    base,
                    spec,
                    category=category or OVERALL,
                    drafter_type=run.drafters[arm[0]].type,
                    draft_length=policy.draft_length if isinstance(policy, Chain) else None,
                    rule=settings.rule,
                    lossless=decoder.lossless,
                    seed=settings.seed,
                )
                rows.append(row)
    return rows


def measure(
    settings: Settings,
    out: Path,
    *,
    title: str,
    runs: dict[str, list[dict]],
    trust_remote_code: bool = False,
) -> Evaluation:
    """Validate the settings, load the models, measure, and write the report to `out`.

    Results that an earlier call with the same settings left in `out` are used again. `runs` holds, by drafter, the
    metrics of the run that trained it, for the plot of its training.
    """
    rows = _validated(settings, out)
    with hold_folder("out", out):
        check_report_folder(out, settings)
        session = load_session(settings, rows, trust_remote_code=trust_remote_code)
        evaluation = evaluate(
            session.target,
            session.drafters,
            session.prompts,
            settings,
            tokenizer=session.tokenizer,
            processor=session.processor,
            journal=out / JOURNAL,
        )
        with stage("drawing and writing the report"), writing(out, KEPT):
            write_report(evaluation, out, title=title, runs=runs)
        return evaluation


def _validated(settings: Settings, out: Path) -> PromptRows:
    """Return the rows of the prompts; ConfigError for settings that cannot be measured."""
    if not settings.drafters:
        raise ConfigError("drafter is missing; expected at least one")
    several = {"gamma": settings.draft_lengths, "batch_size": settings.batch_sizes}
    counts = {"count": [settings.count], "max_new_tokens": [settings.max_new_tokens], "repeats": [settings.repeats]}
    require_valid(settings, counts={**several, **counts}, unique={**several, "policy": settings.policies})
    if settings.repeats > MOST_REPEATS:
        raise ConfigError.of("repeats", settings.repeats, f"at most {MOST_REPEATS}")
    return PromptRows.read(settings.prompts, settings.subset, settings.split, settings.images)


def show(evaluation: Evaluation, out: Path) -> None:
    """Print the table, the guards, the notes and the place of the report."""
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(summary_table(evaluation))
    console.print(verdict(evaluation.rows), markup=False)
    for guard in evaluation.guards:
        console.print(f"WRONG ({guard['guard']}): {guard['message']}", style="bold red")
    for note in evaluation.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.html'} and report.md beside it")
