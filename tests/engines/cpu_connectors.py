"""vLLM's and hs-connectors' connectors for hidden states on a CPU (`kv_connector_module_path`); vLLM imports this file.

They use CUDA's streams and pinned memory, and ask for a layout of the cache that the CPU backend does not have. On a
CPU a pass has ended when its states are read, so that there is nothing to wait for.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector
from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """A stream or an event that has nothing left to do."""

    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True


class AnyLayout:
    @classmethod
    def get_required_kvcache_layout(cls, _vllm_config: Any) -> None:
        return None


class Written(AnyLayout):
    def _submit_async_write(self: Any, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        tensors, lock = {"hidden_states": states, "token_ids": pending.token_ids}, self._lock_fds.pop(pending.req_id)
        self._req_copy_events[pending.req_id] = Done()
        self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, lock)


class CpuExampleHiddenStatesConnector(Written, ExampleHiddenStatesConnector): ...


class CpuFP8HiddenStatesConnector(Written, FP8HiddenStatesConnector): ...


class CpuMooncakeHiddenStatesConnector(AnyLayout, MooncakeHiddenStatesConnector):
    def _device(self) -> Any:
        return SimpleNamespace(Event=Done, Stream=Done, stream=nullcontext)
