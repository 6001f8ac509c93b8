"""What a forward pass costs on this machine, by the number of tokens that it reads: the curve that policies plan with.

Checking three tokens is not three times the work of one: on an accelerator it is nearly free, on a CPU it is not. So
the draft that gives most tokens per second depends on the machine, and is computed from measured seconds.
"""

import json
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from draftsmith.decode.reader import Reader
from draftsmith.decode.target import RootedTree
from draftsmith.errors import ConfigError
from draftsmith.heads.draft import Draft
from draftsmith.heads.drafter import Drafter
from draftsmith.storage import write_json

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CONTEXT, REPEATS = 128, 7


@dataclass(frozen=True)
class Costs:
    """Seconds of one forward pass: the target's by tokens verified (the root among them), the drafter's by nodes."""

    verify: dict[int, float]
    draft: dict[int, float]

    def verify_seconds(self, tokens: int) -> float:
        return _interpolated(self.verify, tokens)

    def draft_seconds(self, nodes: int) -> float:
        return _interpolated(self.draft, nodes)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """ConfigError for a file that is not one of ours."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            curves = {key: {int(width): float(value) for width, value in stored[key].items()} for key in stored}
            costs = cls(**curves)
            if min(costs.verify) < 1 or min([*costs.verify.values(), *costs.draft.values()]) <= 0:
                raise ValueError("widths and seconds have to be positive")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"costs={path} cannot be read ({error}); expected a file of measured costs") from error
        return costs


def _interpolated(curve: dict[int, float], width: int) -> float:
    """Linear between measured widths, and beyond the last with the slope of the last two."""
    widths = sorted(curve)
    if width in curve or len(widths) == 1:
        return curve.get(width, curve[widths[0]])
    place = min(max(bisect_left(widths, width), 1), len(widths) - 1)
    low, high = widths[place - 1], widths[place]
    return curve[low] + (curve[high] - curve[low]) * (width - low) / (high - low)


@torch.inference_mode()
def measure_costs(target: nn.Module, drafter: Drafter | None = None, *, widest: int = 64) -> Costs:
    """Median seconds of forward passes behind 128 tokens, widths interleaved, on the present machine and threads.

    A drafter without a model of its own counts as free, except that heads on the target's state are timed as they are.
    """
    widths = [width for width in WIDTHS if width <= widest]
    verify = _curve(_reading(target), widths)
    model = getattr(drafter, "model", None)
    if isinstance(model, nn.Module):
        return Costs(verify, _curve(_reading(model), widths))
    heads = getattr(drafter, "lm_heads", None)
    if heads is not None and drafter is not None:
        state = torch.zeros(1, heads[0].in_features, dtype=heads[0].weight.dtype, device=heads[0].weight.device)
        return Costs(verify, {1: _curve(lambda _: heads[0](drafter.blocks[0](state)), [1])[1]})
    return Costs(verify, {1: 1e-6})


def _reading(model: nn.Module) -> Callable[[int], object]:
    """A function that reads that many tokens behind a context, and forgets them."""
    limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT + WIDTHS[-1]
    reader = Reader(model, 1, [[1] * 8])
    reader.append([[1] * max(1, min(CONTEXT, limit - WIDTHS[-1] - 1))])

    def read(width: int) -> None:
        reader.branch([RootedTree.of(1, Draft.chain([1] * (width - 1)))], [list(range(width))])
        reader.commit([[]])

    return read


def _curve(read: Callable[[int], object], widths: list[int]) -> dict[int, float]:
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(REPEATS + 1):
        for width in widths:
            started = time.perf_counter()
            read(width)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat > 0:  # the first pass allocates and chooses kernels
                seconds[width].append(time.perf_counter() - started)
    return _never_falling({width: median(values) for width, values in seconds.items()})


def _never_falling(curve: dict[int, float]) -> dict[int, float]:
    """The nearest curve that never falls: a wider pass is not cheaper, where it seems so it is noise.

    Neighbours that stand in the wrong order share their mean (pool adjacent violators).
    """
    pools: list[tuple[float, list[int]]] = []
    for width in sorted(curve):
        value, widths = curve[width], [width]
        while pools and pools[-1][0] > value:
            before, earlier = pools.pop()
            value = (before * len(earlier) + value * len(widths)) / (len(earlier) + len(widths))
            widths = earlier + widths
        pools.append((value, widths))
    return {width: value for value, widths in pools for width in widths}
