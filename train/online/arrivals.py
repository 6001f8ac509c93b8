"""Files that another program writes into a folder, each returned once, when it is whole."""

import json
from pathlib import Path

from draftsmith.storage import write_text

Stamp = tuple[int, int]
"""Time of the last change, and size."""


class Arrivals:
    """The *.safetensors files of a folder and its sub-folders that have not been read.

    A file is offered when it has not changed since the look before. The names of files that were read are kept in a
    journal, by which a later run continues; names of files that no longer exist are dropped from it.
    """

    def __init__(self, folder: Path, journal: Path) -> None:
        self.folder, self._journal = folder, journal
        lines = journal.read_text(encoding="utf-8").split("\n")[:-1] if journal.exists() else []
        self._read = {name for name in map(_name, lines) if name is not None and (folder / name).exists()}
        write_text(journal, "".join(f"{json.dumps(name)}\n" for name in sorted(self._read)))
        self._seen: dict[str, Stamp] = {}
        self.unreadable: dict[str, tuple[Stamp, str]] = {}
        """Files that could not be read as they are, and why; they are offered again when they change."""

    def look(self) -> list[Path]:
        """Return the whole files that are new, the oldest first."""
        found: dict[str, Stamp] = {}
        there: set[str] = set()
        for file in self.folder.rglob("*.safetensors"):
            name = str(file.relative_to(self.folder))
            there.add(name)
            if name not in self._read:
                try:
                    state = file.stat()
                except FileNotFoundError:
                    continue
                found[name] = state.st_mtime_ns, state.st_size
        self._read &= there
        self.unreadable = {name: known for name, known in self.unreadable.items() if found.get(name) == known[0]}
        whole = [name for name, stamp in found.items() if self._seen.get(name) == stamp and name not in self.unreadable]
        self._seen = found
        return [self.folder / name for name in sorted(whole, key=lambda name: (found[name], name))]

    def refuse(self, file: Path, reason: str) -> None:
        """Leave a file that cannot be read until it changes."""
        name = str(file.relative_to(self.folder))
        self.unreadable[name] = self._seen[name], reason

    def refused(self, file: Path) -> bool:
        """Return whether a file could not be read as it is."""
        return str(file.relative_to(self.folder)) in self.unreadable

    def done(self, file: Path, *, delete: bool) -> None:
        """Record that a file was read; or delete it, with the lock file that vLLM writes beside it."""
        if delete:
            file.unlink(missing_ok=True)
            file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
            return
        name = str(file.relative_to(self.folder))
        self._read.add(name)
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(f"{json.dumps(name)}\n")


def _name(line: str) -> str | None:
    """Return the name in a line of the journal; None for a damaged line."""
    try:
        name = json.loads(line)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
