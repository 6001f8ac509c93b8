"""Writing so that a kill at any moment leaves either the old file or the new one."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where built targets and sampled responses are kept: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith").expanduser()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the block ends without an error.

    A folder already at `path` is replaced; until the rename it stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _fsync(file)
        if path.exists():
            retired = path.parent / f".{path.name}.old-{os.getpid()}"
            shutil.rmtree(retired, ignore_errors=True)
            path.rename(retired)
            temporary.rename(path)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            temporary.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    _fsync(temporary)
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON in one step."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
