"""A Mooncake store through which hidden states come from engines of other machines, without a shared folder.

    engine ──▶ its segment of the store ──▶ this process, over TCP; mooncake_master knows which key lies where

A store evicts what it has no room for without an error anywhere. The bytes of states that are requested and not read
must therefore stay below its size; what is evicted nevertheless is missing, and requested again.
"""

import asyncio
import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from draftsmith.distill.data_section import TeacherServerSection
from draftsmith.distill.server.client import BadAnswer, ServerUnusable
from draftsmith.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from hs_connectors.mooncake_store import MooncakeStoreConfig

T = TypeVar("T")
MODULE = "hs_connectors.mooncake_hidden_states_connector"
KEYS = re.compile("(chat)?cmpl-[A-Za-z0-9_-]+")
"""The keys that hs-connectors writes: the request's id."""
USABLE = 0.9
"""Part of a store that may be in use; Mooncake evicts beyond it."""
BUFFER_BYTES = 64 * 2**20
"""Mooncake's own buffer, which carries only error markers: samples have registered ones."""
READERS = 4
"""Threads that read, each with a registered buffer of the longest sample."""
CONNECT_SECONDS, SETUP_SECONDS = 10.0, 60.0
TRIAL = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, master, size = sys.argv[1:]
os._exit(MooncakeDistributedStore().setup(host, "P2PHANDSHAKE", 0, int(size), "tcp", "", master) != 0)
"""
"""A connection that is given up at once."""
LONGEST_POLL_SECONDS = 0.05
PAUSE_SECONDS = 5.0
"""Time before a sample that cannot be read is requested again: new ones may go to a dead engine's segment for 10 s."""


class StoreTransport:
    """States of a Mooncake store; see `Transport`."""

    def __init__(self, settings: TeacherServerSection) -> None:
        assert settings.store is not None, "checked by the section"
        self.settings, self.address = settings, settings.store
        self.place = f"the store of {self.address}"
        self._left: set[str] = set()
        """Keys that may still be written, or were not deleted."""

    def open(self) -> None:
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it prints dozens of lines
        config = MooncakeStoreConfig(
            local_hostname=os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or self._own_address(),
            master_server_address=self.address,
            global_segment_size=0,
            local_buffer_size=BUFFER_BYTES,
        )
        self._store = MooncakeHiddenStatesStore(config)
        self._require_set_up(config)
        self._threads = ThreadPoolExecutor(READERS, "states of the store")

    def _own_address(self) -> str:
        """Return the address by which the store's machines reach this one; ConfigError where nothing listens."""
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), CONNECT_SECONDS) as connection:
                return connection.getsockname()[0]
        except (OSError, OverflowError) as error:
            raise self._refused(f"no answer ({reason_of(error)})") from error

    def _require_set_up(self, config: "MooncakeStoreConfig") -> None:
        """Connect, at first in a process of its own: Mooncake tries for minutes, and holds Python's lock meanwhile.

        Raises:
            ConfigError: without the package or its libraries, and where no master answers.
        """
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(
                f"teacher.server.transfer='mooncake': {reason_of(error)}; expected the package "
                "mooncake-transfer-engine, and the system's libibverbs1, libnl-3-200 and libnl-route-3-200"
            ) from error
        arguments = [config.local_hostname, self.address, str(BUFFER_BYTES)]
        try:
            subprocess.run(
                [sys.executable, "-c", TRIAL, *arguments], check=True, timeout=SETUP_SECONDS, capture_output=True
            )
            self._store.setup()
        except subprocess.TimeoutExpired:
            raise self._refused(f"no answer for {SETUP_SECONDS:g} s") from None
        except (subprocess.CalledProcessError, RuntimeError) as error:
            raise self._refused("no connection") from error

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(f"teacher.server.store={self.address}: {reason}; expected a running mooncake_master")

    def services(self) -> list[str]:
        host, _, port = self.address.rpartition(":")
        options = {"rpc_address": host, "rpc_port": port, "metrics_host": "127.0.0.1"}
        return [shlex.join(["mooncake_master", *(f"--{name}={value}" for name, value in options.items())])]

    def connector(self, host: str) -> dict[str, Any]:
        store = {
            "local_hostname": host,
            "master_server_address": self.address,
            "global_segment_size": round(self.settings.store_gib * 2**30),
            "local_buffer_size": BUFFER_BYTES,
            "protocol": "tcp",
        }
        named = {"kv_connector": "MooncakeHiddenStatesConnector", "kv_connector_module_path": MODULE}
        return {**named, "kv_connector_extra_config": {"mooncake": store}}

    def require_room(self, needed: int) -> None:
        engines, gib = len(self.settings.addresses), self.settings.store_gib
        if needed > USABLE * engines * gib * 2**30:
            raise ConfigError(
                f"teacher.server.store_gib={gib:g} of {engines} engines: states in flight take up to "
                f"{needed / 2**30:.3g} GiB, and a store loses some when {USABLE:.0%} of it are full; expected less of "
                f"teacher.server.ahead={self.settings.ahead} or train.batch_size, or a larger store_gib, with which "
                "the engines are then started"
            )

    def named(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest of a sample: of an answer only the key, the shapes and the dtypes are used."""
        from hs_connectors.mooncake_store import VERSION, packed_layout

        handle = params.get("handle")
        if not isinstance(handle, str):
            raise BadAnswer("no kv_transfer_params.handle: the engine has no connector for hidden states of Mooncake")
        if not KEYS.fullmatch(handle):
            raise BadAnswer(f"states under the key {handle}, which is no request's")
        self._left.add(handle)
        try:
            specs = {name: (_shape(spec), _dtype(spec)) for name, spec in params["tensors"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"a manifest that cannot be read ({reason_of(error)})") from error
        tensors, size = packed_layout(specs)  # in the order of the answer, as when they were written
        sizes = {"total_aligned_bytes": size}
        return {"handle": handle, "version": params.get("version", VERSION), "tensors": tensors, "metadata": sizes}

    async def read(self, named: dict[str, Any]) -> dict[str, torch.Tensor]:
        from hs_connectors.mooncake_store import MooncakeIntegrityError

        pause = 0.001
        while True:
            try:
                sample = await self._run(lambda: self._store.get_sample(named, timeout=0.0))
            except TimeoutError:  # not there yet
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_SECONDS)
            except MooncakeIntegrityError as error:  # a marker of an error, or an engine that was killed
                await asyncio.sleep(PAUSE_SECONDS)
                raise BadAnswer(reason_of(error)) from error
            except RuntimeError as error:  # the master has gone
                raise ServerUnusable(f"{self.place}: {reason_of(error)}") from error
            else:
                self._left.discard(named["handle"])
                return sample

    async def delete(self, named: dict[str, Any]) -> None:
        try:
            await self._run(lambda: self._store.delete_sample(named["handle"]))
        except RuntimeError:
            self._left.add(named["handle"])

    def clear(self, age: float = 0.0) -> None:
        """Delete all states; a store does not tell their age."""
        self._store._require_store().remove_by_regex(f"^{KEYS.pattern}", True)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        with suppress(RuntimeError):  # where the master has gone, each would take seconds
            for handle in self._left:
                self._store.delete_sample(handle)
        self._store._require_store().close()

    async def _run(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, task)


def _shape(spec: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a tensor in a manifest; ValueError for one that is none."""
    shape = tuple(spec["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape={spec['shape']}")
    return shape


def _dtype(spec: dict[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor in a manifest; KeyError for one that states do not have."""
    return {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64)}[spec["dtype"]]
