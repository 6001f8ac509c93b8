"""Locks on output folders and on parts of the cache: a second process is refused, or waits.

A lock is a `flock` on a small file that names the holder; the kernel releases it when the process ends or is killed.
In a run of several processes only the main process takes locks.
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
"""Name of the lock file inside a locked folder."""
CACHE_KEY = "DRAFTSMITH_CACHE"
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Error numbers of file systems without locks, such as some network file systems."""
POLL = 0.2
"""Seconds between two attempts of a waiting process."""
LONGEST_NAME = 200
"""Characters that are read of a lock file."""


@contextmanager
def hold_folder(key: str, folder: Path) -> Iterator[None]:
    """Create `folder` and lock it while the block runs; a new folder that is still empty then is removed.

    Raises:
        ConfigError: if another process holds the lock (the message names it), for a file, and for a folder that cannot
            be written or is full.
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
    """Lock a file, or a folder that is replaced as a whole, as `hold_folder` does; the lock file lies next to it."""
    with _locked(key, path, _beside(path), wait=False):
        require_room(key, path.parent)
        yield


@contextmanager
def hold_cache(path: Path) -> Iterator[None]:
    """Lock `path`, a part of the cache, while the block runs; if another process holds it, print that and wait.

    After waiting, `path` may exist: the other process has written it.
    """
    with _locked(CACHE_KEY, path, _beside(path), wait=True):
        require_room(CACHE_KEY, path.parent)
        yield


def require_cache() -> None:
    """Check that the cache can be written and has room; raise ConfigError otherwise."""
    require_room(CACHE_KEY, cache_dir())


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(key: str, place: Path, file: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock on `file` while the block runs; a process may take a lock again that it holds already."""
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
            print(f"{key}={place}: no locks on this file system; run one process at a time", file=sys.stderr)
        yield
    finally:
        if lock.is_locked:
            if lock.lock_counter == 1 and mine.startswith(_read(file)):
                with suppress(OSError):
                    file.unlink()  # still locked: a waiting process notices, and creates a new file
            lock.release()


def _acquire(lock: FileLock, place: Path, file: Path, key: str, wait: bool) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _read(file) or "another process"
        if not wait:
            raise ConfigError(
                f"{key}={place} is in use by {holder}; expected another path, or wait until that process ends"
            ) from None
        print(f"waiting for {holder}, which is writing {place}", file=sys.stderr, flush=True)
        lock.acquire(timeout=-1, poll_interval=POLL)


def _read(file: Path) -> str:
    """Return who holds the lock, as one line; '' if that is unknown."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")[:LONGEST_NAME]
    except OSError:
        return ""
    return "".join(character for character in text if character.isprintable())
