"""Progress bars, and the named stages of a long call; a line now and then where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftsmith.safe_text import Terminal


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def time_left() -> ProgressColumn:
    """Return a column with the remaining time at the mean speed of the last hour."""
    return TimeRemainingColumn(compact=True)


def units() -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar that counts units: their number, and the remaining time."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time_left()


class Bars(Progress):
    """rich's progress bars, which print their present state every ten seconds where stderr is no terminal."""

    seconds = 10.0
    """Time between two such lines; a stage whose first unit takes longer prints them, too."""

    def __init__(self, *columns: str | ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, speed_estimate_period=3600.0, **options)
        self._ended = Event()

    def start(self) -> None:
        super().start()
        if not self.disable and not self.console.is_terminal:
            Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self.live.transient:  # nothing is left, hence no line that a line break would end
            self.live.stop()
        else:
            super().stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(self.seconds):
            self.console.print(self.make_tasks_table(self.tasks))


@contextmanager
def stage(name: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show `name` and the elapsed time on stderr and, if the number of parts is known, a bar and the time left.

    Yields a function to call after each part, or with a number of parts. If stderr is not a terminal, print the name,
    and a line every ten seconds.
    """
    console = Terminal(stderr=True)
    if shown and not console.is_terminal:
        console.print(f"  stage: {name}", markup=False, soft_wrap=True)
    left = () if total is None else (BarColumn(), MofNCompleteColumn(), time_left())
    columns = (TextColumn("{task.description}"), TimeElapsedColumn(), *left)
    with Bars(*columns, console=console, disable=not shown, transient=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def done(parts: float = 1) -> None:
            bar.advance(task, parts)

        yield done
