"""Long stages whose output is a file."""

import io

import pytest
from rich.progress import MofNCompleteColumn, TextColumn

from draftsmith.bars import Bars
from draftsmith.safe_text import Terminal


def _lines(monkeypatch: pytest.MonkeyPatch, seconds: float, *, terminal: bool = False, disable: bool = False) -> str:
    monkeypatch.setattr(Bars, "seconds", seconds)
    file = io.StringIO()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn())
    console = Terminal(file=file, force_terminal=terminal)
    with Bars(*columns, console=console, disable=disable, auto_refresh=False) as bar:
        task = bar.add_task("sampling", total=3)
        bar.advance(task, 1)
        bar.update(task, advance=1)
        said = file.getvalue()
    return said


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _lines(monkeypatch, 0.0).split() == ["sampling", "1/3", "sampling", "2/3"]
    assert _lines(monkeypatch, 3600.0) == "", "not yet"
    assert _lines(monkeypatch, 0.0, disable=True) == "", "another process prints"
    assert "2/3" not in _lines(monkeypatch, 0.0, terminal=True), "a terminal has the bar"
