"""What a measurement leaves behind: a table, `report.md`, plots and `eval.json`."""

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table

from draftsmith.errors import ConfigError
from draftsmith.eval.harness import Evaluation, Settings
from draftsmith.eval.plots import plot_acceptance, plot_speedup, plot_training
from draftsmith.storage import write_json, write_text


def summary_table(evaluation: Evaluation) -> Table:
    """One line a drafter and temperature; fits 100 columns."""
    table = Table(title="Drafters against the target alone", pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for name in ("T", "alpha", "tau", "alone tok/s", "spec. tok/s", "speedup", "draft", "verify", "overhead"):
        table.add_column(name, justify="right")
    for row in evaluation.rows:
        if row["category"] != "all":
            continue
        table.add_row(
            f"{row['drafter']}{'' if row['lossless'] else ' (LOSSY)'}\n  {row['policy']}",
            f"{row['temperature']:g}",
            f"{row['alpha']:.3f}",
            f"{row['tau']:.2f}",
            f"{row['baseline_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            *(f"{100 * row[key]:.0f} %" for key in ("draft_share", "verify_share", "overhead_share")),
        )
    return table


def check_report_folder(out: Path, settings: Settings) -> None:
    """ConfigError when `out` already holds a measurement with other settings, or is no folder."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder")
    file = out / "eval.json"
    if not file.exists():
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"out={out} holds an eval.json that is not ours; expected another folder") from error
    now = json.loads(json.dumps(asdict(settings)))
    for key, value in now.items():
        if before.get(key) != value:
            raise ConfigError(
                f"out={out} holds another run: {key}={before.get(key)!r} there, {value!r} here; expected another folder"
            )


def write_report(evaluation: Evaluation, out: Path, *, title: str, runs: dict[str, list[dict]] | None = None) -> None:
    """Write everything into `out`. `runs`: the training metrics of each drafter, for its curves."""
    out.mkdir(parents=True, exist_ok=True)
    plots = [
        plot_speedup(evaluation.rows, out / "speedup.png"),
        plot_acceptance(evaluation.rows, out / "acceptance.png"),
    ]
    if runs:
        plots.append(plot_training(runs, out / "training.png"))
    write_text(out / "report.md", _markdown(evaluation, title, plots))
    write_json(out / "eval.json", evaluation.as_json())


def headline(rows: list[dict[str, Any]]) -> str:
    """The finding in one sentence."""
    overall = [row for row in rows if row["category"] == "all"]
    best = max(overall, key=lambda row: row["speedup"])
    return (
        f"Fastest: **{best['drafter']}** ({best['policy']}) at T={best['temperature']:g} makes the target "
        f"**{best['speedup']:.2f} times as fast** "
        f"({best['baseline_tokens_per_second']:.0f} to {best['tokens_per_second']:.0f} tokens/s) and commits "
        f"{best['tau']:.2f} tokens per target pass."
    )


def _markdown(evaluation: Evaluation, title: str, plots: list[dict[str, str]]) -> str:
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True)
    text = files("draftsmith.eval").joinpath("report.md.j2").read_text(encoding="utf-8")
    overall = [row for row in evaluation.rows if row["category"] == "all"]
    greedy = [
        f"{row['drafter']} ({row['policy']}): {row['greedy_identical'][0]} of {row['greedy_identical'][1]} greedy "
        "texts are the target's own, token by token."
        for row in overall
        if "greedy_identical" in row
    ]
    return template.from_string(text).render(
        title=title,
        headline=headline(evaluation.rows),
        rows=evaluation.rows,
        settings=asdict(evaluation.settings),
        environment=evaluation.environment,
        notes=evaluation.notes,
        greedy=greedy,
        positions=max(len(row["acceptance_at"]) for row in overall),
        categories=len(evaluation.rows) > len(overall),
        prompts=overall[0]["prompts"],
        plots=plots,
    )
