"""Progress bars; a line now and then where there is no terminal."""

from threading import Event, Thread
from typing import Any

from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class TimeLeft(ProgressColumn):
    """The time that the rest takes at the mean speed since the start.

    rich's own column knows the speed of the last 30 seconds alone: it stays empty where a unit takes longer.
    """

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        done, elapsed = task.completed - task.fields.get("begun", 0), task.finished_time or task.elapsed
        if done <= 0 or not elapsed or task.total is None:
            return Text("-:-- left")
        return Text(f"{clock(elapsed * max(0.0, task.total - task.completed) / done)} left")


class Bars(Progress):
    """rich's progress bars, which print their present state every ten seconds where stderr is no terminal."""

    seconds = 10.0
    """Time between two such lines; a stage whose first unit takes longer prints them, too."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._ended = Event()

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        """Add a bar; units that are `completed` from the start take no time."""
        return super().add_task(description, start, total, completed, visible, begun=completed, **fields)

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
