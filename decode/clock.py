"""Timing of asynchronous device work."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch


def now(device: torch.device | None) -> float:
    """Return the clock in seconds; on CUDA, after all queued work has finished."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PartClock:
    """Measures the parts of a step on its device: a part ends at `end`, and the next one begins there.

    On CUDA it records events instead of waiting for the device, so that the host can go on to the next part; elsewhere
    it reads `clock`.
    """

    def __init__(
        self, device: torch.device, parts: Sequence[str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._parts = parts
        self._cuda = device.type == "cuda"
        self._now = partial(_event, device) if self._cuda else clock
        self._ends: list[tuple[str, Any]] = []

    def start(self) -> None:
        self._ends = [("", self._now())]

    def end(self, part: str) -> None:
        """End a part, of `parts`; without effect before the first `start`."""
        if self._ends:
            self._ends.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since `start`; to be called once the device has computed all of them."""
        totals = dict.fromkeys(self._parts, 0.0)
        for (_, begun), (part, ended) in pairwise(self._ends):
            totals[part] += begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun
        return totals


def _event(device: torch.device) -> Any:
    """Return an event at the end of what is queued on the device, which may not be torch's current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
