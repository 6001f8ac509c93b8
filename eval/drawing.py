"""What all plots have in common: style, colours, how they are kept. Colours are Okabe and Ito's."""

import base64
import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from draftsmith.safe_text import printable

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7B4173", "#7F7F7F")
MARKERS = "osD^vPX*<>"
LINES = ("-", "--", ":", "-.")
STYLE = {
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
    """A figure, the file that it is kept in, and a title that says what it shows."""

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
        """The image itself as an address, so that a page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def short_policy(policy: str) -> str:
    """The policy without its settings, but for a chain's length."""
    name, _, settings = policy.partition(":")
    return f"γ={settings.removeprefix('draft_length=')}" if name == "chain" else name


def arm_name(row: dict[str, Any], rows: list[dict[str, Any]], *, temperature: bool = True) -> str:
    """Drafter, policy, temperature and batch size, the last only where there are several."""
    policy = short_policy(row["policy"])
    alike = {other["policy"] for other in rows if other["drafter"] == row["drafter"]}
    if sum(short_policy(other) == policy for other in alike) > 1:
        policy = row["policy"]
    parts = [cut(row["drafter"]), cut(policy)]
    parts += [f"T={row['temperature']:g}"] * temperature
    if len({other["batch_size"] for other in rows}) > 1:
        parts.append(f"batch {row['batch_size']}")
    return ", ".join(parts)


def cut(name: str) -> str:
    """A name that leaves room for what it stands beside."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def colour_of(key: str, keys: list[str]) -> str:
    """One colour for each of the keys, in their order; after ten they begin again."""
    return COLOURS[keys.index(key) % len(COLOURS)]


def distinct(rows: list[dict[str, Any]], key: str) -> list[Any]:
    """The values of a key in order of their first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))
