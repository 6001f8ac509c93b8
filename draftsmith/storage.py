"""Atomic writes, and locks on output folders and on parts of the cache.

A kill at any moment leaves either the old file or the new one. A folder that is replaced is moved aside first. If the
process is killed before the new one has its name, the next `clear_leftovers` moves the old one back.

A lock is a `flock` on a small file; the kernel releases it when the process ends or is killed. In a run of several
processes only the main process takes locks.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from draftsmith.errors import ConfigError, DraftsmithError

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+")
LOCK = ".lock"
"""Name of the lock file inside a locked folder."""
POLL = 0.2
"""Seconds between two attempts of a process that waits for a lock."""


def cache_dir() -> Path:
    """Return the folder for built targets and sampled responses: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith").expanduser()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(file: Path) -> None:
    """Give a file the permissions of a new one: safetensors lets only its owner read what it writes."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(file.stat().st_mode | (0o666 & ~umask))


def require_writable(key: str, folder: Path) -> None:
    """Check that `atomic_folder` could write `folder`; raise ConfigError otherwise.

    The path must end in a name, and the folder that it is created in must be writable.
    """
    if folder.name in ("", ".."):
        raise ConfigError(f"{key}={folder} has no name of its own; expected a path that ends in a name")
    _require_place(key, folder)


def require_folder(key: str, folder: Path) -> None:
    """Raise ConfigError for a file, and for a folder that does not exist and cannot be made."""
    if not folder.exists():
        _require_place(key, folder)
    elif not folder.is_dir():
        raise ConfigError(f"{key}={folder} is a file; expected a folder")


def _require_place(key: str, folder: Path) -> None:
    there = next(place for place in folder.absolute().parents if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{key}={folder} cannot be made in {there}; expected a path in a writable folder")


def require_empty(key: str, folder: Path) -> None:
    """Check that `atomic_folder` would replace no file in `folder`; raise ConfigError otherwise."""
    require_writable(key, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{key}={folder} exists already; expected a new or an empty folder")


def require_writable_file(key: str, file: Path) -> None:
    """Check that `write_text` could write `file`; raise ConfigError otherwise."""
    if file.is_dir():
        raise ConfigError(f"{key}={file} is a folder; expected the name of a file")
    require_writable(key, file)


@contextmanager
def writing(place: Path | str, then: str) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a DraftsmithError.

    Args:
        place: what is written, for the message.
        then: what is kept and what to do, for the message.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DraftsmithError(f"{place} cannot be written ({why}); {then}") from error


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the block ends without an error.

    An existing folder at `path` stays unchanged until it is moved aside for the new one. If `path` is a link, its
    destination is replaced.
    """
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            if not file.is_dir():
                apply_umask(file)
            _fsync(file)
        _replace(path, temporary)
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(path: Path, new: Path) -> None:
    """Give the folder `new` the name `path`; a folder of that name is moved aside and then deleted."""
    retired = path.parent / f".{path.name}.old-{os.getpid()}"
    shutil.rmtree(retired, ignore_errors=True)
    replaced = path.exists()
    if replaced:
        path.rename(retired)
    try:
        new.rename(path)
    except OSError:
        if replaced:
            retired.rename(path)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def is_leftover(name: str) -> bool:
    """Return whether a file or folder of this name was left by a killed write."""
    return LEFTOVER.fullmatch(name) is not None


def clear_leftovers(folder: Path) -> None:
    """Delete what killed writes have left in `folder`; a folder that was moved aside but not replaced is moved back."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = LEFTOVER.fullmatch(entry.name)
        if match is None:
            continue
        if match["kind"] == "old" and not (folder / match["name"]).exists():
            entry.rename(folder / match["name"])
        elif entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by `text` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file `path` by `value` as indented JSON in one step."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class JsonLines:
    """A file of JSON values, one a line, to which values are appended. A kill loses at most the line being written.

    Reading never changes the file, so that any process may read it; only one may append at a time.

    Args:
        then: what is kept and what to do where the disk is full, for the message.
        sync: each line is on disk before `append` returns, so that it survives a power failure.
    """

    def __init__(self, path: Path, then: str, *, sync: bool = False) -> None:
        self.path, self._then, self._sync = path, then, sync

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the beginning of each complete line and the line; none where there is no file."""
        begins = 0
        with suppress(FileNotFoundError, NotADirectoryError), self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield begins, line
                begins += len(line)

    def line(self, begins: int) -> bytes:
        """Return the line that begins there."""
        with self.path.open("rb") as file:
            file.seek(begins)
            return file.readline()

    def append(self, value: Any) -> int:
        """Append a line in place of an incomplete one that a killed process has left, and return where it begins."""
        with writing(self.path, self._then):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                begins = file.seek(0, os.SEEK_END)
                file.seek(max(0, begins - 1))
                if file.read() not in (b"", b"\n"):
                    begins = file.truncate(sum(len(line) for _, line in self.lines()))
                file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
        return begins


@contextmanager
def hold_folder(key: str, folder: Path, discard: Iterable[str] = ()) -> Iterator[None]:
    """Create `folder` and lock it while the block runs; a new folder that is still empty then is removed.

    `discard`: names of files that are deleted once it is locked.

    Raises:
        ConfigError: if another process holds the lock, for a file, and for a folder that cannot be written.
    """
    require_folder(key, folder)
    new = not folder.exists()
    try:
        with _locked(key, folder, folder / LOCK, wait=False):
            for name in discard:
                (folder / name).unlink(missing_ok=True)
            yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def hold_name(key: str, path: Path) -> Iterator[None]:
    """Lock a file, or a folder that is replaced as a whole, as `hold_folder` does; the lock file lies next to it."""
    with _locked(key, path, _beside(path), wait=False):
        yield


@contextmanager
def hold_cache(path: Path) -> Iterator[None]:
    """Lock `path`, a part of the cache, while the block runs; if another process holds it, print that and wait.

    After waiting, `path` may exist: the other process has written it.
    """
    with _locked("DRAFTSMITH_CACHE", path, _beside(path), wait=True):
        yield


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(key: str, place: Path, file: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock on `file` while the block runs; a process may take a lock again that it holds already."""
    lock = FileLock(file, mode=0o666, is_singleton=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o666))  # a lock does not say why it cannot make its file
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise ConfigError(
                f"{key}={place} is in use by another process; expected another path, or wait until that process ends"
            ) from None
        print(f"waiting for another process, which is writing {place}", file=sys.stderr, flush=True)
        lock.acquire(timeout=-1, poll_interval=POLL)
    except OSError as error:
        raise ConfigError(f"{key}={place} cannot be written ({error.strerror}); expected a writable folder") from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):
                file.unlink()  # still locked: a waiting process notices, and creates a new file
        lock.release()
