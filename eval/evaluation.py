"""`draftsmith eval`: the public `evaluate`, and `measure`, which loads what it needs and writes the report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.eval.baseline import SLOWER_THAN_GENERATE
from draftsmith.eval.harness import CALIBRATION, EvaluationRun
from draftsmith.eval.journal import ACCEPTED, BONUS, CORRECTION, JOURNAL, KEPT, OWN, Cell, Journal, TextRecord, begun
from draftsmith.eval.lossless.greedy import divergences
from draftsmith.eval.prompts import OVERALL, Prompt, PromptRows
from draftsmith.eval.report import check_report_folder, summary_table, verdict, write_report
from draftsmith.eval.results import (
    EVALUATION,
    ContextBin,
    DivergenceKind,
    Evaluation,
    FirstDivergence,
    Guard,
    PlainSpeeds,
    ResultRow,
    TextSample,
    differing_texts,
    row_of,
    series_of,
)
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import BASELINE, Arm, Settings
from draftsmith.heads.base import Drafter
from draftsmith.metrics import few_units, tau
from draftsmith.option_fields import check_options
from draftsmith.provenance import environment
from draftsmith.storage import hold_folder, writing
from draftsmith.terminal import Terminal, interval, stage

PROMPTS, TOKENS = 3, 160
"""Texts per arm and temperature, and tokens shown of each."""
KINDS = {ACCEPTED: "accepted", CORRECTION: "corrected", BONUS: "bonus", OWN: "target"}


def samples(run: EvaluationRun, tokenizer: PreTrainedTokenizerBase) -> list[TextSample]:
    """Return the texts of the first repeat for a few prompts of different categories, for every drafter and policy."""
    first = list({prompt.category: prompt for prompt in reversed(run.prompts)}.values())[::-1]
    chosen = (first + [prompt for prompt in run.prompts if prompt not in first])[:PROMPTS]
    return [
        _sample(cell, text, prompt, tokenizer)
        for prompt in chosen
        for temperature in run.settings.temperatures
        for arm in run.arms
        if arm != BASELINE
        for cell in run.grid.cells(arm, temperature, run.settings.batch_sizes[0])
        if cell.repeat == cell.turn == 0
        for text in cell.texts
        if text.prompt == prompt.id
    ]


def _sample(cell: Cell, text: TextRecord, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> TextSample:
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

    For each repeat, temperature, batch size and batch of prompts, all arms decode one after the other. The first
    arm changes from batch to batch, so that a temporary slowdown of the machine affects all of them alike. Times
    are decode times; the prefill is reported separately.

    Args:
        tokenizer: the target's, for prompts of several turns and for samples in the report.
        processor: the target's, for prompts of several turns with images.
        journal: file to which every finished cell is appended; an existing file is continued.

    Raises:
        ConfigError: for models or prompts that do not fit together, or a journal of another run.
    """
    run = EvaluationRun(target, drafters, prompts, settings, tokenizer, Journal(journal), processor)
    run.measure(progress)
    rows = []
    with stage("computing the numbers and their intervals", len(run.arms) - 1, shown=progress) as done:
        for arm, decoder in run.arms.items():
            if arm != BASELINE:
                rows += _rows(run, arm, decoder)
                done()
    dtypes = {"target": dtype_of(target), **{name: dtype_of(drafter) for name, drafter in drafters.items()}}
    return Evaluation(
        settings=settings,
        rows=rows,
        environment={**environment(), "torch_threads": run.journal.facts["threads"]},
        notes=notes(run, rows),
        guards=guards(rows, run.journal.facts["plain"], dtypes),
        measurements=[series_of(run.grid.cells(arm, *place)) for arm in run.arms for place in run.grid.conditions],
        samples=[] if tokenizer is None else samples(run, tokenizer),
        identity=run.fingerprints,
        plain=run.journal.facts["plain"],
        parameters=_sizes(drafters),
    )


def _sizes(drafters: Mapping[str, Drafter]) -> dict[str, int]:
    """Return the number of parameters of each drafter that has any."""
    sizes = {name: sum(weight.numel() for weight in drafter.parameters()) for name, drafter in drafters.items()}
    return {name: size for name, size in sizes.items() if size}


def _rows(run: EvaluationRun, arm: Arm, decoder: SpeculativeDecoder) -> list[ResultRow]:
    """Return, for each temperature and batch size, the row over all prompts and one row per category."""
    settings, policy = run.settings, decoder.policy
    categories = sorted({prompt.category for prompt in run.prompts})
    rows = []
    for condition in run.grid.conditions:
        for category in (None, *(categories if len(categories) > 1 else ())):
            base, spec = (run.grid.cells(which, *condition, category) for which in (BASELINE, arm))
            if not spec:
                continue  # no batch of this size holds this category alone
            row = row_of(
                base,
                spec,
                category=category or OVERALL,
                drafter_type=run.drafters[arm[0]].type,
                draft_length=None if policy is None else policy.fixed_length,
                rule=settings.rule,
                lossless=decoder.lossless,
                seed=settings.seed,
            )
            first = row.get("first_divergence")
            if category is None and first is not None:
                row["first_divergence"] = _explained(run, first, *differing_texts(base, spec)[0])
            rows.append(row)
    return rows


def _explained(
    run: EvaluationRun, first: FirstDivergence, cell: Cell, text: TextRecord, own: list[int]
) -> FirstDivergence:
    """Return the divergence with its kind: whether rounding explains that a greedy text differs there."""
    (prompt,) = (asked for asked in run.asked(cell.key[1]) if asked.id == text.prompt)
    found = divergences(run.target, prompt, text.tokens, own)
    kind: DivergenceKind = next(divergence.kind for divergence in found if divergence.position == first["position"])
    return {"prompt": text.prompt, "position": first["position"], "kind": kind}


REPETITIVE = 0.3
"""Share of repeated 4-grams above which a report warns; source code has about 0.05."""
ROUNDING = 1e-4
"""Amount by which a mean of float32 sums may leave [0, 1]."""
ENOUGH, FALL = 50, 0.85
"""Rounds of a context length that is compared, and the share of the first one's tau below which a fall is noted."""


def name_of(row: ResultRow) -> str:
    batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
    return f"{row['drafter']} ({row['policy']}) at T={row['temperature']:g}{batch}"


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter; None for a model without any."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def above_tau(speedup: float, tau: float) -> str:
    """Return the end of a note on a speedup of single texts that exceeds tau."""
    return f"speedup {speedup:.2f} above tau {tau:.2f}: only noise explains that; measure again on a quiet machine."


def guards(rows: Sequence[ResultRow], plain: PlainSpeeds | None, dtypes: dict[str, torch.dtype | None]) -> list[Guard]:
    """Return the results that are wrong or unfair.

    Args:
        plain: the result of `compare_with_generate`.
        dtypes: dtype of "target" and of each drafter by name.
    """
    found: list[Guard] = []
    for row in rows:
        where = name_of(row) + ("" if row["category"] == OVERALL else f", {row['category']}")
        # A category of few prompts is noisier than that, and drafts may shorten the longest text of a batch by more.
        if row["category"] == OVERALL and row["batch_size"] == 1 and row["speedup"] > row["tau"]:
            found.append({"guard": "speedup-above-tau", "message": f"{where}: {above_tau(row['speedup'], row['tau'])}"})
        if not -ROUNDING <= row["alpha"] <= 1 + ROUNDING:
            text = f"alpha={row['alpha']:.4f} is no share; the verification rule or its statistics are wrong."
            found.append({"guard": "alpha-range", "message": f"{where}: {text}"})
    bounds = None if plain is None else plain.get("ratio_interval")
    if plain is not None and bounds is not None and bounds[1] < SLOWER_THAN_GENERATE:
        speeds = f"{plain['baseline_tokens_per_second']:.0f} against {plain['generate_tokens_per_second']:.0f} tokens/s"
        text = (
            f"slower here than with transformers' generate ({speeds}, ratio {plain['ratio']:.2f} {interval(bounds, 2)})"
        )
        found.append({"guard": "slow-baseline", "message": f"The target alone is {text}: all speedups are too high."})
    for name, dtype in dtypes.items():
        if dtype is not None and dtype != dtypes["target"]:
            text = (
                f"{name} is in {_short(dtype)}, the target in {_short(dtypes['target'])}: speed and acceptance differ"
            )
            found.append({"guard": "dtype", "message": f"{text} from those in a common dtype."})
    return found


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def notes(run: EvaluationRun, rows: Sequence[ResultRow]) -> list[str]:
    """Return notes on limits to the precision or the meaning of the rows."""
    found = few_units([batch.prompts for batch in groups] for groups in run.grid.batches.values())
    found += [f"Left out: {text}" for text in run.left_out]
    found += _turns_left_out(run)
    if run.learners:
        found.append(
            f"Policies that learn ({', '.join(run.learners)}) were first calibrated on {CALIBRATION} of the prompts."
        )
    machines = {(where.get("cpu"), where.get("accelerator")) for where in run.journal.sittings}
    if len(run.journal.sittings) > 1:
        other = "" if len(machines) == 1 else ", ON DIFFERENT MACHINES: speeds mix these machines"
        found.append(f"Measured in {len(run.journal.sittings)} sittings{other}.")
    for row in rows:
        if row["category"] == OVERALL:
            found += _row_notes(row)
    return found + _repetition(rows) + _quality_notes(run)


EXPLAINED = {
    "near tie": "Rounding explains it: two logits are as close there as the errors of sums in another order.",
    "bug": "Rounding does not explain it; `draftsmith check` has the details.",
    "difference not judged": "The pass in twice the precision failed; `draftsmith check` has the error.",
    "difference": "`draftsmith check` tells a near tie of two logits from a bug.",
}
"""What a difference of two greedy texts means, by its kind."""


def _row_notes(row: ResultRow) -> list[str]:
    found, name = [], name_of(row)
    if not row["lossless"]:
        found.append(f"{name}: rule {row['rule']!r} is LOSSY: its texts do not have the target's distribution.")
    spread = max(row["speedup_repeats"], default=0) - min(row["speedup_repeats"], default=0)
    if row["speedup"] and spread > 0.2 * row["speedup"]:
        found.append(f"{name}: repeats differ by {spread:.2f}x; other processes may have used the machine.")
    falls = fall(row.get("by_context", []))
    if falls is not None:
        found.append(f"{name}: {falls}")
    equal, total = row.get("greedy_identical", [0, 0])
    if equal < total:
        first = row.get("first_divergence") or {"prompt": "", "position": 0}
        kind = first.get("kind", "difference")
        found.append(
            f"{name}: {total - equal} of {total} greedy texts differ from the target's own, first by a {kind} at token "
            f"{first['position']} of question {first['prompt']}. " + EXPLAINED[kind]
        )
    return found


def fall(bins: list[ContextBin]) -> str | None:
    """Return a sentence that says how far tau falls in long contexts; None where it does not."""
    often = [one for one in bins if one["rounds"] >= ENOUGH]
    if len(often) < 2 or often[-1]["tau"] >= FALL * often[0]["tau"]:
        return None
    first, last = often[0], often[-1]
    return (
        f"tau falls from {first['tau']:.2f} in contexts below {first['end']:,} tokens to {last['tau']:.2f} from "
        f"{last['start']:,} on; train on texts of such lengths (data.prompt_tokens, data.response_tokens)."
    )


def _repetition(rows: Sequence[ResultRow]) -> list[str]:
    """Return one note per temperature: the texts of all arms are similar."""
    most: dict[float, float] = {}
    for row in rows:
        if row["category"] == OVERALL:
            most[row["temperature"]] = max(row["repeated_4grams"], most.get(row["temperature"], 0.0))
    return [
        f"At T={temperature:g} {share:.0%} of the generated 4-grams are repeats. Repetition inflates acceptance: less "
        "repetitive texts have a lower speedup."
        for temperature, share in most.items()
        if share > REPETITIVE
    ]


def _turns_left_out(run: EvaluationRun) -> list[str]:
    settings = run.settings
    wanted = sum(prompt.turns for prompt in run.prompts) * settings.repeats * len(settings.temperatures)
    wanted *= len(settings.batch_sizes)
    asked = sum(len(cell.texts) for cell in run.journal.cells.values() if cell.arm == BASELINE)
    if asked == wanted:
        return []
    return [
        f"{wanted - asked} of {wanted} questions had no room in the context of {run.context} tokens after the earlier "
        "turns, and were left out for all drafters."
    ]


def _quality_notes(run: EvaluationRun) -> list[str]:
    """Return a note for each drafter whose target was trained with it: p is not the original target's."""
    return [
        f"{name}: its target was trained with it and differs from the original: KL {quality['kl']:.4f} nats per token, "
        f"loss on held-out text {quality['nll_original']:.3f} -> {quality['nll_adapted']:.3f} nats, same most likely "
        f"token at {quality['top1_agreement']:.1%} of positions. Texts are lossless relative to this target."
        for name, drafter in run.drafters.items()
        if (quality := drafter.target_quality) is not None
    ]


def measure(
    settings: Settings,
    out: Path,
    *,
    title: str,
    runs: dict[str, list[dict]],
    overwrite: bool = False,
) -> Evaluation:
    """Check what the settings name, load the models, measure, and write the report to `out`.

    Results that an earlier call with the same settings left in `out` are used again; with `overwrite`, any are deleted.
    `runs` holds, by drafter, the
    metrics of the run that trained it, for the plot of its training.
    """
    check_options(settings)
    rows = PromptRows.read(settings.prompts, settings.subset, settings.split, settings.images)
    with hold_folder("out", out, discard=(JOURNAL, EVALUATION) if overwrite else ()):
        check_report_folder(out, settings)
        now = begun(out / JOURNAL)
        session = load_session(settings, rows, now=now)
        evaluation = evaluate(
            session.target,
            session.drafters,
            session.prompts,
            settings,
            tokenizer=session.tokenizer,
            processor=session.processor,
            journal=out / JOURNAL,
        )
        evaluation = replace(evaluation, notes=[*session.notes, *evaluation.notes])
        with stage("drawing and writing the report"), writing(out, KEPT):
            write_report(evaluation, out, title=title, runs=runs)
        return evaluation


def show(evaluation: Evaluation, out: Path) -> None:
    """Print the table, the guards, the notes and the place of the report."""
    console = Terminal.for_tables()
    console.print(summary_table(evaluation))
    for line in verdict(evaluation.rows):
        console.print(line)
    for guard in evaluation.guards:
        console.print(f"WRONG ({guard['guard']}): {guard['message']}", style="bold red")
    for note in evaluation.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.html'} and report.md beside it")
