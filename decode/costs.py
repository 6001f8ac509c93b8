"""Measured seconds of passes and rounds, by batch size and by the number of tokens of each text, their width.

On an accelerator, verifying three tokens takes hardly longer than one; on a CPU it takes longer. The draft with the
most tokens per second therefore depends on the machine: policies plan it from these measurements, and the forecast
compares policies by them. A wider pass is not always slower: matrix kernels depend on the number of rows, and two or
three rows can take longer than five. Such a pass is padded to the faster width.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import read_json
from draftsmith.storage import write_json

WORTH_PADDING = 0.95
"""Padding is used where the wider pass takes at most this share of the time; smaller differences are noise."""


def _of_one_text(values: Any) -> Any:
    """Return values by batch size; those without batch sizes, as in files of version 0.3, are of one text."""
    by_batch = isinstance(values, Mapping) and all(isinstance(value, Mapping) for value in values.values())
    return values if by_batch else {1: values}


Size = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Curve = Annotated[dict[Size, NotNegative], Field(min_length=1)]
Passes = Annotated[dict[Size, Annotated[dict[Size, Seconds], Field(min_length=1)]], Field(min_length=1)]
ByBatch = Annotated[
    dict[Size, NotNegative], BeforeValidator(lambda given: given if isinstance(given, Mapping) else {1: given})
]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Costs:
    """Seconds of the passes and rounds of a target and a drafter on one machine, by batch size.

    Curves are interpolated linearly, and continue with the slope of their last two points. A curve without batch sizes,
    `{width: seconds}`, is that of one text.
    """

    verify: Annotated[Passes, BeforeValidator(_of_one_text)]
    """Of a pass of the target, by the tokens of each text, including the root."""
    draft: Annotated[dict[Size, Curve], BeforeValidator(_of_one_text)] = field(default_factory=lambda: {1: {1: 0.0}})
    """Of a pass of the drafter, by the nodes of each text."""
    round: ByBatch = field(default_factory=lambda: {1: 0.0})
    """Of a round outside its passes; they do not depend on the length of the draft."""
    first: ByBatch = field(default_factory=lambda: {1: 0.0})
    """By which the drafter's first pass of a round takes longer than each later one: it reads what was committed, and
    block drafters compute all of their tokens in it."""
    chains: dict[Size, Curve] = field(default_factory=dict)
    """Of drafting a whole chain, by its tokens, where whole rounds were timed; else they follow from the passes."""
    alone: dict[Size, Seconds] = field(default_factory=dict)
    """In which the target alone decodes one token of every text; by default those of a round without a draft."""
    policies: dict[str, dict[Size, Annotated[float, Field(allow_inf_nan=False)]]] = field(default_factory=dict)
    """By policy: of its rounds beyond those of a chain with as many draft tokens and drafter passes."""
    repeats: "tuple[Costs, ...]" = ()
    """Of repeated measurements, whose means are the seconds above."""
    name: str = ""
    """What was measured."""

    def verify_seconds(self, tokens: float, batch: float = 1) -> float:
        """Return the seconds of a target pass over `tokens` tokens of each text, padded where that is faster."""
        return _at(self._cheapest[0], batch, tokens)

    def draft_seconds(self, nodes: float, batch: float = 1) -> float:
        """Return the seconds of a drafter pass over `nodes` nodes of each text, padded where that is faster."""
        return _at(self._cheapest[1], batch, nodes)

    def token_seconds(self, batch: float = 1) -> float:
        """Return the seconds in which the target alone decodes one token of each text."""
        return interpolated(self.alone, batch) if self.alone else self.round_seconds(0, 0, batch)

    def drafting(self, passes: float, batch: float = 1, policy: str = "") -> float:
        """Return the seconds of drafting with a number of passes over one node of each text, in one round."""
        if not passes:
            return 0.0
        if self.chains:
            seconds = _at(self.chains, batch, passes)
        else:
            seconds = interpolated(self.first, batch) + passes * self.draft_seconds(1, batch)
        beyond = self.policies.get(policy)
        # Noise may make a difference, or the extrapolation beyond the longest timed draft, negative.
        return max(seconds + (interpolated(beyond, batch) if beyond else 0.0), 0.0)

    def round_seconds(self, nodes: float, passes: float, batch: float = 1, policy: str = "") -> float:
        """Return the seconds of a round that verifies `nodes` draft tokens of each text after drafter passes."""
        seconds = self.drafting(passes, batch, policy) + self.verify_seconds(nodes + 1, batch)
        return seconds + interpolated(self.round, batch)

    def share(self, texts: int) -> "Costs":
        """Return one text's share of the passes over `texts` texts, as the costs of one text."""
        verify, draft = (
            {1: {width: _at(curves, texts, width) / texts for width in next(iter(curves.values()))}}
            for curves in (self.verify, self.draft)
        )
        rest, first = ({1: interpolated(seconds, texts) / texts} for seconds in (self.round, self.first))
        return Costs(verify, draft, rest, first)

    @cached_property
    def verify_widths(self) -> dict[int, int]:
        """Padded width of a target pass over one text by its number of tokens, where padding is faster."""
        return _padding(self.verify)

    @cached_property
    def draft_widths(self) -> dict[int, int]:
        """Padded width of a drafter pass over one text by its number of nodes, where padding is faster."""
        return _padding(self.draft)

    @cached_property
    def _cheapest(self) -> list[dict[int, dict[int, float]]]:
        both = (self.verify, self.draft)
        return [{size: _never_falling(curve) for size, curve in curves.items()} for curves in both]

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Read a file that `save` wrote; ConfigError for any other file."""
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"costs={path} cannot be read ({reason_of(error)}); expected a file of measured costs"
            ) from error


def _never_falling(curve: dict[int, float]) -> dict[int, float]:
    """Return the seconds of each width or, since a pass can be padded, of the fastest wider one."""
    best, falling = float("inf"), {}
    for width in sorted(curve, reverse=True):
        best = min(best, curve[width])
        falling[width] = best
    return dict(sorted(falling.items()))


def _padding(curves: dict[int, dict[int, float]]) -> dict[int, int]:
    """Return the fastest width that holds each number of tokens of one text, where it saves more than noise would."""
    curve = curves.get(1, {})
    widths = sorted(curve)
    padded = {}
    for tokens in range(1, max(widths, default=1)):
        best = min((width for width in widths if width >= tokens), key=curve.__getitem__)
        if curve[best] < WORTH_PADDING * interpolated(curve, tokens):
            padded[tokens] = best
    return padded


def _at(curves: dict[int, dict[int, float]], batch: float, width: float) -> float:
    """Interpolate over the width at every batch size, then over the batch size."""
    return interpolated({size: interpolated(curve, width) for size, curve in curves.items()}, batch)


def interpolated(curve: dict[int, float], width: float) -> float:
    """Return the seconds at `width`: linear between measured widths, extrapolated from the last two."""
    widths = sorted(curve)
    index = bisect_left(widths, width)
    if len(widths) == 1 or (index < len(widths) and widths[index] == width):
        return curve[widths[min(index, len(widths) - 1)]]
    index = min(max(index, 1), len(widths) - 1)
    low, high = widths[index - 1], widths[index]
    return curve[low] + (curve[high] - curve[low]) * (width - low) / (high - low)
