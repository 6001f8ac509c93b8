"""Runs one command line in a forked process with bounds, and says what is not clean about it."""

import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

CPU_SECONDS = 20
"""Of the process itself: other work on the machine makes no case unclean."""
WALL_SECONDS = 120.0
"""Limit for a process that waits for something that never comes."""
MEMORY = 8 * 2**30
"""Bytes of address space beyond what the forked process begins with, so that no case takes the machine down."""
LONGEST = 500
CRASHED = 70
VERDICTS = (0, 1, 3)
"""Exit codes of commands that did what they were asked; 1 and 3 are what `draftsmith check` found."""
REMARK = re.compile(
    r"(note|warning|memory|data|optimizer|teacher cache|draft vocabulary|  .*): "
    r"|.*: resuming |checkpoint .* cannot be read|.*━{4}|.*left out$|.*: not trained( to end)?$|.*: loading torch$"
    r"|.*: keys of rows that are not used: "
)
"""Lines that commands may print before the one line of an error."""


@dataclass(frozen=True)
class Case:
    """A command line, what lies in the folder that it is run in, and where it may write."""

    kind: str
    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    writes: tuple[str, ...] = ("out", "runs")
    """Files and folders at the top, beside those that the command line names as its output."""


@dataclass(frozen=True)
class Unclean:
    """A case that is not clean, and the reason."""

    case: Case
    why: str
    detail: str

    @property
    def signature(self) -> str:
        """Equal for cases that fail in one place."""
        places = [line.strip() for line in self.detail.splitlines() if line.strip().startswith("File ")]
        return f"{self.why.splitlines()[0][:80]} {places[-1] if places else ''}"


def run(case: Case, folder: Path, main: Callable[[list[str]], object]) -> Unclean | None:
    """Run a case in `folder`, which is made anew; None for a clean one."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    for name, content in case.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
    writes = (*case.writes, *_outputs(case))
    before = _seen(work, writes)
    pid = os.fork()
    if not pid:
        _child(case, folder, main)
    code, killed = _wait(pid)
    said = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    why = _why(code, killed, said)
    if why is None and (after := _seen(work, writes)) != before:
        why = f"changed {sorted(set(after.items()) ^ set(before.items()))[:4]}"
    return None if why is None else Unclean(case, why, said[-6000:])


def _outputs(case: Case) -> list[str]:
    """Return the first part of every path that the case names as its output."""
    words = case.arguments
    found = [value for word, value in pairwise(words) if word == "--out"]
    found += [word.removeprefix("output=") for word in words if word.startswith("output=")]
    return [Path(value).parts[0] for value in found]


def _seen(folder: Path, writes: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    """Every file that a command has to leave alone, with what changes when it is written."""
    found = {}
    for file in folder.rglob("*"):
        if not {".", file.relative_to(folder).parts[0]} & {*writes}:
            state = file.lstat()
            found[str(file)] = (state.st_mode, 0 if file.is_dir() else state.st_size, state.st_mtime_ns)
    return found


def _child(case: Case, folder: Path, main: Callable[[list[str]], object]) -> None:
    os.chdir(folder / "work")
    for name, key in (("home", "HOME"), ("cache", "DRAFTSMITH_CACHE"), ("hf", "HF_HOME"), ("tmp", "TMPDIR")):
        (folder / name).mkdir(exist_ok=True)
        os.environ[key] = str(folder / name)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    room = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, used + CPU_SECONDS + 5))
    code = CRASHED
    try:
        main(case.arguments)
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> tuple[int, bool]:
    """(exit code, negative for a signal, and whether it had to be killed)."""
    deadline, killed = time.monotonic() + WALL_SECONDS, False
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline and not killed:
            os.kill(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), killed


def _why(code: int, killed: bool, said: str) -> str | None:
    lines = [line for line in said.splitlines() if line.strip()]
    if killed or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "still running after its time"
    if code < 0 or code == CRASHED or "Traceback (most recent call last)" in said:
        return f"crashed ({code}): {lines[-1] if lines else ''}"
    if code == 2:
        if lines and len(lines[-1]) > LONGEST:
            return f"a line of {len(lines[-1])} characters"
        rest = [line for line in lines if not REMARK.match(line)]
        return None if len(rest) == 1 and rest[0] is lines[-1] else f"exit 2 with {len(rest)} lines"
    return None if code in VERDICTS else f"exit code {code}"
