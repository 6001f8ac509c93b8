"""`draftsmith eval server`: validate, measure one or two servers, and write the report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import is_address, require_client
from draftsmith.distill.server.client import served_at
from draftsmith.errors import ConfigError
from draftsmith.eval.compare import MATTER_SERVED, Condition
from draftsmith.eval.harness import Grid
from draftsmith.eval.journal import COUNTED, KEPT, Journal, Numbers, ServedCell, begun
from draftsmith.eval.low_acceptance import no_better_than_random
from draftsmith.eval.prompts import PromptRows, prompts_fingerprint, time_of
from draftsmith.eval.results import EVALUATION, Evaluation, ServerRow, positions, read_evaluation, series_of
from draftsmith.eval.server.counters import CounterRoutes
from draftsmith.eval.server.measure import ServerRun, measure_in_turns
from draftsmith.eval.settings import ANOTHER, BASELINE, ServedSettings
from draftsmith.heads.model_config import context_limit, vocabulary_of
from draftsmith.metrics import Series, acceptance_at, alpha, few_units, intervals, ratio, speeds, speedup, tau
from draftsmith.provenance import environment
from draftsmith.storage import hold_folder, write_json, write_text, writing
from draftsmith.terminal import interval, markdown

ENGINE = "engine"
"""The policy of a served drafter in `eval.json`: the engine's own."""
JOURNAL = "batches.jsonl"
COLUMNS = ("T", "requests", "tok/s", "ms a token", "tau", "acceptance by position", "alone tok/s", "speedup")


def measure_server(settings: ServedSettings, out: Path, *, overwrite: bool = False) -> Evaluation:
    """Measure a server, and write `report.md` and `eval.json` to `out`, whose results `overwrite` deletes.

    Raises:
        ConfigError: before anything is measured, for settings that cannot be measured, a server of another model, and a
            baseline of other prompts or conditions.
    """
    require_client()
    server, baseline = settings.server, settings.baseline
    rows = PromptRows.read(settings.prompts, settings.subset, settings.split)
    if rows.images:
        raise ConfigError("prompts with images; expected text, which a server is asked with")
    with hold_folder("out", out, discard=(JOURNAL, EVALUATION) if overwrite else ()):
        if (out / EVALUATION).exists():
            raise ConfigError(f"out={out} holds an eval.json; expected {ANOTHER}")
        tokenizer, config = settings.target_section.load_tokenizer()
        template, options = settings.chat_template, settings.template_options
        urls = [server.base_url, *settings.addresses[1:]]
        limits = [context_limit(config), *(served.context for served in served_at(urls, server.model))]
        context = min((limit for limit in limits if limit is not None), default=None)
        now = begun(out / JOURNAL) or datetime.now()
        how = {"chat_template": template, "template_options": options, "now": now, "vocab_size": vocabulary_of(config)}
        prompts, left_out = rows.encode(tokenizer, count=settings.count, context=context, **how)
        chat = Chat(tokenizer, template, options, now=now)
        (name,) = settings.drafters
        identity = {"prompts": prompts_fingerprint(prompts), "drafters": {}}
        run, alone = ServerRun(server, settings, chat, context, prompts), dict[Condition, Series]()
        grid = Grid[ServedCell](prompts, settings, Journal(out / JOURNAL), turns=False)
        runs = {name: run}
        if is_address(baseline):
            runs[BASELINE[0]] = replace(run, server=server.model_copy(update={"url": baseline}))
        elif baseline is not None:
            alone = _stored_baseline(baseline, grid, identity["prompts"])
        measure_in_turns(runs, grid, {"prompts": identity["prompts"], "servers": urls, **time_of(prompts)})
        if len(runs) > 1:
            alone = {at: series_of(grid.cells(BASELINE, *at), grid.units(at[1])) for at in grid.conditions}
        result = _evaluation(grid, name, alone, identity, server.base_url)
        result = replace(result, notes=[*left_out, *run.notes, *result.notes])
        with writing(out, KEPT):
            write_text(out / "report.md", _markdown(result))
            write_json(out / EVALUATION, result.as_json())
        (out / JOURNAL).unlink()
        return result


def _stored_baseline(baseline: str, grid: Grid[ServedCell], prompts: str) -> dict[Condition, Series]:
    """Return the target alone of an `eval.json`, under every condition; `prompts`: their fingerprint."""
    stored = read_evaluation(Path(baseline))
    if stored["identity"].get("prompts") != prompts:
        raise ConfigError(f"baseline={baseline} has other prompts; expected those of {grid.settings.prompts}")
    if "server" not in stored:
        raise ConfigError(f"baseline={baseline} was not measured on a server; expected the result of `eval server`")
    for key in MATTER_SERVED:
        theirs, ours = stored["settings"].get(key), getattr(grid.settings, key)
        if theirs != ours:
            raise ConfigError(f"baseline={baseline} was measured with {key}={theirs!r}; expected {ours!r}, as here")
    entries = stored["measurements"]
    alone = [entry for entry in entries if entry["drafter"] == BASELINE[0]] or entries
    if any(entry["policy"] == ENGINE for entry in alone):
        raise ConfigError(f"baseline={baseline} was measured on a server that drafts; expected one without a drafter")
    found = {(entry["temperature"], entry["batch_size"]): entry for entry in alone}
    repeats = grid.settings.repeats
    for temperature, concurrency in grid.conditions:
        series = found.get((temperature, concurrency))
        if series is None or series["units"] != grid.units(concurrency) or len(series["tokens"][0]) != repeats:
            raise ConfigError(
                f"baseline={baseline} has no {repeats} repeats of these prompts at T={temperature:g}, concurrency "
                f"{concurrency}; expected a measurement with the same --temperature, --concurrency, --repeats and "
                "--count"
            )
    return found


def _evaluation(
    grid: Grid[ServedCell], name: str, alone: dict[Condition, Series], identity: dict[str, Any], url: str
) -> Evaluation:
    """Return the result; `alone`: the target alone, where it was measured."""
    rows: list[ServerRow] = []
    measurements: list[Series] = []
    measured = [grid.cells((name, ""), *condition) for condition in grid.conditions]
    batches = [cell.numbers for cells in measured for cell in cells]
    counted = any(numbers.drafts for numbers in batches)
    for condition, cells in zip(grid.conditions, measured, strict=True):
        series, base = series_of(cells, grid.units(condition[1])), alone.get(condition)
        series["policy"] = ENGINE if counted else ""
        rows.append(server_row(series, base, cells, seed=grid.settings.seed, counted=counted))
        measurements += [series] if base is None else [series, {**base, "drafter": BASELINE[0], "policy": BASELINE[1]}]
    unread = None if counted else grid.journal.facts[COUNTED][name]
    return Evaluation(
        grid.settings,
        rows=[],
        environment=environment(),
        notes=[*_notes(url, measurements, unread), *_lost(rows), *_undetermined(batches)],
        measurements=measurements,
        identity=identity,
        server=rows,
    )


def server_row(
    spec: Series, base: Series | None, cells: Sequence[ServedCell], *, seed: int, counted: bool
) -> ServerRow:
    """Return the row of a condition; `counted`: whether the engine counts drafts, so that tau is known."""
    texts_U1 = np.array([[len(unit)] for unit in spec["units"]])  # the last batch may hold fewer than the others
    seconds_R, bounds = (texts_U1 * spec["seconds"]).sum(0), intervals(base, spec, seed)
    return {
        "temperature": spec["temperature"],
        "concurrency": spec["batch_size"],
        "prompts": sum(map(len, spec["units"])),
        "tokens_per_second": float(np.median(speeds(spec))),
        "milliseconds_per_token": 1000 * float(np.median(ratio(seconds_R, np.sum(spec["tokens"], 0)))),
        "alpha": alpha(spec["overlap"], spec["overlaps"]) if counted and np.any(spec["overlaps"]) else None,
        "tau": tau(spec["tokens"], spec["rounds"]) if counted else None,
        "tau_interval": bounds["tau_interval"] if counted else None,
        "acceptance_at": acceptance_at(positions(cells)),
        "baseline_tokens_per_second": None if base is None else float(np.median(speeds(base))),
        "speedup": None if base is None else speedup(base, spec),
        "speedup_interval": bounds["speedup_interval"],
        "turns_left_out": sum(count for cell in cells for _, count in cell.numbers.left_out),
    }


def _notes(url: str, measurements: list[Series], unread: str | None) -> list[str]:
    """Return notes on all rows; `unread`: why the server's counters are not known, None where it counts drafts."""
    found = [
        "Seconds are those of whole requests, prefill and network included, without other requests to the servers."
    ]
    found += few_units(series["units"] for series in measurements)
    if unread is not None:
        found.append(
            "The server's metrics count no drafts: it does not speculate, or its metrics are off (SGLang: "
            f"--enable-metrics, llama-server: --metrics{unread and f'; /metrics: {unread}'}), so tau and acceptance "
            "are not known."
        )
        own = CounterRoutes(url).sglang_tau()
        if own is not None:
            found.append(f"SGLang's own mean acceptance length since its start is {own:.2f}.")
    return found


def _undetermined(batches: Sequence[Numbers]) -> list[str]:
    """Return notes on draft positions whose acceptance is not known, and on turns that were not asked."""
    notes = list[str]()
    unknown = [batch for batch in batches if not batch.lengths_known]
    if unknown:
        counts = [batch.drafted for batch in unknown if batch.drafted is not None]
        mean = sum(counts) / sum(batch.drafts for batch in unknown)
        most = max(len(batch.accepted) for batch in unknown)
        why = "The server does not count draft tokens" if len(counts) < len(unknown) else "Drafts differ in length"
        shown = "" if len(counts) < len(unknown) else f" ({mean:.2f} draft tokens on average, at most {most})"
        notes.append(f"{why}{shown}: acceptance after the first position, and alpha, are not known where that is so.")
    left_out = Counter[str]()
    for batch in batches:
        left_out.update(dict(batch.left_out))
    notes += [
        f"{count:,} later turns were left out, since answers before them {reason}."
        for reason, count in left_out.most_common()
    ]
    return notes


def _lost(rows: list[ServerRow]) -> list[str]:
    """Return a note for each condition in which drafts are no better than random tokens."""
    said = [(row, no_better_than_random(row["acceptance_at"], row["tau"])) for row in rows]
    return [f"T={row['temperature']:g}, {row['concurrency']} requests: {text}" for row, text in said if text]


def server_table(result: Evaluation) -> Table:
    """Return the rows as a table."""
    table = Table(title="The served drafter (95 % intervals below)", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in result.server:
        table.add_row(*(f"{value}\n{bounds}" if bounds else value for value, bounds in _cells(row)))
    return table


def _cells(row: ServerRow) -> list[tuple[str, str]]:
    """Return each column's text and its interval."""
    alone, gain = row["baseline_tokens_per_second"], row["speedup"]
    return [
        (f"{row['temperature']:g}", ""),
        (str(row["concurrency"]), ""),
        (f"{row['tokens_per_second']:.0f}", ""),
        (f"{row['milliseconds_per_token']:.1f}", ""),
        ("" if row["tau"] is None else f"{row['tau']:.2f}", interval(row["tau_interval"], 2)),
        (" ".join(f"{share:.2f}" for share in row["acceptance_at"]), ""),
        ("" if alone is None else f"{alone:.0f}", ""),
        ("" if gain is None else f"{gain:.2f}x", interval(row["speedup_interval"], 2)),
    ]


def _markdown(result: Evaluation) -> str:
    (name, address), settings = *result.settings.drafters.items(), result.settings
    lines = [f"# {markdown(name)} on a server", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in result.server:
        cells = (f"{value} {bounds}".strip() for value, bounds in _cells(row))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {markdown(note)}" for note in result.notes), "", "## Conditions", "", "| | |", "|---|---|"]
    where = environment()
    conditions = {
        "server": address,
        "target": settings.target,
        "prompts": f"{settings.prompts}, at most {settings.max_new_tokens} new tokens a turn",
        "repeats": str(settings.repeats),
        "date, command": f"{where['date']}, {where['command']}",
    }
    lines += [f"| {key} | {markdown(value)} |" for key, value in conditions.items()]
    return "\n".join(lines) + "\n"
