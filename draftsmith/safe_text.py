"""Text of models, repositories and servers, shown literally on terminals and in Markdown."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import jinja2
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, start an escape sequence or reverse text; line breaks and tabs are not matched."""
MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, as in \x1b; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A rich console without markup, which escapes control characters in text on a terminal; a file gets the text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            plain = segment.control or not self.is_terminal
            yield segment if plain else segment._replace(text=printable(segment.text))


def markdown(text: str) -> str:
    """Return one line of Markdown that renders as this text."""
    line = MARKUP.sub(r"\\\g<0>", _one_line(text))
    line = re.sub(r"^(\s*)(?=[-+#=]+(?:\s|$))", r"\1\\", line)  # a list item, a heading or a rule
    return re.sub(r"^(\s*\d+)(?=[.)]\s)", r"\1\\", line)


def markdown_environment(**filters: Any) -> jinja2.Environment:
    """Return an environment for Markdown templates that shows every value as text.

    Filters for other contexts: `code` for inline code, `fenced` for a code block, `quoted` for a Python string, `shell`
    for a shell argument. The results of `filters` are Markdown and are not escaped.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    own = {"code": _code, "fenced": _fenced, "quoted": _quoted, "shell": _shell, **filters}
    environment.filters |= {name: _marked(function) for name, function in own.items()}
    return environment


def _shown(value: Any) -> Any:
    return Markup(markdown(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _marked(function: Any) -> Any:
    return lambda *arguments: Markup(function(*arguments))


def _one_line(text: str) -> str:
    return printable(re.sub(r"\s*[\n\r]\s*", " ", str(text)))


def _code(text: str) -> str:
    text = _one_line(text).replace("|", r"\|")
    ticks = "`" * (1 + _longest_run(text))
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}{language}\n{printable(text).rstrip()}\n{fence}"


def _quoted(text: str) -> str:
    return printable(json.dumps(str(text), ensure_ascii=False))


def _shell(text: str) -> str:
    return shlex.quote(_one_line(text))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
