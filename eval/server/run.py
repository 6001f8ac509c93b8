"""`draftsmith eval server`: validate, measure one or two servers, and write the report."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.load_target import load_tokenizer
from draftsmith.distill.server.settings import ServerSection, require_client
from draftsmith.errors import ConfigError
from draftsmith.eval.compare import MATTER_SERVED
from draftsmith.eval.evaluation import EVALUATION, read_evaluation
from draftsmith.eval.journal import SCHEMA
from draftsmith.eval.metrics import (
    Draws,
    Series,
    acceptance_at,
    alpha,
    few_units,
    percentiles,
    ratio,
    resampled_speedups,
    resampled_taus,
    speeds,
    speedup,
    tau,
)
from draftsmith.eval.prompts import PromptRows, prompts_fingerprint
from draftsmith.eval.report import interval
from draftsmith.eval.results import ServerRow, StoredMeasurement
from draftsmith.eval.server.measure import BatchJournal, Condition, Measured, ServerRun, measure_in_turns
from draftsmith.eval.settings import BASELINE, Settings, require_valid
from draftsmith.heads.model_config import context_limit
from draftsmith.locks import hold_folder
from draftsmith.provenance import environment, fingerprint
from draftsmith.safe_text import markdown
from draftsmith.storage import write_json, write_text, writing

ENGINE = "engine"
"""The policy of a served drafter in `eval.json`: the engine's own."""
KEPT = "the batches are kept; with enough space, the same command writes the report"
JOURNAL = "batches.jsonl"
COLUMNS = ("T", "requests", "tok/s", "ms a token", "tau", "acceptance by position", "alone tok/s", "speedup")


@dataclass(frozen=True)
class ServerMeasurement:
    """The content of `eval.json` of served drafters; its `measurements` are those of a local one."""

    settings: Settings
    rows: list[ServerRow]
    notes: list[str]
    identity: dict[str, Any]
    measurements: list[StoredMeasurement]

    def as_json(self) -> dict[str, Any]:
        """Return the content of `eval.json`. `rows`, those of decoding in this process, are empty."""
        return {
            "schema": SCHEMA,
            "settings": asdict(self.settings),
            "rows": [],
            "server": self.rows,
            "environment": environment(),
            "notes": self.notes,
            "guards": [],
            "measurements": self.measurements,
            "identity": self.identity,
        }


def measure_server(
    server: ServerSection, settings: Settings, out: Path, *, baseline: str | None, trust_remote_code: bool = False
) -> ServerMeasurement:
    """Measure a server, and write `report.md` and `eval.json` to `out`.

    Args:
        settings: those of a local measurement; `batch_sizes` are the numbers of requests at a time.
        baseline: the address of a server of the target without a drafter, or an `eval.json` with such a measurement.

    Raises:
        ConfigError: before anything is measured, for settings that cannot be measured, a server of another model, and a
            baseline of other prompts or conditions.
    """
    rows = _validated(server, settings, out)
    with hold_folder("out", out):
        if (out / EVALUATION).exists():
            raise ConfigError(f"out={out} holds an eval.json; expected another folder")
        tokenizer, config = load_tokenizer(settings.target, trust_remote_code=trust_remote_code)
        context, template, options = context_limit(config), settings.chat_template, settings.template_options
        prompts = rows.encode(
            tokenizer, count=settings.count, context=context, chat_template=template, template_options=options
        )
        chat = Chat(tokenizer, template, options)
        (name,) = settings.drafters
        identity = {"prompts": prompts_fingerprint(prompts), "drafters": {}}
        run, alone = ServerRun(server, settings, chat, context, prompts), dict[Condition, Series]()
        runs, urls = {name: run}, [server.base_url]
        if baseline is not None and baseline.startswith(("http://", "https://")):
            runs[BASELINE[0]] = replace(run, server=server.model_copy(update={"url": baseline}))
            urls.append(baseline)
        elif baseline is not None:
            alone = _stored_baseline(baseline, run, identity["prompts"])
        key = fingerprint([asdict(settings), server.sampling, urls, identity["prompts"]])
        found = measure_in_turns(runs, BatchJournal(out / JOURNAL, key))
        measured = found.pop(name)
        for other in found.values():
            alone = {place: each.series for place, each in other.conditions.items()}
        result = _measurement(settings, name, measured, alone, identity)
        with writing(out, KEPT):
            write_text(out / "report.md", _markdown(result))
            write_json(out / EVALUATION, result.as_json())
        (out / JOURNAL).unlink()
        return result


def _validated(server: ServerSection, settings: Settings, out: Path) -> PromptRows:
    require_client()
    if not isinstance(server.url, str):
        raise ConfigError.of("server", server.url, "one address: counters belong to one server")
    counts = {"count": [settings.count], "max_new_tokens": [settings.max_new_tokens], "repeats": [settings.repeats]}
    sizes = {"concurrency": settings.batch_sizes}
    require_valid(settings, counts={**sizes, **counts}, unique=sizes, out=out)
    rows = PromptRows.read(settings.prompts, settings.subset, settings.split)
    if rows.images:
        raise ConfigError("prompts with images; expected text, which a server is asked with")
    return rows


def _stored_baseline(baseline: str, run: ServerRun, prompts: str) -> dict[Condition, Series]:
    """Return the target alone of an `eval.json`, under every condition of `run`; `prompts`: their fingerprint."""
    stored = read_evaluation(Path(baseline))
    if stored["identity"].get("prompts") != prompts:
        raise ConfigError(f"baseline={baseline} has other prompts; expected those of {run.settings.prompts}")
    if "server" not in stored:
        raise ConfigError(f"baseline={baseline} was not measured on a server; expected the result of `eval server`")
    for key in MATTER_SERVED:
        theirs, ours = stored["settings"].get(key), getattr(run.settings, key)
        if theirs != ours:
            raise ConfigError(f"baseline={baseline} was measured with {key}={theirs!r}; expected {ours!r}, as here")
    entries = stored["measurements"]
    alone = [entry for entry in entries if entry["drafter"] == BASELINE[0]] or entries
    if any(entry["policy"] == ENGINE for entry in alone):
        raise ConfigError(f"baseline={baseline} was measured on a server that drafts; expected one without a drafter")
    found = {(entry["temperature"], entry["batch_size"]): Series.from_json(entry) for entry in alone}
    for place in run.conditions:
        units, repeats = run.units(place[1]), run.settings.repeats
        if place not in found or found[place].units != units or found[place].tokens.shape[1] != repeats:
            raise ConfigError(
                f"baseline={baseline} has no {repeats} repeats of these prompts at T={place[0]:g}, concurrency "
                f"{place[1]}; expected a measurement with the same --temperature, --concurrency, --repeats and --count"
            )
    return found


def _measurement(
    settings: Settings, name: str, measured: Measured, alone: dict[Condition, Series], identity: dict[str, Any]
) -> ServerMeasurement:
    rows: list[ServerRow] = []
    entries: list[StoredMeasurement] = []
    for place, each in measured.conditions.items():
        base = alone.get(place)
        row = _row(place, each.series, base, settings.seed, measured)
        row["acceptance_at"] = acceptance_at([(each.tested_at, each.accepted_at)])
        rows.append(row)
        entries.append(_entry((name, ENGINE) if measured.counted else (name, ""), place, each.series))
        if base is not None:
            entries.append(_entry(BASELINE, place, base))
    return ServerMeasurement(settings, rows, _notes(measured), identity, entries)


def _entry(arm: tuple[str, str], place: Condition, series: Series) -> StoredMeasurement:
    return {"drafter": arm[0], "policy": arm[1], "temperature": place[0], "batch_size": place[1], **series.as_json()}


def _row(place: Condition, spec: Series, base: Series | None, seed: int, measured: Measured) -> ServerRow:
    units, repeats = spec.tokens.shape
    texts_U1 = np.array([[len(unit)] for unit in spec.units])  # the last batch may hold fewer than the others
    draws = Draws.of(units, repeats, np.random.default_rng(seed)) if units > 1 else None
    counted = measured.counted
    row: ServerRow = {
        "temperature": place[0],
        "concurrency": place[1],
        "prompts": sum(map(len, spec.units)),
        "tokens_per_second": float(np.median(speeds(spec))),
        "milliseconds_per_token": 1000 * float(np.median(ratio((texts_U1 * spec.seconds).sum(0), spec.tokens.sum(0)))),
        "alpha": alpha(spec) if counted and spec.overlaps.any() else None,
        "tau": tau(spec) if counted else None,
        "tau_interval": percentiles(resampled_taus(spec, draws)) if counted and draws else None,
        "acceptance_at": [],
        "baseline_tokens_per_second": None,
        "speedup": None,
        "speedup_interval": None,
    }
    if base is not None:
        row["baseline_tokens_per_second"] = float(np.median(speeds(base)))
        row["speedup"] = speedup(base, spec)
        row["speedup_interval"] = percentiles(resampled_speedups(base, spec, draws)) if draws else None
    return row


def _notes(measured: Measured) -> list[str]:
    found = [
        "Seconds are those of whole requests, prefill and network included, without other requests to the servers."
    ]
    found += few_units(each.units for each in measured.conditions.values())
    if not measured.counted:
        found.append(
            "The server's metrics count no drafts: it does not speculate, or its metrics are off (SGLang: "
            "--enable-metrics, llama-server: --metrics), so tau and acceptance are not known."
        )
    if measured.sglang_tau is not None:
        found.append(f"SGLang's own mean acceptance length since its start is {measured.sglang_tau:.2f}.")
    return found


def server_table(result: ServerMeasurement) -> Table:
    """Return the rows as a table."""
    table = Table(title="The served drafter (95 % intervals below)", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in result.rows:
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


def _markdown(result: ServerMeasurement) -> str:
    (name, address), settings = *result.settings.drafters.items(), result.settings
    lines = [f"# {markdown(name)} on a server", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in result.rows:
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
