"""The output of a run on the main process: lines and a progress bar; the memory and the time that a process used."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Column, Table

from draftsmith.terminal import Bars, Terminal, TimeLeft

TRIM_EVERY = 8
"""Steps after which freed memory is given back on a CPU: it takes a few percent of one step."""


class MemoryMeter:
    """Measures peak memory from its creation on; create it before models are loaded.

    On an accelerator the peak is that of torch's allocator. On a CPU it is the growth of the process's resident memory,
    so that Python and its libraries do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        with suppress(OSError):  # Linux: what was freed before, such as a GGUF file's whole weights, does not count
            Path("/proc/self/clear_refs").write_text("5")
        self._before = psutil.Process().memory_info().rss
        is_host = self._cuda is None and sys.platform == "linux"
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if is_host else None
        self._peak = self._calls = 0

    def peak(self) -> int:
        """Return the most bytes so far."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        # Linux counts per core, so that its own maximum can fall by a few pages.
        self._peak = max(self._peak, _peak_resident() - self._before)
        return self._peak

    def trimmed(self) -> int:
        """Give freed memory back to the system after every few calls, and return the most bytes so far.

        On a CPU glibc keeps what it frees, and tensors of many sizes leave gaps in it that no other one fits into.
        """
        self._calls += 1
        if self._trim is not None and self._calls % TRIM_EVERY == 0:
            self._trim(0)
        return self.peak()


NO_SUGGESTIONS = "DRAFTSMITH_NO_SUGGESTIONS"
"""The variable of the environment with which the quickstart starts a run that is one of its stages."""

PARTS: tuple[str, ...] = ("fetch", "teacher", "drafter", "objective", "backward", "optimizer", "other")
"""The parts of a training step."""


def in_units(count: float) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _peak_resident() -> int:
    """Return the largest resident set size of the process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the memory of the process that forked this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Console:
    """Prints on the main process and nothing on all others."""

    def __init__(self, visible: bool) -> None:
        self.visible = visible
        self._rich = Terminal(stderr=True, quiet=not visible)
        self._show_in_bar: Callable[[str], None] | None = None

    def doing(self, text: str) -> None:
        """Show `text` in place of the numbers of the running bar; '' shows the last numbers again."""
        if self._show_in_bar is not None:
            self._show_in_bar(text)

    def say(self, text: str) -> None:
        """Print a line."""
        self._rich.print(text, soft_wrap=True)

    def suggest(self, command: str) -> None:
        """Print the command that usually follows, unless a command that runs this one prints its own."""
        if not os.environ.get(NO_SUGGESTIONS):
            self.say(f"next: {command}")

    def show(self, table: Table) -> None:
        """Print a table."""
        self._rich.print(table)

    def evaluation(self, step: int, result: dict[str, Any], validation: dict[str, Any] | None) -> None:
        """Print the metrics of an evaluation, with those of the validation pass if any, in a line."""
        at = " ".join(f"{share:.2f}" for share in result["acceptance_at"])
        end = at if validation is None else f"{at}, validation loss {validation['loss']:.3f}"
        self.say(f"  step {step}: alpha {result['alpha']:.3f}, tau {result['tau']:.2f}, acceptance by position {end}")

    @contextmanager
    def bar(self, name: str, steps: int, done: int) -> Iterator[Callable[[dict[str, Any] | None], None]]:
        """Show a progress bar; yields a function that advances it by a step and shows the step's metrics, if any."""
        columns = (
            # More does not fit into 80 columns.
            TextColumn(
                "{task.description}", markup=False, table_column=Column(max_width=14, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TimeLeft(),
            TextColumn("{task.fields[numbers]}"),
        )
        with Bars(*columns, console=self._rich, disable=not self.visible) as progress:
            task, numbers = progress.add_task(name, total=steps, completed=done, numbers=""), ""

            def advance(row: dict[str, Any] | None) -> None:
                nonlocal numbers
                numbers = "" if row is None else _numbers(row)
                progress.update(task, advance=1, numbers=numbers)

            self._show_in_bar = lambda text: progress.update(task, numbers=text or numbers)
            yield advance
            self._show_in_bar = None


def _numbers(row: dict[str, Any]) -> str:
    rate, memory = row["tokens_per_second"], in_units(row["memory_bytes"])
    return f"loss {row['loss']:.3f} alpha {row['alpha'][0]:.3f} {rate:.0f} tok/s {memory}"
