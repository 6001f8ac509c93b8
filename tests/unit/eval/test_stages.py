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


def test_lines_say_how_much_is_done_and_how_long_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part of a stage may take long: lines come all the same."""
    monkeypatch.setattr("draftsmith.bars.Bars.seconds", 0.01)
    with stage("timing rounds", 4) as done:
        said = ""
        while said.count("0/4") < 2:
            said += capsys.readouterr().err
        done(3)
        while "3/4" not in said:
            said += capsys.readouterr().err
    lines = said.splitlines()
    assert lines[0] == "  stage: timing rounds"
    assert all("timing rounds" in line and "left" in line for line in lines[1:])
    with stage("warming up"):
        while "warming up" not in capsys.readouterr().err:
            pass


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
