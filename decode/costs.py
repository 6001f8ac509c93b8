"""Measured seconds of a forward pass as a function of its width, the number of tokens that it reads.

On an accelerator, verifying three tokens takes hardly longer than one; on a CPU it takes longer. The draft with the
most tokens per second therefore depends on the machine, and policies plan it from these measurements. A wider pass is
not always slower: matrix kernels depend on the number of rows, and two or three rows can take longer than five. Such a
pass is padded to the faster width.
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import read_json
from draftsmith.storage import write_json

WORTH_PADDING = 0.95
"""Padding is used where the wider pass takes at most this share of the time; smaller differences are noise."""

Width = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Costs:
    """Seconds of one forward pass: the target's by verified tokens, including the root, the drafter's by nodes."""

    verify: Annotated[dict[Width, Seconds], Field(min_length=1)]
    draft: Annotated[dict[Width, NotNegative], Field(min_length=1)]
    round: float = 0.0
    """Seconds of a round outside its passes; they do not depend on the length of the draft."""
    first: float = 0.0
    """Seconds by which the drafter's first pass of a round takes longer than each later one: it reads what was
    committed, and block drafters compute all of their tokens in it."""

    def verify_seconds(self, tokens: int) -> float:
        """Return the seconds of a target pass over `tokens` tokens, padded where that is faster."""
        return interpolated(self._cheapest[0], tokens)

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self.verify_seconds(1) + self.round

    def drafting(self, passes: int) -> float:
        """Return the seconds of a number of drafter passes over one node each, in one round."""
        return (self.first if passes else 0.0) + passes * self.draft_seconds(1)

    def draft_seconds(self, nodes: int) -> float:
        """Return the seconds of a drafter pass over `nodes` nodes, padded where that is faster."""
        return interpolated(self._cheapest[1], nodes)

    @cached_property
    def verify_widths(self) -> dict[int, int]:
        """Padded width of a target pass by its number of tokens, for the numbers where padding is faster."""
        return _padding(self.verify)

    @cached_property
    def draft_widths(self) -> dict[int, int]:
        """Padded width of a drafter pass by its number of nodes, for the numbers where padding is faster."""
        return _padding(self.draft)

    @cached_property
    def _cheapest(self) -> tuple[dict[int, float], dict[int, float]]:
        return _never_falling(self.verify), _never_falling(self.draft)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Read a file that `save` wrote; ConfigError for any other file."""
        try:
            costs = TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"costs={path} cannot be read ({reason_of(error)}); expected a file of measured costs"
            ) from error
        return costs


def _never_falling(curve: dict[int, float]) -> dict[int, float]:
    """Return the seconds of each width or, since a pass can be padded, of the fastest wider one."""
    best, falling = float("inf"), {}
    for width in sorted(curve, reverse=True):
        best = min(best, curve[width])
        falling[width] = best
    return dict(sorted(falling.items()))


def _padding(curve: dict[int, float]) -> dict[int, int]:
    """Return the fastest width that holds each number of tokens, where it saves more than noise would."""
    widths = sorted(curve)
    padded = {}
    for tokens in range(1, widths[-1]):
        best = min((width for width in widths if width >= tokens), key=curve.__getitem__)
        if curve[best] < WORTH_PADDING * interpolated(curve, tokens):
            padded[tokens] = best
    return padded


def interpolated(curve: dict[int, float], width: float) -> float:
    """Return the seconds at `width`: linear between measured widths, extrapolated from the last two."""
    widths = sorted(curve)
    place = bisect_left(widths, width)
    if len(widths) == 1 or (place < len(widths) and widths[place] == width):
        return curve[widths[min(place, len(widths) - 1)]]
    place = min(max(place, 1), len(widths) - 1)
    low, high = widths[place - 1], widths[place]
    return curve[low] + (curve[high] - curve[low]) * (width - low) / (high - low)
