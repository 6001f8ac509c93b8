"""Text and progress on terminals, and text in Markdown: control characters and markup are shown literally."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import jinja2
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
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


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def time_left() -> ProgressColumn:
    """Return a column with the remaining time at the mean speed of the last hour."""
    return TimeRemainingColumn(compact=True)


def units() -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar that counts units: their number, and the remaining time."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time_left()


class Bars(Progress):
    """rich's progress bars, which print their present state every ten seconds where stderr is no terminal."""

    seconds = 10.0
    """Time between two such lines; a stage whose first unit takes longer prints them, too."""

    def __init__(self, *columns: str | ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, speed_estimate_period=3600.0, **options)
        self._ended = Event()

    def start(self) -> None:
        super().start()
        if not self.disable and not self.console.is_terminal:
            Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self.live.transient:  # nothing is left, hence no line that a line break would end
            self.live.stop()
        else:
            super().stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(self.seconds):
            self.console.print(self.make_tasks_table(self.tasks))


@contextmanager
def stage(name: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show `name` and the elapsed time on stderr and, if the number of parts is known, a bar and the time left.

    Yields a function to call after each part, or with a number of parts. If stderr is not a terminal, print the name,
    and a line every ten seconds.
    """
    console = Terminal(stderr=True)
    if shown and not console.is_terminal:
        console.print(f"  stage: {name}", markup=False, soft_wrap=True)
    left = () if total is None else (BarColumn(), MofNCompleteColumn(), time_left())
    columns = (TextColumn("{task.description}"), TimeElapsedColumn(), *left)
    with Bars(*columns, console=console, disable=not shown, transient=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)

        def done(parts: float = 1) -> None:
            bar.advance(task, parts)

        yield done


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
