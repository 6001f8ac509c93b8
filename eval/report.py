"""The report of a measurement: a table, `report.md`, `report.html`, plots and `eval.json`."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from rich.table import Table

from draftsmith.errors import ConfigError
from draftsmith.eval.journal import JOURNAL, SCHEMA, whole_lines
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import EVALUATION, Evaluation, ResultRow, read_evaluation, short_policy
from draftsmith.eval.settings import ANOTHER, Settings, require_same_run
from draftsmith.metrics import FEW, often_tested
from draftsmith.storage import write_json, write_text
from draftsmith.terminal import interval, markdown_environment, printable

MOST_POSITIONS = 16
"""Columns of acceptance by draft position; a hybrid's copies may be twice as long."""
INVARIANT = "of one shape (invariant), with and without a drafter; those of transformers' generate are not"
COMPILED = "compiled with torch.compile, with and without a drafter; transformers' generate is not compiled"
MARKS = {"\n": "⏎", "\t": "→"}


def summary_table(evaluation: Evaluation) -> Table:
    """Return a table with two lines per arm, temperature and batch size; it fits 110 columns."""
    table = Table(title="Drafters against the target alone (95 % intervals below)", pad_edge=False)
    table.add_column("drafter", overflow="fold")
    batches = evaluation.settings.batch_sizes != (1,)
    columns = ("T", "batch", "alpha", "tau", "alone tok/s", "spec. tok/s", "speedup", "draft", "verify", "overhead")
    for name in columns:
        if name != "batch" or batches:
            table.add_column(name.replace(" tok", "\ntok"), justify="right", no_wrap=True)
    for row in evaluation.rows:
        if row["category"] != OVERALL:
            continue
        table.add_row(
            f"{row['drafter']}{'' if row['lossless'] else ' (LOSSY)'}\n  {row['policy']}",
            f"{row['temperature']:g}",
            *([str(row["batch_size"])] if batches else []),
            f"{row['alpha']:.3f}",
            f"{row['tau']:.2f}\n{interval(row['tau_interval'], 2)}",
            f"{row['baseline_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x\n{interval(row['speedup_interval'], 2)}",
            *(f"{100 * share:.0f} %" for share in (row["draft_share"], row["verify_share"], row["overhead_share"])),
        )
    return table


def check_report_folder(out: Path, settings: Settings) -> None:
    """Raise ConfigError if `out` holds a measurement with other settings."""
    if (out / JOURNAL).exists():
        lines = whole_lines(out / JOURNAL)
        if lines:
            require_same_run(lines[0]["run"], settings, out, {"schema": SCHEMA})
    elif (out / EVALUATION).exists():
        try:
            before = read_evaluation(out)
        except ConfigError as error:
            raise ConfigError(
                f"out={out} holds an eval.json that cannot be read ({error}); expected {ANOTHER}"
            ) from error
        require_same_run(before, settings, out)


def write_report(evaluation: Evaluation, out: Path, *, title: str, runs: dict[str, list[dict]] | None = None) -> None:
    """Write the report into `out`. `runs`: rows of `metrics.jsonl` by drafter, for plots of training."""
    from draftsmith.eval.plots import evaluation_plots, training_plots  # matplotlib: only where a report is written

    out.mkdir(parents=True, exist_ok=True)
    plots = evaluation_plots(evaluation.rows) + training_plots(runs or {})
    for plot in plots:
        (out / plot.file).write_bytes(plot.png)
    values = {
        **_values(evaluation),
        "title": title,
        "plots": plots,
        "training": [f"{name}: {size:,} parameters." for name, size in evaluation.parameters.items() if size],
    }
    page = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True, keep_trailing_newline=True)
    page.trim_blocks, page.finalize = True, lambda value: printable(value) if type(value) is str else value
    page.filters |= {"interval": interval, "visible": visible, "short": short_policy}
    write_text(out / "report.md", _render("report.md.j2", values, markdown_environment(interval=interval)))
    write_text(out / "report.html", _render("report.html.j2", values, page))
    write_json(out / EVALUATION, evaluation.as_json())


def _render(template: str, values: dict[str, Any], environment: jinja2.Environment) -> str:
    text = files("draftsmith.eval").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)


def visible(piece: str) -> list[tuple[str, str]]:
    """Split a token's text into (mark, text) parts: an invisible character gets a visible mark before it."""
    parts: list[tuple[str, str]] = []
    for character in piece:
        if character in MARKS:
            parts.append((MARKS[character], character))
        elif not character.isprintable():
            parts.append((f"\\u{ord(character):04x}", ""))
        elif parts and not parts[-1][0]:
            parts[-1] = ("", parts[-1][1] + character)
        else:
            parts.append(("", character))
    return parts


def verdict(rows: list[ResultRow]) -> list[str]:
    """Return a sentence for each temperature and batch size: the fastest drafter or, if none is faster, why not."""
    best: dict[tuple[float, int], ResultRow] = {}
    for row in rows:
        condition = row["temperature"], row["batch_size"]
        if row["category"] == OVERALL and (condition not in best or row["speedup"] > best[condition]["speedup"]):
            best[condition] = row
    return [_verdict_on(row) for row in best.values()]


def _verdict_on(best: ResultRow) -> str:
    batch = f", batch {best['batch_size']}" if best["batch_size"] > 1 else ""
    where, name = f"at T={best['temperature']:g}{batch}", f"{best['drafter']} ({best['policy']})"
    speeds = f"{best['baseline_tokens_per_second']:.0f} to {best['tokens_per_second']:.0f} tokens/s"
    low = best["speedup"] if best["speedup_interval"] is None else best["speedup_interval"][0]
    if low > 1:
        return (
            f"Fastest {where}: {name} makes the target {best['speedup']:.2f} times as fast ({speeds}) and commits "
            f"{best['tau']:.2f} tokens per target forward pass."
        )
    faster = "measurably faster" if best["speedup"] > 1 else "faster"
    return f"No drafter is {faster} than the target alone {where}: {name} is {best['speedup']:.2f}x. {cause(best)}"


FEW_ACCEPTED, SLOW_PASS = 1.3, 1.5
"""Tau below which few draft tokens are accepted; passes of one token beyond which verifying a draft is slow."""


def cause(row: ResultRow) -> str:
    """Return a sentence with the cost of a round, its largest part, and a shorter chain that would be faster."""
    if not row["tau"] or not row["speedup"]:
        return "Nothing was decoded after the first token."
    passes = row["tau"] / row["speedup"]
    draft, verify = row["draft_share"] * passes, row["verify_share"] * passes
    costs = (
        f"A round commits {row['tau']:.2f} tokens and takes as long as {passes:.2f} passes of the target alone: "
        f"{draft:.2f} to draft, {verify:.2f} to verify, {passes - draft - verify:.2f} for the rest."
    )
    if row["tau"] < FEW_ACCEPTED:
        return f"{costs} Few draft tokens are accepted (alpha {row['alpha']:.2f})."
    shorter = _shorter(row, draft, passes)
    if draft > verify:
        return f"{costs} Drafting takes {row['draft_share']:.0%} of a round.{shorter}"
    return f"{costs} Verifying a draft is slow on this machine.{shorter}" if verify > SLOW_PASS else costs + shorter


def _shorter(row: ResultRow, draft: float, passes: float) -> str:
    """Return the shorter chain that would be faster, if drafting takes as long for each token; empty without one."""
    length, accepted = row["draft_length"] or 1, row["acceptance_at"]
    taus = 1 + np.cumsum(np.cumprod(accepted[: length - 1]))
    speedups = {gamma: tau / (passes - draft * (1 - gamma / length)) for gamma, tau in enumerate(taus.tolist(), 1)}
    best = max(speedups, key=speedups.__getitem__, default=length)
    if best == length or speedups[best] < 1.02 * row["speedup"]:
        return ""
    return f" A chain of γ={best} would be about {speedups[best]:.2f}x."


def _values(evaluation: Evaluation) -> dict[str, Any]:
    """Return the values of both report templates."""
    overall = [row for row in evaluation.rows if row["category"] == OVERALL]
    greedy = [
        f"{row['drafter']} ({row['policy']}): {row['greedy_identical'][0]} of {row['greedy_identical'][1]} greedy "
        "texts are the target's own, token by token."
        for row in overall
        if "greedy_identical" in row
    ]
    accepted = [often_tested(row) for row in overall]
    deepest = max(map(len, accepted))
    return {
        "verdicts": verdict(evaluation.rows),
        "overall": overall,
        "accepted": list(zip(overall, accepted, strict=True)),
        "by_context": [row for row in overall if len(row.get("by_context", ())) > 1],
        "by_category": [row for row in evaluation.rows if row["category"] != OVERALL],
        "settings": evaluation.settings.model_dump(),
        "conditions": _conditions(evaluation, overall[0]["prompts"]),
        "guards": evaluation.guards,
        "notes": evaluation.notes,
        "greedy": greedy,
        "positions": min(deepest, MOST_POSITIONS),
        "more_positions": max(len(row["acceptance_at"]) for row in overall) > min(deepest, MOST_POSITIONS),
        "few": FEW,
        "samples": evaluation.samples,
    }


def _conditions(evaluation: Evaluation, prompts: int) -> list[tuple[str, str]]:
    settings, where = evaluation.settings, evaluation.environment
    machine = f"{where['cpu']}, {where['cpu_count']} cores, {where['torch_threads']} thread(s)"
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    attention = f", {settings.attn_implementation}" if settings.attn_implementation else ""
    conditions = [
        ("target", f"{settings.target} ({settings.dtype}{attention})"),
        ("prompts", f"{settings.prompts}, {prompts} of them, at most {settings.max_new_tokens} new tokens a turn"),
        ("passes", COMPILED if settings.compile else INVARIANT if settings.invariant else "not compiled"),
        ("machine", f"{machine}, accelerator: {where['accelerator'] or 'none'}"),
        ("versions", f"{versions}, Python {where['python']}"),
        ("date, command", f"{where['date']}, {where['command']}"),
    ]
    if evaluation.plain is not None:
        plain = evaluation.plain
        bounds = interval(plain.get("ratio_interval"), 2)
        text = f"{plain['ratio']:.2f} times {bounds} as fast as transformers' generate (greedy, prefill included, "
        text += f"{plain['prompts']} prompts, {plain['identical']} of them with the same tokens)"
        conditions.insert(2, ("the target alone", text.replace("times  as", "times as")))
    return conditions
