"""Versions of a drafter in a folder: v0001, v0002, …, and the link `latest` to the newest of them."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from draftsmith.errors import ConfigError
from draftsmith.storage import atomic_folder, clear_leftovers, is_leftover, writing

LATEST = "latest"
VERSION = re.compile(r"v(\d{4,})")


class Versions:
    """The versions in a folder. Each is written in one step, so that a kill leaves whole ones only.

    Args:
        keep: newest versions that are kept; older ones are deleted.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def require_own(self, others: set[str]) -> None:
        """Raise ConfigError if the folder holds anything but versions and files of the names `others`."""
        for entry in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            own = entry.name in {LATEST, *others} or VERSION.fullmatch(entry.name) or is_leftover(entry.name)
            if not own:
                raise ConfigError(
                    f"out={self.folder} holds {entry.name}; expected a new folder, or one of this command"
                )

    def newest(self) -> Path | None:
        """Return the newest version; None if there is none."""
        return max(self._all(), key=_number, default=None)

    def mend(self) -> None:
        """Delete what a killed write has left, and set the link."""
        clear_leftovers(self.folder)
        self._finish()

    def add(self, write: Callable[[Path], None]) -> Path:
        """Write a new version with `write`, which fills the folder that it is given; return its place."""
        newest = self.newest()
        place = self.folder / f"v{1 if newest is None else _number(newest) + 1:04d}"
        with writing(place, "the versions before are whole; free some space, and start again"):
            with atomic_folder(place) as temporary:
                write(temporary)
            self._finish()
        return place

    def _all(self) -> list[Path]:
        return [entry for entry in self.folder.iterdir() if VERSION.fullmatch(entry.name) and entry.is_dir()]

    def _finish(self) -> None:
        """Point the link at the newest version, and delete the oldest ones."""
        versions = sorted(self._all(), key=_number)
        if not versions:
            return
        link = self.folder / f".{LATEST}.tmp-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(versions[-1].name)
        link.replace(self.folder / LATEST)
        for old in versions[: -self._keep]:
            # Renamed first, so that a kill leaves no part of a version under its name.
            shutil.rmtree(old.rename(self.folder / f".{old.name}.tmp-{os.getpid()}"))


def _number(version: Path) -> int:
    return int(version.name.removeprefix("v"))
