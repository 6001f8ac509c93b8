"""What a run shows: one line with a bar and the time left, on the main process only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from draftsmith.safe_text import Terminal
from draftsmith.train.meter import in_units


class Console:
    """Prints on the main process, stays silent on all others."""

    def __init__(self, visible: bool) -> None:
        self.visible = visible
        self._rich = Terminal(stderr=True, quiet=not visible)
        self._tell: Callable[[str], None] | None = None

    def doing(self, text: str) -> None:
        """Show `text` in place of the numbers of the running bar; '' shows the last numbers again."""
        if self._tell is not None:
            self._tell(text)

    def say(self, text: str) -> None:
        self._rich.print(text, soft_wrap=True)

    def evaluation(self, step: int, result: dict[str, Any]) -> None:
        at = " ".join(f"{share:.2f}" for share in result["acceptance_at"])
        self.say(f"  step {step}: alpha {result['alpha']:.3f}, tau {result['tau']:.2f}, acceptance by position {at}")

    @contextmanager
    def bar(self, name: str, steps: int, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yields a function that takes a step's metrics, if it has any, and moves the bar on."""
        columns = (
            # 80 columns hold no more.
            TextColumn(
                "{task.description}", markup=False, table_column=Column(max_width=14, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        with Progress(*columns, console=self._rich, disable=not self.visible) as progress:
            task, numbers = progress.add_task(name, total=steps, completed=done, numbers=""), ""

            def advance(row: dict[str, Any]) -> None:
                nonlocal numbers
                numbers = _numbers(row) if row else ""
                progress.update(task, advance=1, numbers=numbers)

            self._tell = lambda text: progress.update(task, numbers=text or numbers)
            yield advance
            self._tell = None


def _numbers(row: dict[str, Any]) -> str:
    rate, memory = row["tokens_per_second"], in_units(row["memory_bytes"])
    return f"loss {row['loss']:.3f} alpha {row['alpha'][0]:.3f} {rate:.0f} tok/s {memory}"
