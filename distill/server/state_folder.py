"""A folder into which an engine writes hidden states, in files that hs-connectors reads."""

import asyncio
import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.distill.data_section import TeacherServerSection
from draftsmith.distill.server.client import BadAnswer
from draftsmith.errors import ConfigError, EngineLost, reason_of

POLL_SECONDS = 0.005
"""Time between two looks at the lock of a file that the engine has not written yet."""
OLD_SECONDS = 10.0
"""Age of files that nobody reads: those of an earlier run, and of answers, whose states the engine writes, too."""
FILES = ("cmpl-*.safetensors*", "chatcmpl-*.safetensors*")
"""Names of the files that vLLM's connectors write, by the request's id."""
FP8_MODULE = "hs_connectors.fp8_hidden_states_connector"


def is_written(path: Path) -> bool:
    """Return whether the engine has released the lock of a file, which is then deleted."""
    import fcntl  # not on Windows

    lock = path.with_name(f"{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return path.exists()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


async def written(path: Path) -> None:
    """Wait until the engine has released the lock of a file."""
    while not is_written(path):
        await asyncio.sleep(POLL_SECONDS)


def text_key(ids: list[int]) -> int:
    """Return the key of a text whose states were written with its answer, and lack the last token's."""
    return hash(tuple(ids[:-1]))


def _states_of(file: Path) -> Path:
    """Return the file to which a lock belongs."""
    return file.with_suffix("") if file.suffix == ".lock" else file


class FolderTransport:
    """States in files of a folder; see `Transport`."""

    def __init__(self, settings: TeacherServerSection) -> None:
        assert settings.folder is not None, "checked by the section"
        self.given, self.transfer = settings.folder, settings.transfer
        self.answers_bytes, self.timeout = settings.answers_gib * 2**30, settings.timeout_seconds
        self.folder = Path(self.given).expanduser().resolve()
        self.place = str(self.folder)

    def open(self) -> None:
        from hs_connectors import FileTransfer, FP8Transfer

        if not self.folder.is_dir() or not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError.of("teacher.server.folder", self.given, "a folder that this process reads and writes")
        self._reader = {"file": FileTransfer, "fp8": FP8Transfer}[self.transfer](self.folder)

    def services(self) -> list[str]:
        return []

    def connector(self, host: str) -> dict[str, Any]:
        named = {"kv_connector": "ExampleHiddenStatesConnector"}
        if self.transfer == "fp8":
            named = {"kv_connector": "FP8HiddenStatesConnector", "kv_connector_module_path": FP8_MODULE}
        return {**named, "kv_connector_extra_config": {"shared_storage_path": self.given}}

    def require_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free + sum(size for _, size, _ in self._found())
        if needed + self.answers_bytes > free:
            kept = f", those of answers {self.answers_bytes / 2**30:.1f} GiB" * bool(self.answers_bytes)
            raise ConfigError(
                f"teacher.server.folder={self.folder}: {free / 2**30:.1f} GiB are free, and states in flight take up "
                f"to {needed / 2**30:.1f} GiB{kept}; expected more room, or less of teacher.server.answers_gib, "
                "teacher.server.ahead or train.batch_size"
            )

    def named(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the path of a file of the folder."""
        named = params.get("hidden_states_path")
        if not isinstance(named, str):
            raise BadAnswer("no kv_transfer_params.hidden_states_path: the engine has no connector for hidden states")
        path = Path(named).resolve()
        if path.parent != self.folder or path.suffix != ".safetensors":
            raise BadAnswer(f"states in {path}, which is no file of teacher.server.folder={self.folder}")
        return {"hidden_states_path": str(path)}

    async def read(self, named: dict[str, Any]) -> dict[str, Tensor]:
        path = Path(named["hidden_states_path"])
        await written(path)
        sample = await asyncio.to_thread(self._reader.get_generated, named)
        if sample is None:
            raise BadAnswer(f"no file {path.name}")
        return sample

    async def delete(self, named: dict[str, Any]) -> None:
        path = Path(named["hidden_states_path"])
        for file in (path, path.with_name(f"{path.name}.lock")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise EngineLost(
                    f"{file} cannot be deleted ({reason_of(error)}), and the folder would fill up"
                ) from error

    def clear(self, age: float = OLD_SECONDS) -> None:
        """Delete files older than `age` seconds, but the newest ones, up to `answers_gib`, and those being written."""
        room = self.answers_bytes
        for modified, size, file in self._found():
            room -= max(1, size)  # a lock is empty
            if room >= 0 or time.time() - modified <= age:
                continue
            with suppress(OSError):  # another process may delete it, too
                if not self.answers_bytes or is_written(_states_of(file)):
                    file.unlink()

    async def answers(self, wanted: Collection[int]) -> dict[int, dict[str, Any]]:
        """Return what names the states that were written with answers, by `text_key`; delete those not `wanted`."""
        found: dict[int, dict[str, Any]] = {}
        for file in dict.fromkeys(_states_of(file) for _, _, file in self._found()):
            key, named = None, {"hidden_states_path": str(file)}
            with suppress(BadAnswer, OSError, RuntimeError, TypeError, SafetensorError):
                async with asyncio.timeout(self.timeout):
                    await written(file)
                with safe_open(self.named(named)["hidden_states_path"], "pt") as opened:
                    key = text_key([*opened.get_tensor("token_ids").tolist(), 0])
            if key is not None and key in wanted and key not in found:
                found[key] = named
            else:
                await self.delete(named)
        return found

    def _found(self) -> list[tuple[float, int, Path]]:
        """Return when the engine wrote its files, and the size of each; the newest first."""
        found: list[tuple[float, int, Path]] = []
        for file in [file for pattern in FILES for file in self.folder.glob(pattern)]:
            with suppress(OSError):
                status = file.lstat()
                found.append((status.st_mtime, status.st_size, file))
        return sorted(found, reverse=True)

    def close(self) -> None: ...
