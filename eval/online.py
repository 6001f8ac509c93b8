"""`draftsmith eval --learn`: a drafter that learns beside its frozen copy and the target alone, by tokens served."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from typing_extensions import TypedDict

from draftsmith.decode.observer import Observer
from draftsmith.errors import ConfigError
from draftsmith.eval.metrics import Draws, Series, percentiles, ratio
from draftsmith.eval.plots import COLOURS, STYLE, Plot
from draftsmith.eval.settings import Settings

# Shapes: U requests, A arms (the target alone, the frozen drafter, the learning drafter), S resamples.

ARMS = ("target alone", "frozen", "learning")
WINDOWS, LEAST = 6, 5
"""Windows of a report, and requests of each at least."""
ROOM = 1.08
"""Height of a plot relative to its highest value, so that no marker is cut off."""


class Learner(Observer, Protocol):
    """Trains a drafter while it decodes, as `draftsmith.OnlineLearning` does."""

    seconds: float
    """Time that learning has taken."""
    adopted: int
    """Updates in use."""

    @property
    def recalled(self) -> int:
        """Rounds whose draft came from earlier texts."""
        ...

    def summary(self) -> str:
        """Return one line on what was learned."""
        ...


class Window(TypedDict):
    """The arms over some requests; gains are those of learning over frozen, with paired intervals."""

    first: int
    last: int
    tokens_served: int
    """Decoded tokens of the learning arm up to the last request."""
    tau: list[float]
    """Of frozen and learning."""
    tau_gain: float
    tau_gain_interval: list[float] | None
    tokens_per_second: list[float]
    """Of the target alone, frozen and learning, with the time of learning."""
    gain: float
    gain_interval: list[float] | None


class Online(TypedDict):
    """The section `online` of `eval.json`."""

    drafter: str
    windows: list[Window]
    total: Window
    broke_even: int | None
    """Request from which on the learning arm has more tokens per second since the first request than frozen."""
    adopted: int
    recalled: int
    """Rounds of the learning arm whose draft came from earlier texts."""
    learning_seconds: float
    summary: str


def learning_name(drafter: str) -> str:
    """Return the name of the learning copy of a drafter in tables."""
    return f"{drafter}, learning"


def learning_settings(settings: Settings) -> Settings:
    """Return settings with a learning copy beside the drafter; ConfigError for what does not combine with learning."""
    several = {
        "drafter": [*settings.drafters],
        "temperature": settings.temperatures,
        "gamma or policy": [*settings.draft_lengths, *settings.policies],
    }
    for key, values in several.items():
        if len(values) > 1:
            raise ConfigError(f"learn with {key}={list(values)}; expected one: what is learned depends on the order")
    if settings.repeats != 1:
        raise ConfigError(f"learn with repeats={settings.repeats}; expected 1: a second time, the texts are known")
    if settings.batch_sizes != (1,):
        raise ConfigError(f"learn with batch_size={list(settings.batch_sizes)}; expected 1: requests in their order")
    if settings.compile:
        raise ConfigError("learn with compile=True; expected passes that are not compiled")
    ((name, folder),) = settings.drafters.items()
    policies = tuple(policy.removeprefix(f"{name}=") for policy in settings.policies)  # of both copies
    return replace(settings, drafters={name: folder, learning_name(name): folder}, policies=policies)


def online_result(drafter: str, arms: Sequence[Series], learner: Learner) -> Online:
    """Return windows, totals and the request from which learning was ahead.

    `arms`: series of the target alone, the frozen and the learning drafter, requests in order of arrival.
    """
    tokens_UA, rounds_UA, seconds_UA = (
        np.concatenate([getattr(arm, name) for arm in arms], axis=1) for name in ("tokens", "rounds", "seconds")
    )
    requests = len(tokens_UA)
    edges = np.linspace(0, requests, max(1, min(WINDOWS, requests // LEAST)) + 1).astype(int)
    numbers = tokens_UA, rounds_UA, seconds_UA
    speeds_UA = ratio(tokens_UA.cumsum(0), seconds_UA.cumsum(0))
    slower = np.flatnonzero(speeds_UA[:, 2] < speeds_UA[:, 1])
    faster_from = int(slower[-1]) + 2 if len(slower) else 1  # the request after the last slower one, counted from 1
    return {
        "drafter": drafter,
        "windows": [_window(int(first), int(last), *numbers) for first, last in pairwise(edges)],
        "total": _window(0, requests, *numbers),
        "broke_even": faster_from if (learner.adopted or learner.recalled) and faster_from <= requests else None,
        "adopted": learner.adopted,
        "recalled": learner.recalled,
        "learning_seconds": learner.seconds,
        "summary": learner.summary(),
    }


def _window(first: int, last: int, tokens_UA: NDArray, rounds_UA: NDArray, seconds_UA: NDArray) -> Window:
    part = slice(first, last)
    tau_gain, tau_interval = _gain(tokens_UA[part], rounds_UA[part])
    gain, interval = _gain(tokens_UA[part], seconds_UA[part])
    sums = [values[part].sum(0) for values in (tokens_UA, rounds_UA, seconds_UA)]
    return {
        "first": first + 1,
        "last": last,
        "tokens_served": int(tokens_UA[:last, 2].sum()),
        "tau": ratio(sums[0], sums[1])[1:].tolist(),
        "tau_gain": tau_gain,
        "tau_gain_interval": tau_interval,
        "tokens_per_second": ratio(sums[0], sums[2]).tolist(),
        "gain": gain,
        "gain_interval": interval,
    }


def _gain(above_UA: NDArray, below_UA: NDArray) -> tuple[float, list[float] | None]:
    """Return the ratio of learning to frozen, minus 1, and its interval over requests; both arms are drawn together."""
    values_A = ratio(above_UA.sum(0), below_UA.sum(0))
    gain = float(ratio(values_A[2:], values_A[1:2])[0]) - 1
    if len(above_UA) < 2:
        return gain, None
    draws = Draws.of(len(above_UA), 1, np.random.default_rng(0))
    sums = ((draws.totals(above_UA[:, [a]]), draws.totals(below_UA[:, [a]])) for a in (1, 2))
    frozen, learning = (ratio(above, below, np.nan) for above, below in sums)
    return gain, percentiles(ratio(learning, frozen, np.nan)[:, 0] - 1)


def gain_text(gain: float, interval: list[float] | None) -> str:
    """Format a gain as `+12.0 % [+8.1, +15.9]`."""
    return f"{100 * gain:+.1f} %" + (
        "" if interval is None else " [{:+.1f}, {:+.1f}]".format(*(100 * x for x in interval))
    )


def online_lines(online: Online) -> list[str]:
    """Return what came of learning, in sentences."""
    end, total, place = online["windows"][-1], online["total"], online["broke_even"]
    if not online["adopted"] and not online["recalled"]:
        even = (
            "No update was adopted: both arms have the same weights, and differ by the time of learning and by noise."
        )
    elif place is None:
        even = "Learning did not break even: since the first request, frozen has decoded more tokens/s."
    else:
        even = (
            f"Learning broke even at request {place}: from there on, it has decoded more tokens/s since the first one."
        )
    return [
        even,
        f"At the end (requests {end['first']} to {end['last']}) learning has "
        f"{gain_text(end['tau_gain'], end['tau_gain_interval'])} tau and "
        f"{gain_text(end['gain'], end['gain_interval'])} tokens/s over frozen; over all {total['last']} requests "
        f"{gain_text(total['tau_gain'], total['tau_gain_interval'])} tau and "
        f"{gain_text(total['gain'], total['gain_interval'])} tokens/s.",
        f"It took {online['learning_seconds']:.1f} s, which its tokens/s include; {online['summary']}.",
    ]


TITLES = ("requests", "tokens served", "tau, frozen", "tau, learning", *(f"{arm}, tokens/s" for arm in ARMS), "gain")


def online_cells(online: Online) -> list[list[str]]:
    """Return the rows of the table of windows, as text."""
    return [
        [
            f"{window['first']}-{window['last']}",
            str(window["tokens_served"]),
            *(f"{tau:.2f}" for tau in window["tau"]),
            *(f"{speed:.0f}" for speed in window["tokens_per_second"]),
            gain_text(window["gain"], window["gain_interval"]),
        ]
        for window in [*online["windows"], online["total"]]
    ]


def online_table(online: Online) -> Table:
    """Return the table of windows for a terminal; it fits 110 columns."""
    table = Table(title="Learning beside frozen, by requests (gain: tokens/s, 95 % intervals)", pad_edge=False)
    for title in TITLES:
        table.add_column(title.replace(", ", "\n"), justify="right")
    for cells in online_cells(online):
        table.add_row(*cells)
    return table


def plot_online(online: Online) -> Plot:
    """Plot tau and tokens per second of each window over the tokens served."""
    title = "Learning beside frozen, by tokens served; time of learning included"
    windows = online["windows"]
    served = [window["tokens_served"] for window in windows]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
        for place, arm in enumerate(ARMS):
            colour = COLOURS[place]
            right.plot(
                served, [window["tokens_per_second"][place] for window in windows], "-o", color=colour, label=arm
            )
            if place:
                left.plot(served, [window["tau"][place - 1] for window in windows], "-o", color=colour, label=arm)
        for axis, label in ((left, "tau"), (right, "tokens/s")):
            axis.set_xlabel("tokens served")
            axis.set_ylabel(label)
            axis.set_ylim(0, ROOM * axis.dataLim.y1)
            axis.legend()
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
    plt.close(figure)
    return Plot("online", title, figure)
