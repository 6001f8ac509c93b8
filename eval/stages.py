"""Progress on stderr: the named stages of a long call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftsmith.safe_text import Terminal


@contextmanager
def stage(name: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show `name` and the elapsed time, and a progress bar if the number of parts is known.

    Yields a function to call after each part. If stderr is not a terminal, print only the name.
    """
    console = Terminal(stderr=True)
    moving = shown and console.is_terminal
    if shown and not moving:
        console.print(f"  stage: {name}", markup=False, soft_wrap=True)
    parts = () if total is None else (BarColumn(), MofNCompleteColumn())
    with Progress(
        TextColumn("{task.description}"), *parts, TimeElapsedColumn(), console=console, disable=not moving
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)
