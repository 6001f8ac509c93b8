"""Text and progress on terminals, and text in Markdown: control characters and markup are shown literally."""

import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, Self

import jinja2
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.text import Text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, start an escape sequence or reverse text; line breaks and tabs are not matched."""
MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def quiet_imports() -> None:
    """Silence lines of libraries at import: files that torchao cannot load, and that DeepSpeed takes the CPU."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_no_fallback)  # it sets the level of its logger itself


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, as in \x1b; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A rich console without markup, which escapes control characters in text on a terminal; a file gets the text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    @classmethod
    def for_tables(cls) -> Self:
        """Return the terminal of stdout; where that is a file, it is as wide as tables need."""
        console = cls()
        return console if console.is_terminal else cls(width=110)

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich would leave with exit code 1, which is a verdict of `check`."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            plain = segment.control or not self.is_terminal
            yield segment if plain else segment._replace(text=printable(segment.text))


def interval(values: list[float] | None, digits: int) -> str:
    """Format an interval as `[1.70, 1.86]`, and None as an empty string."""
    return "" if values is None else f"[{values[0]:.{digits}f}, {values[1]:.{digits}f}]"


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class TimeLeft(ProgressColumn):
    """A column with the remaining time at the mean speed since the bar began.

    rich's own estimates the speed from the last 1,000 updates, which are seconds where each token is one.
    """

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        done = task.completed - task.fields["found"]
        if task.total is None or not task.elapsed or done <= 0:
            return Text("-:--", style="progress.remaining")
        left = 0.0 if task.finished else task.elapsed * (task.total - task.completed) / done
        return Text(clock(left), style="progress.remaining")


def units() -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar that counts units: their number, and the remaining time."""
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft()


class Bars(Progress):
    """rich's progress bars, which print their present state every ten seconds where stderr is no terminal."""

    seconds = 10.0
    """Time between two such lines; a stage whose first unit takes longer prints them, too."""

    def __init__(self, *columns: str | ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._ended = Event()

    def add_task(self, description: str, *arguments: Any, completed: int = 0, **options: Any) -> TaskID:
        """Add a task, of which `completed` parts were done by an earlier run: they do not count as speed."""
        return super().add_task(description, *arguments, completed=completed, found=completed, **options)

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
    left = () if total is None else (BarColumn(), MofNCompleteColumn(), TimeLeft())
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
