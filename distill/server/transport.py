"""How states come from an engine: by files in a folder, or by a store; and the command that starts the engine."""

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from draftsmith.distill.data_section import DataSection, TeacherServerSection
from draftsmith.distill.load_target import source_of
from draftsmith.distill.server.state_folder import OLD_SECONDS, FolderTransport
from draftsmith.distill.server.state_store import StoreTransport
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import ConfigError


class Transport(Protocol):
    """The way of states from an engine to this process."""

    place: str
    """Where they lie, in words."""

    def open(self) -> None:
        """Raise ConfigError where states cannot be read here."""
        ...

    def services(self) -> list[str]:
        """Return the commands that are started before an engine."""
        ...

    def connector(self, host: str) -> dict[str, Any]:
        """Return the connector's part of `--kv-transfer-config` of an engine on this host."""
        ...

    def require_room(self, needed: int) -> None:
        """Raise ConfigError where there is less room than the states in flight take."""
        ...

    def named(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return what names the states of an answer's `kv_transfer_params`; BadAnswer for what must not be read."""
        ...

    async def read(self, named: dict[str, Any]) -> dict[str, Tensor]:
        """Return `token_ids` and `hidden_states` once they are written; BadAnswer for none."""
        ...

    async def delete(self, named: dict[str, Any]) -> None:
        """Delete states, which may be missing."""
        ...

    def clear(self, age: float = OLD_SECONDS) -> None:
        """Delete states that nobody reads: those of earlier runs, and of answers, older than `age` seconds."""
        ...

    def close(self) -> None: ...


def transport_of(settings: TeacherServerSection) -> Transport:
    """Return the transport that a recipe names; it is not open yet."""
    return StoreTransport(settings) if settings.transfer == "mooncake" else FolderTransport(settings)


def opened(settings: TeacherServerSection) -> Transport:
    """Return the transport, with which states are read here; ConfigError where they cannot be."""
    if find_spec("hs_connectors") is None:
        raise ConfigError("teacher.kind='server' needs hs-connectors; expected: pip install 'draftsmith[engine]'")
    transport = transport_of(settings)
    transport.open()
    return transport


@contextmanager
def swept(settings: TeacherServerSection | None) -> Iterator[None]:
    """Delete the states that an engine writes of answers, but those of `answers_gib`, inside the context."""
    if settings is None:
        yield
        return
    transport, done = opened(settings), threading.Event()
    transport.require_room(0)

    def repeat() -> None:
        while not done.wait(OLD_SECONDS / 2):
            transport.clear()

    thread = threading.Thread(target=repeat, name="states of answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        transport.clear(age=0.0)
        transport.close()


def engine_command(settings: TeacherServerSection, target: TargetSection, data: DataSection, layers: list[int]) -> str:
    """Return the commands that start the engines of a run, by lines; `layers`: the ids whose outputs they return."""
    extract = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    shown = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    options: dict[str, Any] = {
        "served-model-name": settings.model,
        "revision": target.revision,
        "dtype": target.dtype,
        "max-model-len": data.prompt_tokens + data.response_tokens + 1,
        "generation-config": "vllm",  # else answers have the temperature, top_k and so on of the checkpoint's
        "speculative-config": json.dumps({**extract, "draft_model_config": shown}),
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    words += ["--trust-remote-code"] if target.trust_remote_code else []
    model, transport, commands = source_of(target.model), transport_of(settings), list[str]()
    for address in map(urlsplit, settings.addresses):
        config = json.dumps({**transport.connector(str(address.hostname)), "kv_role": "kv_producer"})
        port = ["--port", str(address.port)] if address.port else []
        commands.append(shlex.join(["vllm", "serve", model, *words, *port, "--kv-transfer-config", config]))
    return "\n".join([*transport.services(), *dict.fromkeys(commands)])


def bytes_in_flight(
    settings: TeacherServerSection, batch_rows: int, tokens: int, layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """Return the most bytes of states that are requested and not read at a time, in the server's dtype."""
    number = 1 if settings.transfer == "fp8" else dtype.itemsize
    return batch_rows * (settings.ahead + 1) * tokens * layers * hidden_size * number
