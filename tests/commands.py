"""Command lines that run in this process, and their prompts."""

import json
from pathlib import Path

from draftsmith.cli import main


def run(*arguments: object) -> int:
    """Run a command and return its exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def write_prompts(file: Path, *texts: str) -> Path:
    """Write a prompt file of the texts and return its path."""
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file
