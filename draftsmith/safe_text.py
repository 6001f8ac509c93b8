"""Untrusted text, shown literally: on terminals, in Markdown, and in recorded commands.

Names, prompts, generated text and command lines may hold escape sequences, markup or secrets.
"""

import json
import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from draftsmith.errors import one_line

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, start an escape sequence or reverse text; line breaks and tabs are not matched."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LONGEST_LOGGED = 400
"""Characters of a line in a log message; the time and the place in the code may stand before it."""
MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")
SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abprs]-|glpat-)[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""Access tokens in the formats of well-known services, and user and password in a URL."""
NAMES_SECRET = re.compile(r"(?i)(?:^|[._-])(?:\w*token|(?:\w+_)?key|apikey|secret|passw(?:or)?d|credentials?|auth\w*)$")
"""Ends of option and key names whose values are hidden: `--token`, `api_key`, `Authorization`."""
HIDDEN = "***"


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, as in \x1b; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class LogLines(logging.LogRecord):
    """A log record whose message is shown literally, in lines of bounded length.

    Other libraries quote values of untrusted configs in their messages. Their colours are removed.
    """

    def getMessage(self) -> str:
        lines = printable(COLOUR.sub("", super().getMessage())).split("\n")
        return "\n".join(line if len(line) <= LONGEST_LOGGED else one_line(line, LONGEST_LOGGED) for line in lines)


class Terminal(Console):
    """A rich console that shows markup and control characters literally.

    Args:
        files_as_is: write text to a file or a pipe unchanged.
    """

    def __init__(self, *, files_as_is: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        self._as_is = files_as_is and not self.is_terminal

    def render_str(self, text: str, **options: Any) -> Text:  # cells are as wide as their escaped text
        return super().render_str(text if self._as_is else printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control or self._as_is else segment._replace(text=printable(segment.text))


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as a shell reads it, in which values that look like secrets are hidden."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hide and not argument.startswith("--"):
            argument = HIDDEN
        elif equals and value and NAMES_SECRET.search(name):
            argument = f"{name}={HIDDEN}"
        hide = not equals and argument.startswith("-") and NAMES_SECRET.search(argument) is not None
        argument = re.sub(r"(?i)\b((?:authorization|cookie)\s*[:=]\s*|bearer\s+).*", rf"\1{HIDDEN}", argument)
        shown.append(SECRET.sub(HIDDEN, argument))
    return shlex.join(shown)


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
