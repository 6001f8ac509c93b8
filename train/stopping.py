"""Early stops: a signal or a full disk on one process stops all after the same step."""

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from draftsmith.errors import DraftsmithError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0
"""Seconds in which a second signal counts as the same one: launchers forward signals that the terminal sent to all."""


class Stopping:
    """Handles SIGTERM and SIGINT inside the context, and holds the reason to stop.

    The first signal is recorded, and the current step is finished. A second one ends the process at once. The record
    of a process is a few numbers, `flags`, which are reduced over the processes together with other sums; `agree` takes
    the reduced values, so that all processes decide the same at the same point.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The signal that this process received."""
        self.agreed: int | None = None
        """The signal that all processes stop for."""
        self.problem: str | None = None
        """The error of this process for which the run cannot continue."""
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def flags(self) -> list[float]:
        """Return numbers that are to be summed over all processes."""
        return [*(float(self.received == number) for number in SIGNALS), float(self.problem is not None)]

    def agree(self, sums: Sequence[float]) -> None:
        """Set the outcome from the sums of all processes' `flags`.

        Raises:
            DraftsmithError: on all processes, when one of them has a problem.
        """
        *signals, problems = sums
        if problems:
            raise DraftsmithError(self.problem or "another process had to stop; its line says why")
        self.agreed = next((number for number, count in zip(SIGNALS, signals, strict=True) if count), self.agreed)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
        elif now - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def leave(number: int) -> NoReturn:
    """Exit as the signal would have: with code 128 + its number, which for SIGINT follows from KeyboardInterrupt."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
