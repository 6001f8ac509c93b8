"""Escape sequences and markup in text are shown literally; long stages whose output is a file print lines."""

import io
import json
import re
import time

import pytest
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from draftsmith.terminal import Bars, Terminal, TimeLeft, markdown, markdown_environment, printable

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J\x9b2J"
NASTY = "# a\n# b ![x](http://h/i.png) <img src=http://h/i.png> | c ` d " + TITLE


def test_control_characters_are_written_out() -> None:
    assert printable("a\tb\né€🙂") == "a\tb\né€🙂"
    assert printable(f"{TITLE}{CLEAR}\r\b\x7f\u202e\udcff") == (r"\x1b]0;owned\x07\x1b[2J\x9b2J\r\x08\x7f\u202e\udcff")
    assert printable(printable(NASTY)) == printable(NASTY)


def test_nothing_acts_on_a_terminal() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=200)
    console.print(f"[red]x[/blue] :smile: {TITLE}", style="bold")
    table = Table(title=f"[/t]{CLEAR}")
    table.add_column("[/c]")
    table.add_row(f"[/r]{CLEAR}")
    console.print(table)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    for part in ("[red]x[/blue] :smile: \\x1b]0;owned", "[/t]", "[/c]", "[/r]", r"\x1b[2J"):
        assert part in text
    file = io.StringIO()
    Terminal(file=file, width=200).print(CLEAR, end="")
    assert file.getvalue() == CLEAR, "a file gets the text itself"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("draft_model at T=1 (chain:draft_length=2), 0.5", "draft_model at T=1 (chain:draft_length=2), 0.5"),
        ("[x](y) ![z](q) <b> a|b `c` *d* __e__ ~f~ $g$ &lt;", None),
        ("# head", r"\# head"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("-1.5 and #1", "-1.5 and #1"),
        ("---", r"\---"),
        ("a\n\n# b\r\nc", "a # b c"),
        ("\\", "\\\\"),
    ],
)
def test_markdown_shows_text(text: str, shown: str | None) -> None:
    found = markdown(text)
    if shown is not None:
        assert found == shown
    assert not re.search(r"(?<!\\)[\[\]<>|`*~$&]", found)
    assert re.sub(r"\\([^\w\s]|_)", r"\1", found) == re.sub(r"\s*[\n\r]+\s*", " ", text)


def test_templates_show_what_they_are_filled_with() -> None:
    environment = markdown_environment(twice=lambda text: f"**{text}**")
    template = environment.from_string(
        "{{ x }}\n{{ x|code }}\n{{ x|quoted }}\n{{ x|shell }}\n{{ x|fenced('sh') }}\n{{ 'a'|twice }} {{ 1.5 }}"
    )
    text, code, quoted, shell, *block, last = template.render(x=NASTY + "\n```\n# c").split("\n")
    assert text.startswith(r"\# a # b !\[x\](http://h/i.png) \<img")
    assert code.startswith("```` # a")
    assert code.endswith("````")
    assert json.loads(quoted.replace("\\x1b", "").replace("\\x07", ""))
    assert shell.startswith("'# a # b")
    assert block[0] == block[-1] + "sh" == "````sh", "longer than what is inside"
    assert last == "**a** 1.5"
    assert "\x1b" not in template.render(x=NASTY)


def test_the_time_left_is_at_the_mean_speed_of_this_run() -> None:
    """4 of 10 parts were found; 2 took 20 s in 4,000 updates, and the last of them 1 s."""
    now = 0.0
    bar = Bars(get_time=lambda: now, disable=True)
    task = bar.add_task("sampling", total=10, completed=4)
    column = TimeLeft()
    assert column.render(bar.tasks[0]).plain == "-:--"
    for update in range(4000):
        now = 19 * min(1.0, update / 2000) + max(0, update - 2000) / 2000
        bar.advance(task, 2 / 4000)
    now = 20.0
    assert column.render(bar.tasks[0]).plain == "0:40"
    bar.update(task, completed=10)
    assert column.render(bar.tasks[0]).plain == "0:00"


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
