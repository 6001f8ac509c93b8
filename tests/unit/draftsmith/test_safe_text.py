"""Escape sequences and markup in text are shown literally."""

import io
import json
import re

import pytest
from rich.table import Table

from draftsmith.safe_text import Terminal, markdown, markdown_environment, printable

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
