"""Plots of a report and of training, in the colours of Okabe and Ito; each title says what the plot shows."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter, StrMethodFormatter

from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import ResultRow, short_policy
from draftsmith.metrics import often_tested
from draftsmith.terminal import printable

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

mpl.use("Agg")


T = TypeVar("T")
Rows = Sequence[ResultRow]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7B4173", "#7F7F7F")
MARKERS = "osD^vPX*<>"
LINES = ("-", "--", ":", "-.")
STYLE: "dict[RcKeyType, Any]" = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.titlesize": 11,
    "figure.facecolor": "white",
    "text.parse_math": False,
}
LONGEST_NAME = 34


@dataclass(frozen=True)
class Plot:
    """A figure, the stem of its file name, and a title that says what it shows."""

    name: str
    title: str
    figure: Figure

    @property
    def file(self) -> str:
        return f"{self.name}.png"

    @cached_property
    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
        return buffer.getvalue()

    @property
    def data_uri(self) -> str:
        """Return the image as a data URI, so that a page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def arm_name(row: ResultRow, rows: Rows) -> str:
    """Return drafter, policy, temperature and, if `rows` have several, batch size."""
    policy = short_policy(row["policy"])
    alike = {other["policy"] for other in rows if other["drafter"] == row["drafter"]}
    if sum(short_policy(other) == policy for other in alike) > 1:
        policy = row["policy"]
    parts = [cut(row["drafter"]), cut(policy), f"T={row['temperature']:g}"]
    if len({other["batch_size"] for other in rows}) > 1:
        parts.append(f"batch {row['batch_size']}")
    return ", ".join(parts)


def cut(name: str) -> str:
    """Return a printable name, shortened to `LONGEST_NAME` characters."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def colour_of(key: str, keys: list[str]) -> str:
    """Return the colour of `key`, one of `keys`; colours repeat after ten."""
    return COLOURS[keys.index(key) % len(COLOURS)]


def distinct(values: Iterable[T]) -> list[T]:
    """Return the values in order of their first appearance."""
    return list(dict.fromkeys(values))


BAR = 0.36
"""Height of a horizontal bar in inches."""
MOST_VARIANTS = 24
"""In a plot with a bar for each; tables have all of them."""


def evaluation_plots(rows: Rows) -> list[Plot]:
    """Return the plots of these rows, without those that would have no more than one point per line."""
    overall = [row for row in rows if row["category"] == OVERALL]
    with plt.rc_context(STYLE):
        shown = sorted(overall, key=lambda row: row["speedup"], reverse=True)[:MOST_VARIANTS]
        shown = [row for row in overall if row in shown]
        part = "" if len(shown) == len(overall) else f" (the {len(shown)} fastest of {len(overall)} arms)"
        plots = [plot_speedup(shown, part)]
        if any(len(row["acceptance_at"]) > 1 for row in overall):
            plots.append(plot_acceptance(overall))
        for axis in AXES:
            lines = lines_over(overall, axis)
            if any(len(line) > 1 for line in lines.values()):
                plots.append(plot_over(lines, axis, distinct(row["drafter"] for row in overall)))
    return plots


def plot_speedup(rows: Rows, part: str) -> Plot:
    """Plot a bar per arm with its 95 % interval, and a line at the target alone."""
    best = max(rows, key=lambda row: row["speedup"])
    title = f"{best['drafter']} decodes {best['speedup']:.2f}x as fast as the target alone at T={best['temperature']:g}"
    names = distinct(row["drafter"] for row in rows)
    figure, axis = plt.subplots(figsize=(8, 1.4 + BAR * len(rows)))
    for line, row in enumerate(rows):
        low, high = row["speedup_interval"] or (row["speedup"], row["speedup"])
        axis.barh(line, row["speedup"], height=0.7, color=colour_of(row["drafter"], names))
        axis.hlines(line, low, high, color="black", linewidth=1.4)
        axis.annotate(f"{row['speedup']:.2f}x", (max(high, row["speedup"]), line), (5, 0), va="center", **OFFSET)
    axis.axvline(1, color="black", linewidth=1, linestyle="--", label="target alone")
    axis.set_yticks(range(len(rows)), [arm_name(row, rows) for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(1, *((row["speedup_interval"] or [0, row["speedup"]])[1] for row in rows)))
    axis.set_xlabel("speedup (ratio of tokens/s), 95 % interval")
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1))
    return _done(figure, "speedup", title + part)


OFFSET = {"textcoords": "offset points", "fontsize": 8}


def plot_acceptance(rows: Rows) -> Plot:
    """Plot, in a panel per drafter, acceptance by draft position, given that all before it were accepted."""
    rows = [row for row in rows if row["acceptance_at"]]
    names = distinct(row["drafter"] for row in rows)
    figure, axes = _panels(len(names), width=4.3, height=3.4)
    for name, axis in zip(names, axes, strict=True):
        own = [row for row in rows if row["drafter"] == name and row["batch_size"] == rows[0]["batch_size"]]
        policies = distinct(row["policy"] for row in own)
        temperatures = distinct(row["temperature"] for row in own)
        for row in own:
            accepted = often_tested(row)
            axis.plot(
                range(1, len(accepted) + 1),
                accepted,
                color=colour_of(row["policy"], policies),
                linestyle=LINES[temperatures.index(row["temperature"]) % len(LINES)],
                marker=MARKERS[policies.index(row["policy"]) % len(MARKERS)],
                markersize=4,
                label=f"{short_policy(row['policy'])}, T={row['temperature']:g}",
            )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlim(left=max(0.5, axis.get_xlim()[0]))  # there is no position 0
        axis.set_ylim(0, 1.03)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_title(cut(name), fontsize=10)
        axis.set_xlabel("draft position")
        if own:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=1 + len(own) // 13)
    axes[0].set_ylabel("accepted")
    return _done(figure, "acceptance", "Acceptance by draft position, given that all before it were accepted")


Axis = Literal["draft_length", "batch_size"]
AXES: dict[Axis, str] = {"draft_length": "γ", "batch_size": "batch size"}
"""Keys of a row over which the speedup is plotted, and the labels of the axes."""
Lines = dict[tuple[str, float], list[ResultRow]]
"""By drafter and temperature."""


def lines_over(rows: Rows, key: Axis) -> Lines:
    """Return the rows of each line of `plot_over`, sorted by `key`.

    Over gamma, chains at the first batch size; over the batch size, each drafter's fastest policy.
    """
    if key == "draft_length":
        rows = [row for row in rows if row["batch_size"] == rows[0]["batch_size"]]
    else:
        rows = _fastest_policies(rows)
    lines: Lines = {}
    for row in rows:
        if row[key] is not None:
            lines.setdefault((row["drafter"], row["temperature"]), []).append(row)
    return {name: sorted(line, key=lambda row: row[key] or 0) for name, line in lines.items()}


def plot_over(lines: Lines, key: Axis, names: list[str]) -> Plot:
    """Plot the speedup over gamma or batch size; bands are intervals.

    `names`: all drafters, so that each has the same colour in every plot.
    """
    temperatures = distinct(temperature for _, temperature in lines)
    figure, axis = plt.subplots(figsize=(6.2, 3.8))
    for (drafter, temperature), line in lines.items():
        kind, colour = temperatures.index(temperature), colour_of(drafter, names)
        values, speedups = [row[key] or 0 for row in line], [row["speedup"] for row in line]
        policy = "" if key == "draft_length" else f", {short_policy(line[0]['policy'])}"
        style, marker = LINES[kind % len(LINES)], MARKERS[kind % len(MARKERS)]
        label = f"{cut(drafter)}{policy}, T={temperature:g}"
        axis.plot(values, speedups, color=colour, linestyle=style, marker=marker, markersize=4, label=label)
        bounds = [row["speedup_interval"] for row in line if row["speedup_interval"]]
        if len(lines) <= 6 and len(bounds) == len(line):
            low, high = zip(*bounds, strict=True)
            axis.fill_between(values, low, high, color=colour, alpha=0.12, linewidth=0)
    axis.axhline(1, color="black", linewidth=1, linestyle="--")
    axis.set_xticks(sorted({row[key] or 0 for line in lines.values() for row in line}))
    axis.set_xlabel(AXES[key])
    axis.set_ylabel("speedup")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), ncols=1 + len(lines) // 17)
    return _done(figure, f"over_{key}", f"Speedup over {AXES[key]}")


def _fastest_policies(rows: Rows) -> Rows:
    """Return the rows of each drafter's policy with the highest speedup."""
    best: dict[str, ResultRow] = {}
    for row in rows:
        if row["drafter"] not in best or row["speedup"] > best[row["drafter"]]["speedup"]:
            best[row["drafter"]] = row
    return [row for row in rows if row["policy"] == best[row["drafter"]]["policy"]]


def _panels(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return `count` axes, at most three in a row."""
    columns = min(count, 3)
    down = -(-count // columns)
    figure, grid = plt.subplots(down, columns, figsize=(width * columns, height * down), squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _done(figure: Figure, name: str, title: str) -> Plot:
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    plt.close(figure)  # the figure is saved later; pyplot would keep it in memory
    return Plot(name, title, figure)


def training_plots(runs: dict[str, list[dict[str, Any]]]) -> list[Plot]:
    """Return the plot of how drafters were trained; none where no run has logged two steps."""
    logged = [sum("loss" in row for row in metrics) for metrics in runs.values()]
    return [plot_training(runs)] if max(logged, default=0) > 1 else []


def plot_training(runs: dict[str, list[dict[str, Any]]]) -> Plot:
    """Plot loss, alpha and tau over the steps; `runs` holds the rows of `metrics.jsonl` by drafter."""
    estimated = any(row.get("evaluation", {}).get("estimated") for metrics in runs.values() for row in metrics)
    tau, texts = ("estimated tau", "held-out answers") if estimated else ("measured tau", "held-out prompts, decoded")
    title = f"Training: loss, agreement with the target, and {tau}"
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
        for number, (name, metrics) in enumerate(runs.items()):
            colour = COLOURS[number % len(COLOURS)]
            steps = [row for row in metrics if "loss" in row]
            evaluations = [row for row in metrics if "evaluation" in row]
            left.plot([row["step"] for row in steps], [row["loss"] for row in steps], color=colour, label=name)
            validated = [row for row in evaluations if "validation" in row]
            if validated:
                losses = [row["validation"]["loss"] for row in validated]
                left.plot([row["step"] for row in validated], losses, "--o", color=colour, label=f"{name}, validation")
            for k in range(max((len(row["alpha"]) for row in steps), default=0)):
                label = name if k == 0 else None
                shown = [row for row in steps if len(row["alpha"]) > k]
                alphas = [row["alpha"][k] for row in shown]
                middle.plot([row["step"] for row in shown], alphas, color=colour, alpha=1 / (1 + 0.7 * k), label=label)
            taus = [row["evaluation"]["tau"] for row in evaluations]
            right.plot([row["step"] for row in evaluations], taus, "-o", color=colour, label=name)
        for axis, label in (
            (left, "loss (nats per token)"),
            (middle, "alpha on target samples"),
            (right, tau),
        ):
            axis.set_xlabel("step")
            axis.set_ylabel(label)
            axis.legend(fontsize=8)
        left.set_yscale("log")
        left.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for formatted in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            formatted(StrMethodFormatter("{x:g}"))  # the default writes formulas, which `STYLE` shows as text
        middle.set_title("fainter: later draft positions", fontsize=9)
        right.set_title(texts, fontsize=9)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
    plt.close(figure)
    return Plot("training", title, figure)
