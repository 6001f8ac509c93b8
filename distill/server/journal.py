"""The answers of a server on disk, a line each: nothing that was answered is asked again after a kill."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, TypeAdapter, ValidationError

from draftsmith.distill.server.answers import Answer
from draftsmith.errors import ConfigError
from draftsmith.reading import parse_json
from draftsmith.storage import writing

KEPT = "answers so far are kept; once there is room, the same command continues with the others"
Place = tuple[int, int, int]
"""Number of the response, of the question (see `question_numbers`), and of its turn."""


class _Line(BaseModel):
    """A line after the first, which holds the settings."""

    place: Place
    answer: Answer


LINE = TypeAdapter(_Line)


class Journal:
    """The file of answers, as a context manager. Answers stay on disk and are read one at a time.

    Args:
        settings: what the answers depend on, for the first line.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self._settings = path, settings
        self._begins: dict[Place, int] = {}

    def __enter__(self) -> Self:
        with writing(self.path, KEPT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        try:
            self._index()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, place: Place) -> bool:
        return place in self._begins

    def __len__(self) -> int:
        return len(self._begins)

    def get(self, place: Place) -> Answer | None:
        """Return an answer; None if there is none yet."""
        if place not in self._begins:
            return None
        self._file.seek(self._begins[place])
        return self._parse(self._file.readline()).answer

    def add(self, place: Place, answer: Answer) -> None:
        """Append an answer. A kill loses at most the answer that is being written."""
        assert place not in self._begins, f"{place} was answered twice"
        self._begins[place] = self._append({"place": place, "answer": asdict(answer)})

    def copy(self, file: Path, numbers: set[int]) -> None:
        """Append the answers to these questions from another journal, to which another process may still write."""
        if file == self.path:
            return
        with suppress(FileNotFoundError, ConfigError), file.open("rb") as lines:
            next(lines, None)
            for line in lines:
                read = self._parse(line)
                if read.place[1] in numbers and read.place not in self:
                    self.add(read.place, read.answer)

    def _append(self, value: dict[str, Any]) -> int:
        """Append a line, and return where it begins."""
        with writing(self.path, KEPT):
            begins = self._file.seek(0, os.SEEK_END)
            self._file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
            self._file.flush()
        return begins

    def _index(self) -> None:
        """Find where every answer begins; an incomplete last line is removed."""
        self._file.seek(0)
        begins = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                os.truncate(self.path, begins)
                break
            if begins:
                self._begins[self._parse(line).place] = begins
            begins += len(line)
        if not begins:
            self._append({"settings": self._settings})

    def _parse(self, line: bytes) -> _Line:
        try:
            return LINE.validate_python(parse_json(line))
        except (ValidationError, ValueError) as error:
            raise ConfigError(f"{self.path} is damaged; expected what draftsmith wrote, or no such file") from error
