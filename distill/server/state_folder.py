"""The folder into which an engine writes hidden states: its files, its room, and the command that starts the engine."""

import asyncio
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from draftsmith.errors import ConfigError

POLL_SECONDS = 0.005
"""Time between two looks at the lock of a file that the engine has not written yet."""
OLD_SECONDS = 10.0
"""Age of files that nobody reads: those of an earlier run, and of answers, whose states the engine writes, too."""
FILES = ("cmpl-*.safetensors*", "chatcmpl-*.safetensors*")
"""Names of the files that vLLM's connectors write, by the request's id."""
FP8_MODULE = "hs_connectors.fp8_hidden_states_connector"


class Settings(Protocol):
    """Section `teacher.server` of a recipe."""

    model: str
    folder: str
    transfer: Any
    in_flight: int
    ahead: int
    timeout_seconds: float
    patience_minutes: float
    failures: int

    @property
    def addresses(self) -> list[str]: ...


async def written(path: Path) -> None:
    """Wait until the engine has released the lock of a file."""
    import fcntl  # not on Windows

    lock = path.with_name(f"{path.name}.lock")
    while True:
        try:
            handle = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            if path.exists():
                return
            await asyncio.sleep(POLL_SECONDS)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink(missing_ok=True)
            return
        except BlockingIOError:
            await asyncio.sleep(POLL_SECONDS)
        finally:
            os.close(handle)


def sweep(folder: Path, age: float = OLD_SECONDS) -> None:
    """Delete the files of engines that are older than `age` seconds."""
    for file in [file for pattern in FILES for file in folder.glob(pattern)]:
        with suppress(OSError):  # another process may delete it, too
            if time.time() - file.stat().st_mtime > age:
                file.unlink()


@contextmanager
def swept(settings: Settings | None) -> Iterator[None]:
    """Delete the states that an engine writes of answers, which nobody reads, inside the context."""
    if settings is None:
        yield
        return
    folder, done = Path(settings.folder).expanduser().resolve(), threading.Event()
    require_folder(folder, settings.folder)

    def repeat() -> None:
        while not done.wait(OLD_SECONDS / 2):
            sweep(folder)

    thread = threading.Thread(target=repeat, name="states of answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sweep(folder, age=0.0)


def require_folder(folder: Path, given: str) -> None:
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError.of("teacher.server.folder", given, "a folder that this process reads and writes")


def transfer_of(kind: str, folder: Path) -> Any:
    if find_spec("hs_connectors") is None:
        raise ConfigError("teacher.kind='server' needs hs-connectors; expected: pip install 'draftsmith[engine]'")
    from hs_connectors import FileTransfer, FP8Transfer

    return {"file": FileTransfer, "fp8": FP8Transfer}[kind](folder)


def engine_command(
    settings: Settings, model: str, revision: str | None, dtype: str, layers: list[int], longest: int
) -> str:
    """Return the command that starts vLLM for a run; `layers`: the ids whose outputs it returns."""
    extract = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    shown = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if settings.transfer == "fp8":
        connector = {"kv_connector": "FP8HiddenStatesConnector", "kv_connector_module_path": FP8_MODULE}
    folder = {"kv_connector_extra_config": {"shared_storage_path": settings.folder}}
    options: dict[str, Any] = {
        "served-model-name": settings.model,
        "revision": revision,
        "dtype": dtype,
        "max-model-len": longest + 1,
        "speculative-config": json.dumps({**extract, "draft_model_config": shown}),
        "kv-transfer-config": json.dumps({**connector, "kv_role": "kv_producer", **folder}),
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["vllm", "serve", model, *words])


def bytes_in_flight(settings: Settings, batch_rows: int, tokens: int, layers: int, hidden_size: int) -> int:
    """Return the most bytes of states that are in the folder at a time, in 16 bits (8 with fp8)."""
    return batch_rows * (settings.ahead + 1) * tokens * layers * hidden_size * (1 if settings.transfer == "fp8" else 2)


def require_room(folder: Path, needed: int) -> None:
    """Raise ConfigError where a folder has less room than the states in flight take."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"teacher.server.folder={folder}: {free / 2**30:.1f} GiB are free, and states in flight take up to "
            f"{needed / 2**30:.1f} GiB; expected more room, or less of teacher.server.ahead or train.batch_size"
        )
