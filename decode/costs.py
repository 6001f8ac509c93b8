"""What a forward pass costs on this machine, by the number of tokens that it reads: the curve that policies plan with.

Checking three tokens is not three times the work of one: on an accelerator it is nearly free, on a CPU it is not. So
the draft that gives most tokens per second depends on the machine, and is computed from measured seconds. Nor is a
wider pass always dearer: matrix kernels change with the number of rows, and two or three can cost more than five. A
pass is then padded to the cheaper width.
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


Width = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Costs:
    """Seconds of one forward pass: the target's by tokens verified (the root among them), the drafter's by nodes."""

    verify: Annotated[dict[Width, Seconds], Field(min_length=1)]
    draft: Annotated[dict[Width, NotNegative], Field(min_length=1)]
    round: float = 0.0
    """What a round costs beside its passes, however long its draft is."""

    def verify_seconds(self, tokens: int) -> float:
        """Of a pass over that many tokens, padded where that is cheaper."""
        return interpolated(self._cheapest[0], tokens)

    def draft_seconds(self, nodes: int) -> float:
        """The same for the drafter."""
        return interpolated(self._cheapest[1], nodes)

    @cached_property
    def verify_widths(self) -> dict[int, int]:
        """Tokens to the width that they are padded to, for those that gain by it."""
        return _padding(self.verify)

    @cached_property
    def draft_widths(self) -> dict[int, int]:
        """The same for the drafter."""
        return _padding(self.draft)

    @cached_property
    def _cheapest(self) -> tuple[dict[int, float], dict[int, float]]:
        return _never_falling(self.verify), _never_falling(self.draft)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """ConfigError for a file that is not one of ours."""
        try:
            costs = TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"costs={path} cannot be read ({reason_of(error)}); expected a file of measured costs"
            ) from error
        return costs


def _never_falling(curve: dict[int, float]) -> dict[int, float]:
    """The cost of each width or of the cheapest wider one, since a pass can be padded."""
    best, falling = float("inf"), {}
    for width in sorted(curve, reverse=True):
        best = min(best, curve[width])
        falling[width] = best
    return dict(sorted(falling.items()))


def _padding(curve: dict[int, float]) -> dict[int, int]:
    """For every width below the widest, the width that saves most, where it saves more than noise would."""
    widths = sorted(curve)
    padded = {}
    for tokens in range(1, widths[-1]):
        best = min((width for width in widths if width >= tokens), key=curve.__getitem__)
        if curve[best] < WORTH_PADDING * interpolated(curve, tokens):
            padded[tokens] = best
    return padded


def interpolated(curve: dict[int, float], width: float) -> float:
    """Linear between measured widths, and beyond the last with the slope of the last two."""
    widths = sorted(curve)
    place = bisect_left(widths, width)
    if len(widths) == 1 or (place < len(widths) and widths[place] == width):
        return curve[widths[min(place, len(widths) - 1)]]
    place = min(max(place, 1), len(widths) - 1)
    low, high = widths[place - 1], widths[place]
    return curve[low] + (curve[high] - curve[low]) * (width - low) / (high - low)
