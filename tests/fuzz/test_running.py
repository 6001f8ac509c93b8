"""The runner of cases, with commands that are unclean in one way each."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import running
from fuzz.running import Case, run


def _say(code: int, *lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr)
    sys.exit(code)


def _loop() -> None:
    while True:
        pass


COMMANDS: dict[str, tuple[Callable[[], object], str | None]] = {
    "nothing": (lambda: None, None),
    "one line": (lambda: _say(2, "note: x", "ConfigError: x"), None),
    "a traceback": (lambda: {}["x"], "crashed (70): KeyError: 'x'"),
    "two lines": (lambda: _say(2, "a", "b"), "exit 2 with 2 lines"),
    "a long line": (lambda: _say(2, "x" * 501), "a line of 501 characters"),
    "a changed input": (lambda: Path("input").write_text("b"), "changed "),
    "another file": (lambda: Path("x").touch(), "changed "),
    "an endless loop": (_loop, "still running"),
    "too much memory": (lambda: bytearray(2 * running.MEMORY), "crashed (70): MemoryError"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_unclean_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CPU_SECONDS", 1)
    monkeypatch.setattr(running, "WALL_SECONDS", 4.0)
    command, why = COMMANDS[name]
    problem = run(Case("x", [], {"input": b"a"}), tmp_path / "case", lambda _: command())
    if why is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.why.startswith(why)
