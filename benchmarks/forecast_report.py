"""Tables and plots of `benchmarks/forecast.py`, from the cells that it stored."""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table

from draftsmith.eval.plots import COLOURS, STYLE


def cells(options: argparse.Namespace, half: str) -> dict[str, dict[str, Any]]:
    """Read the finished cells of a half, by `drafter|temperature|set`."""
    file = options.out / f"{half}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0; ties get the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    out = np.empty(len(values))
    out[order] = np.arange(len(values))
    for value in np.unique(values):
        out[values == value] = out[values == value].mean()
    return out


def spearman(x: Any, y: Any) -> float:
    return float(np.corrcoef(ranks(np.asarray(x)), ranks(np.asarray(y)))[0, 1])


def relative(rows: list[dict[str, Any]], guess: str, truth: str) -> np.ndarray:
    return np.array([abs(row[guess] / row[truth] - 1) for row in rows])


def report(options: argparse.Namespace) -> None:
    console = Console(width=120)
    done = cells(options, "acceptance")
    if done:
        rows = [row | {"cell": key} for key, cell in done.items() for row in cell["rows"]]
        _acceptance_table(console, rows)
        if options.plots:
            plot_forecast(rows, options.plots / "forecast.png")
    timed = cells(options, "speed")
    if timed:
        _speed_table(console, timed)


def _acceptance_table(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Forecast tau compared with the decoder's, relative error")
    for column in ("cells", "count", "held-out median", "90 %", "noise of the truth", "same texts median", "max"):
        table.add_column(column, justify="right")
    kinds = {"all": rows} | {f"T={t}": [r for r in rows if r["cell"].split("|")[1] == t] for t in ("0", "0.7", "1")}
    drafters = sorted({row["cell"].split("|")[0] for row in rows})
    kinds |= {name: [row for row in rows if row["cell"].startswith(f"{name}|")] for name in drafters}
    for name, subset in kinds.items():
        if not subset:
            continue
        held, same = relative(subset, "tau_forecast", "tau"), relative(subset, "tau_forecast_of_same_texts", "tau")
        noise = float(np.median([2**0.5 * row["noise"] for row in subset]))
        shown = (np.median(held), np.quantile(held, 0.9), noise, np.median(same), same.max())
        table.add_row(name, str(len(subset)), *(f"{100 * value:.2f} %" for value in shown))
    console.print(table)
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault("|".join(row["cell"].split("|")[1:]), []).append(row)
    agree = [spearman([r["tau_forecast"] for r in subset], [r["tau"] for r in subset]) for subset in by_cell.values()]
    console.print(f"Spearman of tau over drafters and policies, by temperature and set: {np.round(agree, 3).tolist()}")


def _speed_table(console: Console, timed: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Forecast speedup compared with the measured one")
    for column in ("setting", "policies", "median error", "Spearman", "best by forecast", "measured best", "regret"):
        table.add_column(column, justify="right")
    errors, agree, regrets = [], [], []
    settings = sorted({key.split("|", 1)[1] for key in timed})
    for setting in settings:
        subset = [
            {**row, "variant": f"{key.split('|')[0]} {row['policy']}"}
            for key, cell in timed.items()
            if key.split("|", 1)[1] == setting
            for row in cell["rows"]
        ]
        error = relative(subset, "speedup_forecast", "speedup")
        chosen = max(subset, key=lambda row: row["speedup_forecast"])
        best = max(subset, key=lambda row: row["speedup"])
        # The target alone is a policy, too: 1x is chosen where no drafter is forecast to be faster.
        got = chosen["speedup"] if chosen["speedup_forecast"] > 1 else 1.0
        regret = 1 - got / max(best["speedup"], 1.0)
        rank = spearman([row["speedup_forecast"] for row in subset], [row["speedup"] for row in subset])
        errors, agree, regrets = [*errors, *error], [*agree, rank], [*regrets, regret]
        cells_ = (
            f"{100 * np.median(error):.1f} %",
            f"{rank:.3f}",
            chosen["variant"],
            best["variant"],
            f"{100 * regret:.1f} %",
        )
        table.add_row(setting, str(len(subset)), *cells_)
    console.print(table)
    console.print(
        f"speedup: median error {100 * np.median(errors):.1f} %; Spearman median {np.median(agree):.3f}; "
        f"regret mean {100 * np.mean(regrets):.1f} %, worst {100 * max(regrets):.1f} %"
    )


def held(row: dict[str, Any], interval: str, *, with_noise: bool) -> bool:
    """Return True if the interval contains the measured speedup, on request up to the measurement's noise."""
    low, high = row[interval]
    if not with_noise:
        return low <= row["speedup"] <= high
    measured_low, measured_high = row["speedup_interval"]
    above = row["speedup"] > row["speedup_forecast"]
    own = high / row["speedup_forecast"] if above else row["speedup_forecast"] / low
    noise = row["speedup"] / measured_low if above else measured_high / row["speedup"]
    apart = abs(np.log(row["speedup"] / row["speedup_forecast"]))
    return bool(apart <= np.hypot(np.log(own), np.log(noise)))


def coverage_table(timed: dict[str, dict[str, Any]]) -> Table:
    """Return a table of the share of measured speedups in each interval, and of the intervals' widths."""
    rows = [{**row, "cell": key} for key, cell in timed.items() for row in cell["rows"] if "interval" in row]
    table = Table(title="Measured speedups in the forecast's 95 % intervals")
    for column in ("cells", "policies", "interval over", "in it", "in it, with measured noise", "half-width", "noise"):
        table.add_column(column, justify="right")
    kinds = {"all": rows} | {f"T={t}": [r for r in rows if r["cell"].split("|")[1] == t] for t in ("0", "0.7", "1")}
    over = {"interval_of_texts": "texts", "interval": "texts and timings", "interval_of_timings": "timings, same texts"}
    for name, (interval, parts) in product(kinds, over.items()):
        subset = [row for row in kinds[name] if row["speedup_interval"] is not None and row.get(interval) is not None]
        if not subset:
            continue
        counts = [f"{np.mean([held(row, interval, with_noise=noise) for row in subset]):.1%}" for noise in (0, 1)]
        if interval == "interval_of_timings":
            counts[1] = ""  # the noise of texts is not in the difference
        widths = [np.median([np.log(row[key][1] / row[key][0]) / 2 for row in subset]) for key in
                  (interval, "speedup_interval")]  # fmt: skip
        table.add_row(name, str(len(subset)), parts, *counts, *(f"{width:.1%}" for width in widths))
    return table


def plot_forecast(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot forecast against measured tau, one point per cell and policy."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5.2, 5))
        for number, name in enumerate(sorted({row["cell"].split("|")[0] for row in rows})):
            subset = [row for row in rows if row["cell"].startswith(f"{name}|")]
            x, y = ([row[key] for row in subset] for key in ("tau_forecast", "tau"))
            axis.scatter(x, y, s=14, color=COLOURS[number % len(COLOURS)], label=name, marker="os^Dv<>P"[number % 8])
        top = 1.05 * max(row["tau"] for row in rows)
        axis.plot([1, top], [1, top], color="black", linewidth=0.8)
        axis.set_xlabel("forecast tau, from other texts")
        axis.set_ylabel("tau of the decoder")
        axis.legend(fontsize=8)
        figure.savefig(path, dpi=90, bbox_inches="tight")
        plt.close(figure)
