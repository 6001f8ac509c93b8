"""`draftsmith forecast`: validate, load, forecast, and print."""

from dataclasses import replace
from pathlib import Path

from rich.table import Table

from draftsmith.decode.arguments import capabilities
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.eval.forecast.forecast import PLAIN, BestPolicy, Forecast, forecast
from draftsmith.eval.forecast.profile import TARGET, profile_values, read_profile
from draftsmith.eval.prompts import PromptRows
from draftsmith.eval.session import Session, load_session
from draftsmith.eval.settings import ForecastSettings
from draftsmith.option_fields import check_options
from draftsmith.storage import hold_folder, write_json, writing
from draftsmith.terminal import Terminal

IN_FORECAST = "the results are in forecast.json"


def run(settings: ForecastSettings, out: Path) -> Forecast:
    """Check what the settings name, load the models, forecast, and write `forecast.json` to `out`."""
    check_options(settings)
    hardware = None if settings.profile is None else read_profile(settings.profile)
    rows = PromptRows.read(settings.prompts)
    if rows.images:
        raise ConfigError(f"prompts={settings.prompts} have images; expected prompts of text alone for a forecast")
    with hold_folder("out", out):
        session = load_session(settings, rows)
        _require_shared_passes(session, settings)
        ids = [prompt.input_ids for prompt in session.prompts]
        predicted = forecast(session.target, session.drafters, ids, settings, hardware, progress=True)
        measured = predicted.hardware[settings.temperatures[0]]
        predicted = replace(predicted, notes=[*session.notes, *predicted.notes])
        _write(predicted, out)
        if settings.save_profile is not None:
            with writing(settings.save_profile, IN_FORECAST):
                write_json(settings.save_profile, profile_values(measured))
        return predicted


def _require_shared_passes(session: Session, settings: ForecastSettings) -> None:
    """Raise ConfigError for batches, if the target or a draft model does not read several texts in one pass."""
    for drafter in session.drafters.values() if max(settings.batch_sizes) > 1 else ():
        for model in capabilities(session.target, drafter):
            if model.no_ragged:
                expected = f"1: model_type={model.kind!r} decodes the texts of a batch one after another"
                raise ConfigError.of("batch_size", max(settings.batch_sizes), expected)


def _write(predicted: Forecast, out: Path) -> None:
    """Write `forecast.json`; if that fails, print the forecast before the error."""
    try:
        with writing(out / "forecast.json", "the results are printed above"):
            write_json(out / "forecast.json", predicted.as_json())
    except DraftsmithError:
        show(predicted, None)
        raise


def show(predicted: Forecast, out: Path | None) -> None:
    """Print the tables, the best policies, the notes and the place of the file."""
    console = Terminal.for_tables()
    for batch in predicted.settings.batch_sizes:
        console.print(forecast_table(predicted, batch))
        console.print(verification_line(predicted, batch))
    for best in predicted.best:
        console.print(best_line(best))
    for note in predicted.notes:
        console.print(f"note: {note}")
    if out is not None:
        console.print(f"forecast: {out / 'forecast.json'}")


def forecast_table(predicted: Forecast, batch: int) -> Table:
    """Return a table with one line per drafter, temperature and policy."""
    timings = {entry["timings"] for row in predicted.rows for entry in row["speed"]}
    over = f"; of speedups also over {min(timings)} timings" if timings and min(timings) > 1 else ""
    table = Table(title=f"Forecast at batch size {batch}, intervals over texts{over}", pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for name in ("T", "tau", "95 %", "speedup", "95 %", "tok/s"):
        table.add_column(name, justify="right")
    for row in predicted.rows:
        speed = next(entry for entry in row["speed"] if entry["batch_size"] == batch)
        table.add_row(
            f"{row['drafter']} {row['policy']}",
            f"{row['temperature']:g}",
            f"{row['tau']:.2f}",
            "{:.2f}-{:.2f}".format(*row["tau_interval"]),
            f"{speed['speedup']:.2f}x",
            "{:.2f}-{:.2f}".format(*speed["speedup_interval"]),
            f"{speed['tokens_per_second']:.0f}",
        )
    return table


def verification_line(predicted: Forecast, batch: int) -> str:
    """Return the cost of a target forward pass by width, which bounds the speedup of any drafter."""
    temperature, profile = next(iter(predicted.hardware.items()))
    hardware = profile[TARGET]
    widths = sorted({width for curve in hardware.verify.values() for width in curve if width > 1})
    alone = hardware.token_seconds(batch)
    costs = ", ".join(f"{width} tokens {hardware.verify_seconds(width, batch) / alone:.2f}" for width in widths)
    return f"verification, relative to one target forward pass at T={temperature:g}, batch size {batch}: {costs}"


def best_line(best: BestPolicy) -> str:
    """Return the best drafter and policy of one condition in a sentence."""
    where = f"best at T={best['temperature']:g}, batch size {best['batch_size']}:"
    if best["drafter"] is None:
        why = f": {best['why']}" if "why" in best else ""
        return f"{where} the target alone; no drafter is forecast to be faster{why}"
    low, high = best["speedup_interval"]
    policy = "" if best["policy"] == PLAIN else f" with {best['policy']}"
    return f"{where} {best['drafter']}{policy}, {best['speedup']:.2f}x ({low:.2f} to {high:.2f}), tau {best['tau']:.2f}"
