"""Progress bars; a line now and then where there is no terminal."""

from typing import Any

from rich.progress import Progress, TaskID


class Bars(Progress):
    """rich's progress bars, which print their present state at most once a minute where stderr is no terminal."""

    seconds = 60.0
    """Least time between two such lines."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._printed = self.get_time()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print()

    def update(self, task_id: TaskID, **values: Any) -> None:
        super().update(task_id, **values)
        self._print()

    def _print(self) -> None:
        now = self.get_time()
        if self.disable or self.console.is_terminal or now - self._printed < self.seconds:
            return
        self._printed = now
        self.console.print(self.make_tasks_table(self.tasks))
