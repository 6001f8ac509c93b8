"""Locks on output folders and on parts of the cache: a second process is refused, or waits. They end with the process.

A lock is the kernel's (`flock`) on a small file that says who holds it; a killed process holds nothing. Of a run in
several processes the main one alone takes locks.
"""

import errno
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.errors import ConfigError
from draftsmith.storage import cache_dir, require_room

LOCK = ".lock"
"""Inside a folder that is held."""
CACHE_KEY = "DRAFTSMITH_CACHE"
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Of file systems without locks, such as some that are mounted over a network."""
POLL = 0.2
"""Seconds between two attempts of a process that waits."""
LONGEST_NAME = 200


@contextmanager
def hold_folder(key: str, folder: Path) -> Iterator[None]:
    """Make `folder`, and keep other processes from it while the block runs; left empty, a new one is removed again.

    Raises:
        ConfigError: `key=folder` and the process that holds it; for a file; or for what cannot be written or is full.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}={folder} is a file; expected a folder")
    new = not folder.exists()
    try:
        with _locked(key, folder, folder / LOCK, wait=False):
            require_room(key, folder)
            yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def hold_name(key: str, path: Path) -> Iterator[None]:
    """As `hold_folder`, of a file or of a folder that is replaced as a whole: the lock lies beside it."""
    with _locked(key, path, _beside(path), wait=False):
        require_room(key, path.parent)
        yield


@contextmanager
def hold_cache(path: Path) -> Iterator[None]:
    """Keep other processes from `path`, a part of the cache; while another one holds it, say so and wait for it.

    What is to be written may be there when the block begins: the other one has written it.
    """
    with _locked(CACHE_KEY, path, _beside(path), wait=True):
        require_room(CACHE_KEY, path.parent)
        yield


def require_cache() -> None:
    """ConfigError unless the cache can be written and has room."""
    require_room(CACHE_KEY, cache_dir())


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(key: str, place: Path, file: Path, *, wait: bool) -> Iterator[None]:
    """A lock that this process holds already is taken again."""
    lock = FileLock(file, mode=0o666, is_singleton=True, preserve_lock_file=True)
    mine = ""
    try:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _acquire(lock, place, file, key, wait)
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            mine = f"process {os.getpid()} on {platform.node()} since {since}"
            if lock.lock_counter == 1:
                file.write_text(mine, encoding="utf-8")
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                why = error.strerror or error
                raise ConfigError(f"{key}={place} cannot be written ({why}); expected a folder with room") from error
            print(f"{key}={place}: no locks on this file system; let one process at a time write", file=sys.stderr)
        yield
    finally:
        if lock.is_locked:
            if lock.lock_counter == 1 and mine.startswith(_read(file)):
                with suppress(OSError):
                    file.unlink()  # while it is held: who waits for it notices, and makes a new one
            lock.release()


def _acquire(lock: FileLock, place: Path, file: Path, key: str, wait: bool) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _read(file) or "another process"
        if not wait:
            raise ConfigError(
                f"{key}={place} is in use by {holder}; expected another one, or to wait until that process ends"
            ) from None
        print(f"waiting for {holder}, which writes {place}", file=sys.stderr, flush=True)
        lock.acquire(timeout=-1, poll_interval=POLL)


def _read(file: Path) -> str:
    """Who holds the lock, as one line; '' where that is not known."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")[:LONGEST_NAME]
    except OSError:
        return ""
    return "".join(character for character in text if character.isprintable())
