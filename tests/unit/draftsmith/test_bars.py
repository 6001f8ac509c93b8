"""Long stages whose output is a file."""

import io
import time

import pytest
from rich.progress import MofNCompleteColumn, TextColumn

from draftsmith.bars import Bars
from draftsmith.safe_text import Terminal


def _lines(monkeypatch: pytest.MonkeyPatch, seconds: float, wait: float, **options: bool) -> str:
    """Return the output of a bar after one unit of three, until it has printed two lines or `wait` seconds are over."""
    monkeypatch.setattr(Bars, "seconds", seconds)
    file = io.StringIO()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn())
    console = Terminal(file=file, force_terminal=options.get("terminal", False))
    with Bars(*columns, console=console, disable=options.get("disable", False), auto_refresh=False) as bar:
        task = bar.add_task("sampling", total=3)
        bar.advance(task, 1)
        end = time.monotonic() + wait
        while time.monotonic() < end and file.getvalue().count("\n") < 2:
            time.sleep(0.01)
        said = file.getvalue()
    return said


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _lines(monkeypatch, 0.02, 60.0).splitlines()
    assert len(said) >= 2, "also while nothing advances"
    assert all(line.split() == ["sampling", "1/3"] for line in said[1:])
    assert _lines(monkeypatch, 3600.0, 0.2) == "", "not yet"
    assert _lines(monkeypatch, 0.02, 0.2, disable=True) == "", "another process prints"
    assert "1/3" not in _lines(monkeypatch, 0.02, 0.2, terminal=True), "a terminal has the bar"
