"""What a run shows: one line with a bar and the time left, on the main process only.

The memory that a process has really taken.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from draftsmith.safe_text import Terminal

if sys.platform != "win32":
    import resource


class MemoryMeter:
    """From the moment it is made; to be made before models are loaded.

    On an accelerator it asks torch's allocator. On a CPU it compares the process's resident memory with that at the
    beginning, so that what Python and its libraries take does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._before = psutil.Process().memory_info().rss
        self._most = 0

    def peak(self) -> int:
        """Most bytes so far."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        # Linux counts each core's share apart, so that its own maximum can fall by a few pages.
        self._most = max(self._most, _most_resident() - self._before)
        return self._most


def in_units(count: float) -> str:
    """Bytes as people write them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _most_resident() -> int:
    """The most memory that the process has had at once, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the process that started this one had at that moment
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
