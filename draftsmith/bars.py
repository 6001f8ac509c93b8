"""Progress bars; a line now and then where there is no terminal."""

from threading import Event, Thread
from typing import Any

from rich.progress import Progress


class Bars(Progress):
    """rich's progress bars, which print their present state once a minute where stderr is no terminal."""

    seconds = 60.0
    """Time between two such lines; a stage whose first unit takes longer prints them, too."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._ended = Event()

    def start(self) -> None:
        super().start()
        if not self.disable and not self.console.is_terminal:
            Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self.live.stop()  # rich also prints an empty line where there is no terminal

    def _print_lines(self) -> None:
        while not self._ended.wait(self.seconds):
            self.console.print(self.make_tasks_table(self.tasks))
