"""One process of a run: its launcher's variables, and the signals that stop it.

A signal or a full disk on one process stops all after the same step.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from draftsmith.errors import ConfigError, DraftsmithError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
"""The variables that are whole numbers, with the least value of each."""


@dataclass(frozen=True)
class LaunchVariables:
    """The launch of this process; by default it was started alone."""

    rank: int = 0
    processes: int = 1
    address: str | None = None
    """Host and port where all processes connect; None without a launcher."""


def launch_variables() -> LaunchVariables:
    """Read the variables from the environment.

    Raises:
        ConfigError: for values that no launcher sets, and for some of the variables without the others, as an earlier
            launch may leave them in a shell.
    """
    numbers = {name: _number(name, least) for name, least in LEAST.items() if name in os.environ}
    rank, processes = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
    if "LOCAL_RANK" not in numbers and rank == 0 and processes == 1:
        return LaunchVariables()
    present = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing or rank >= processes:
        without = f" without {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"{', '.join(present)} in the environment{without}; expected all of a launcher's variables, RANK less than "
            "WORLD_SIZE, or none of them (unset) to train in one process"
        )
    return LaunchVariables(rank, processes, f"{os.environ['MASTER_ADDR']}:{numbers['MASTER_PORT']}")


def _number(name: str, least: int) -> int:
    value = os.environ[name]
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name}={value!r} in the environment; expected a whole number >= {least}, or unset")
    return int(value)


SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0
"""Seconds in which a second signal counts as the same one: launchers forward signals that the terminal sent to all."""


class Stopping:
    """Handles SIGTERM and SIGINT inside the context, and holds the reason to stop.

    The first signal is recorded, and the current step is finished. A second one ends the process at once. The record
    of a process is a few integers, `flags`, which are reduced over the processes with other sums; `agree` takes
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
        """Return counts that are to be summed over all processes."""
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
