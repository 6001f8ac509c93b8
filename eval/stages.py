"""Progress on stderr: the named stages of a long call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from draftsmith.bars import Bars, time_left
from draftsmith.safe_text import Terminal


@contextmanager
def stage(name: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show `name` and the elapsed time and, if the number of parts is known, a progress bar and the time left.

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
