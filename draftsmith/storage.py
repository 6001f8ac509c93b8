"""Writing so that a kill at any moment leaves either the old file or the new one."""

import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftsmith.errors import ConfigError, DraftsmithError

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+")
ROOM = 2**20
"""Bytes that have to fit before any work starts."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def cache_dir() -> Path:
    """Where built targets and sampled responses are kept: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith").expanduser()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """A folder whose name survives a power cut: it stands in its parent, which is written too."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _fsync(folder.parent)


def require_writable(key: str, folder: Path) -> None:
    """ConfigError unless `atomic_folder` could write it: it has a name of its own, in a folder that may be written."""
    if folder.name in ("", ".."):
        raise ConfigError(f"{key}={folder} has no name of its own; expected a new folder, by its name")
    there = next(place for place in folder.absolute().parents if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{key}={folder} cannot be made in {there}; expected a folder that may be written")


def require_apart(key: str, out: Path, source: Path, *, may_contain: bool = False) -> None:
    """ConfigError where `out` is, lies in or, unless it may, contains the folder `source`; links are followed."""
    place, read = out.resolve(), source.expanduser().resolve()
    inside, around = place.is_relative_to(read), read.is_relative_to(place)
    if inside or (around and not may_contain):
        how = "is" if inside and around else "lies in" if inside else "contains"
        raise ConfigError(f"{key}={out} {how} {source}, which is read; expected a folder apart from it")


def require_room(key: str, folder: Path) -> None:
    """Make `folder`; ConfigError unless a file of `ROOM` bytes can be written into it."""
    file = folder / f".room.tmp-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("wb") as handle:
                handle.write(bytes(ROOM))
                handle.flush()
                os.fsync(handle.fileno())
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}={folder} cannot be written ({error.strerror}); expected a folder with at least 1 MiB of room"
        ) from error


@contextmanager
def writing(place: Path | str, then: str) -> Iterator[None]:
    """Make of what a full or read-only disk raises a DraftsmithError of one line; `then`: what is kept, what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DraftsmithError(f"{place} cannot be written ({why}); {then}") from error


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the block ends without an error.

    A folder already at `path` is replaced; until then it stays as it was. Where `path` is a link, what it leads to is.
    """
    path = path.resolve() if path.is_symlink() else path
    _make(path.parent)
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            _fsync(file)
        if not path.exists():
            temporary.rename(path)
        elif not _exchange(temporary, path):
            retired = path.parent / f".{path.name}.old-{os.getpid()}"
            shutil.rmtree(retired, ignore_errors=True)
            path.rename(retired)
            temporary.rename(path)
            shutil.rmtree(retired, ignore_errors=True)
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def is_leftover(name: str) -> bool:
    """Whether a file or folder of this name is what a killed write has left behind."""
    return LEFTOVER.fullmatch(name) is not None


def clear_leftovers(folder: Path) -> None:
    """Delete what killed writes have left in `folder`; what one had put aside and not yet replaced is put back."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = LEFTOVER.fullmatch(entry.name)
        if found is None:
            continue
        if found["kind"] == "old" and not (folder / found["name"]).exists():
            entry.rename(folder / found["name"])
        elif entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    _make(path.parent)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON in one step."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
