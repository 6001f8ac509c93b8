"""Stopping before the end: a signal or a full disk on one process stops all of them behind the same step."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from draftsmith.errors import DraftsmithError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0
"""Seconds in which a further signal is the same one: launchers pass on what a terminal has sent to everyone."""


class Stopping:
    """Whether to stop, and why; installed as the handler of SIGTERM and SIGINT while it is entered.

    The first signal is only noted: the step in hand is finished. A further one ends the process at once. What a process
    has noted are a few numbers, `flags`, which travel with sums that are reduced over the processes anyway; `agree`
    takes the sums, so that all of them know the same at the same place.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """By this process."""
        self.agreed: int | None = None
        """The signal that all processes stop for."""
        self.problem: str | None = None
        """What this process could not do, and why the run cannot go on."""
        self._since, self._at_once = 0.0, False
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
        """To be summed over all processes."""
        return [*(float(self.received == number) for number in SIGNALS), float(self.problem is not None)]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums of everyone's `flags`.

        Raises:
            DraftsmithError: on all processes, when one of them has a problem.
        """
        *signals, problems = sums
        if problems:
            raise DraftsmithError(self.problem or "another process had to stop; its line says why")
        self.agreed = next((number for number, count in zip(SIGNALS, signals, strict=True) if count), self.agreed)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For work that takes long and loses nothing: a signal does not wait for its end."""
        self._at_once = True
        try:
            if (number := self.agreed or self.received) is not None:
                leave(number)
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            if self._at_once:
                leave(number)
        elif now - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def leave(number: int) -> NoReturn:
    """End the run as the signal would have: exit code 128 + its number, which Ctrl-C's exception stands for too."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
