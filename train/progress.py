"""The output of a run on the main process: lines, a progress bar, a tracker; the memory and the time that it used."""

import ctypes
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Column, Table

from draftsmith.storage import write_text
from draftsmith.terminal import Bars, Terminal, TimeLeft
from draftsmith.train.recipe import Recipe

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
        """Show `text` in place of the statistics of the running bar; '' shows the last ones again."""
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
        of = "estimated alpha" if result.get("estimated") else "alpha"
        self.say(f"  step {step}: {of} {result['alpha']:.3f}, tau {result['tau']:.2f}, acceptance by position {end}")

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
            TextColumn("{task.fields[statistics]}"),
        )
        with Bars(*columns, console=self._rich, disable=not self.visible) as progress:
            task, statistics = progress.add_task(name, total=steps, completed=done, statistics=""), ""

            def advance(row: dict[str, Any] | None) -> None:
                nonlocal statistics
                statistics = "" if row is None else _statistics(row)
                progress.update(task, advance=1, statistics=statistics)

            self._show_in_bar = lambda text: progress.update(task, statistics=text or statistics)
            yield advance
            self._show_in_bar = None


def _statistics(row: dict[str, Any]) -> str:
    rate, memory = row["tokens_per_second"], in_units(row["memory_bytes"])
    return f"loss {row['loss']:.3f} alpha {row['alpha'][0]:.3f} {rate:.0f} tok/s {memory}"


TRACKER_FOLDER = "tracker"
"""Folder of the tracker's files in the run's folder."""
PROJECT = "draftsmith"
RUN_ID = "wandb-run-id"
"""File with wandb's id of the run, by which a later start continues it."""


class Tracker:
    """The run's tracker, on the main process. If it fails, it is closed with a printed line, and training continues."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, console: Console, resumed: int | None) -> None:
        """Open the tracker's run, or resume it.

        `resumed`: the last step of the checkpoint that the run continues from; None for a new run. wandb without a key
        and tensorboard write to the run's folder instead of the network.
        """
        self._accelerator, self._console = accelerator, console
        self._name = recipe.tracker
        self._open = accelerator.is_main_process
        self._try("start", lambda: self._start(recipe, resumed))

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of `metrics.jsonl`."""
        self._try("log", lambda: self._accelerator.log(tracker_row(row), step=row["step"]))

    def close(self) -> None:
        self._try("close", self._finish)

    def _start(self, recipe: Recipe, resumed: int | None) -> None:
        folder = Path(recipe.output) / TRACKER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        config = _flat(recipe.model_dump(mode="json"))
        if self._name == "wandb":
            if not os.environ.get("WANDB_API_KEY"):
                os.environ.setdefault("WANDB_MODE", "offline")
            options = {"name": recipe.name, "dir": str(folder), "id": _run_id(folder), "resume": "allow"}
            # To store a config later, accelerate 1.10 would start an offline run again, in another folder.
            options, config = {**options, "config": config, "allow_val_change": True}, None
        else:  # steps after the checkpoint are logged again: tensorboard drops the old ones, wandb ignores known steps
            options = {"purge_step": 0 if resumed is None else resumed + 1}
            config = config if resumed is None else None
        self._accelerator.init_trackers(PROJECT, config=config, init_kwargs={self._name: options})

    def _finish(self) -> None:
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def _try(self, what: str, action: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            action()
        except Exception as error:  # any failure: a tracker must not stop a run
            self._open = False
            reason = " ".join(str(error).split())
            self._console.say(
                f"tracker={self._name} failed to {what} ({type(error).__name__}: {reason}); training continues "
                "without it, and metrics.jsonl holds everything"
            )


def _run_id(folder: Path) -> str:
    """Return wandb's id of the run, the same each time that it is started."""
    file = folder / RUN_ID
    if not file.exists():
        write_text(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()


def tracker_row(row: dict[str, Any]) -> dict[str, float]:
    """Return metrics under flat names: `train/alpha_1`, `evaluation/tau`."""
    if "evaluation" in row:
        kinds = {key: row[key] for key in ("evaluation", "validation") if key in row}
        by_prompt = ("tokens", "rounds")
        return _flat({kind: {k: v for k, v in it.items() if k not in by_prompt} for kind, it in kinds.items()})
    return {f"train/{key}": value for key, value in _flat(row).items() if key != "step"}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with slashes and number lists from 1; None becomes text, which every tracker accepts."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}/")
        elif isinstance(value, list):
            flat |= {f"{name}_{index}": item for index, item in enumerate(value, 1)}
        else:
            flat[name] = "none" if value is None else value
    return flat
