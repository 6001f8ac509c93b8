"""Progress lines of long commands."""

import io

import pytest

from draftsmith.eval.stages import stage


def test_where_stderr_is_no_terminal_the_name_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("timing rounds", 2) as done:
        assert capsys.readouterr().err == "  stage: timing rounds\n", "before the work, not after it"
        done()
    with stage("in silence", shown=False) as done:
        done()
    assert capsys.readouterr().err == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_parts_move_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stage("timing rounds", 2) as done:
        done()
        done()
    with stage("warming up"):
        pass
    said = terminal.getvalue()
    assert "timing rounds" in said
    assert "2/2" in said
    assert "warming up" in said
