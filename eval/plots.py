"""Plots of a report, each titled with what it shows. Colours are Okabe and Ito's, distinguishable by everybody."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 11}


def _overall(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["category"] == "all"]


def _colour(rows: list[dict[str, Any]], drafter: str) -> str:
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    return COLOURS[names.index(drafter) % len(COLOURS)]


def _save(figure: plt.Figure, path: Path, title: str) -> dict[str, str]:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return {"file": path.name, "title": title}


def plot_speedup(rows: list[dict[str, Any]], path: Path) -> dict[str, str]:
    """A bar a drafter and temperature, a stroke from its slowest to its fastest repeat, a line at the target alone."""
    overall = _overall(rows)
    best = max(overall, key=lambda row: row["speedup"])
    title = f"{best['drafter']} decodes {best['speedup']:.2f}x as fast as the target alone at T={best['temperature']:g}"
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.6 + 1.5 * len(overall), 4))
        for place, row in enumerate(overall):
            bar = axis.bar(place, row["speedup"], width=0.65, color=_colour(rows, row["drafter"]))
            axis.bar_label(bar, [f"{row['speedup']:.2f}x"], label_type="center", color="white", fontweight="bold")
            if row["speedup_repeats"]:
                low, high = min(row["speedup_repeats"]), max(row["speedup_repeats"])
                axis.vlines(place, low, high, color="black", linewidth=1.2)
        axis.axhline(1, color="black", linewidth=1, linestyle="--", label="target alone")
        axis.legend(fontsize=9, loc="upper right")
        labels = [f"{row['drafter']}\n{_short(row['policy'])}\nT={row['temperature']:g}" for row in overall]
        axis.set_xticks(range(len(overall)), labels, fontsize=9)
        axis.set_ylabel("speedup (ratio of tokens/s)")
        tallest = max(max(row["speedup_repeats"], default=row["speedup"]) for row in overall)
        axis.set_ylim(0, 1.2 * max(1, tallest))
        axis.grid(axis="x", visible=False)
        axis.set_title(title, fontsize=11, wrap=True)
    return _save(figure, path, title)


def _short(policy: str) -> str:
    """The policy without its settings, but for a chain's length."""
    name, _, settings = policy.partition(":")
    return f"gamma={settings.removeprefix('draft_length=')}" if name == "chain" else name


def plot_acceptance(rows: list[dict[str, Any]], path: Path) -> dict[str, str]:
    """Acceptance at each draft position, given that all before it were accepted."""
    title = "Acceptance by draft position, given that all before it were accepted"
    overall = _overall(rows)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 4))
        for row in overall:
            positions = range(1, len(row["acceptance_at"]) + 1)
            line = "-o" if row["temperature"] == 0 else "--s"
            label = f"{row['drafter']}, {_short(row['policy'])}, T={row['temperature']:g} (tau {row['tau']:.2f})"
            axis.plot(positions, row["acceptance_at"], line, color=_colour(rows, row["drafter"]), label=label)
        longest = max(len(row["acceptance_at"]) for row in overall)
        axis.set_xticks(range(1, longest + 1))
        axis.set_xlabel("draft position")
        axis.set_ylabel("accepted")
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.legend(fontsize=9)
        axis.set_title(title, fontsize=11)
    return _save(figure, path, title)


def plot_training(runs: dict[str, list[dict[str, Any]]], path: Path) -> dict[str, str]:
    """Loss and teacher-forced alpha a step on the left, measured tau on held-out prompts on the right."""
    title = "Training: agreement with the target, and what it is worth when decoding"
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
        for number, (name, metrics) in enumerate(runs.items()):
            colour = COLOURS[number % len(COLOURS)]
            steps = [row for row in metrics if "loss" in row]
            evaluations = [row for row in metrics if "evaluation" in row]
            left.plot([row["step"] for row in steps], [row["loss"] for row in steps], color=colour, label=name)
            for k in range(len(steps[0]["alpha"]) if steps else 0):
                label = name if k == 0 else None
                alphas = [row["alpha"][k] for row in steps]
                middle.plot([row["step"] for row in steps], alphas, color=colour, alpha=1 / (1 + 0.7 * k), label=label)
            taus = [row["evaluation"]["tau"] for row in evaluations]
            right.plot([row["step"] for row in evaluations], taus, "-o", color=colour, label=name)
        for axis, label in (
            (left, "loss (nats per token)"),
            (middle, "alpha on target samples"),
            (right, "measured tau"),
        ):
            axis.set_xlabel("step")
            axis.set_ylabel(label)
            axis.legend(fontsize=8)
        left.set_yscale("log")
        middle.set_title("fainter: later draft positions", fontsize=9)
        right.set_title("held-out prompts, decoded", fontsize=9)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
    return _save(figure, path, title)
