"""Command lines that run in this process, and the files that they read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main


def run(*arguments: object) -> int:
    """Run a command and return its exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command and return its exit code, its output and its errors."""
    code, told = run(*arguments), capsys.readouterr()
    return code, told.out, told.err


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """Write a JSON line for each row and return the path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_prompts(file: Path, *texts: str) -> Path:
    """Write a prompt file of the texts and return its path."""
    return write_rows(file, ({"prompt": text} for text in texts))
