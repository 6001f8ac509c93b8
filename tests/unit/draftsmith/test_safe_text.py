"""Escape sequences, markup and secrets in text are shown literally or hidden."""

import io
import json
import logging
import re

import pytest
from rich.table import Table

from draftsmith.provenance import environment
from draftsmith.safe_text import HIDDEN, LogLines, Terminal, command_line, markdown, markdown_environment, printable

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J\x9b2J"
NASTY = "# a\n# b ![x](http://h/i.png) <img src=http://h/i.png> | c ` d " + TITLE


def test_control_characters_are_written_out() -> None:
    assert printable("a\tb\né€🙂") == "a\tb\né€🙂"
    assert printable(f"{TITLE}{CLEAR}\r\b\x7f\u202e\udcff") == (r"\x1b]0;owned\x07\x1b[2J\x9b2J\r\x08\x7f\u202e\udcff")
    assert printable(printable(NASTY)) == printable(NASTY)


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_acts_on_a_terminal(terminal: bool) -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=terminal, width=200)
    console.print(f"[red]x[/blue] :smile: {TITLE}", style="bold")
    table = Table(title=f"[/t]{CLEAR}")
    table.add_column("[/c]")
    table.add_row(f"{CLEAR}[/r]")
    console.print(table)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    for part in ("[red]x[/blue] :smile: \\x1b]0;owned", "[/t]", "[/c]", "[/r]", r"\x1b[2J\x9b2J"):
        assert part in text


def test_log_lines_of_libraries_are_bounded_and_literal() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("[library] %(message)s"))
    for text in ("short", f"\x1b[1m{TITLE}\x1b[0m\n{'1' * 5000}", CLEAR * 200):
        handler.emit(LogLines("library", logging.WARNING, __file__, 1, "got %s.", (text,), None))
    assert max(map(len, out.getvalue().splitlines())) < 450
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert out.getvalue().startswith("[library] got short.\n[library] got \\x1b]0;owned\\x07\n1111")


def test_files_may_get_text_as_it_is() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        Terminal(file=out, force_terminal=terminal, files_as_is=True, width=200).print(CLEAR, end="")
        assert (CLEAR in out.getvalue()) == (not terminal)


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


TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["eval", "--token", "abc", "--out", "x"], f"eval --token '{HIDDEN}' --out x"),
        (["--api-key=abc", "--key", "k"], f"'--api-key={HIDDEN}' --key '{HIDDEN}'"),
        (["w.api_key=abc", "key=1", "password=p q"], f"'w.api_key={HIDDEN}' 'key={HIDDEN}' 'password={HIDDEN}'"),
        (["--target", TOKEN, f"x={TOKEN}"], f"--target '{HIDDEN}' 'x={HIDDEN}'"),
        (["Authorization: Bearer abc"], f"'Authorization: {HIDDEN}'"),
        (["https://me:secret@host/x"], f"'https://{HIDDEN}@host/x'"),
        (["sk-proj-" + "a" * 24, "AKIA" + "A" * 16], f"'{HIDDEN}' '{HIDDEN}'"),
        (["--prompts", "a b/it's.jsonl", ""], """--prompts 'a b/it'"'"'s.jsonl' ''"""),
        (["--token"], "--token"),
        (["--max-new-tokens", "12", "data.prompt_tokens=5"], "--max-new-tokens 12 data.prompt_tokens=5"),
        (["--drafter", "d=runs/monkey=1/drafter", "--seed", "1"], "--drafter d=runs/monkey=1/drafter --seed 1"),
    ],
)
def test_commands_are_kept_without_secrets(arguments: list[str], kept: str) -> None:
    assert command_line(arguments) == kept


def test_provenance_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/draftsmith", "eval", f"--token={TOKEN}"])
    assert environment()["command"] == f"draftsmith eval '--token={HIDDEN}'"
