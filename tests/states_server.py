"""A server on the loopback that returns hidden states as vLLM's connectors do, and fails on request.

POST /v1/completions {prompt: tokens} ──▶ {kv_transfer_params: {hidden_states_path}}; the file is locked until written
                                      ──▶ {kv_transfer_params: {handle, …}}; the key is missing until written

It answers, too, with the target's tokens; with include_output_tokens the states are those of prompt and answer.
"""

import fcntl
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from engine_server import Engine, model_answers
from hs_connectors.mooncake_store import VERSION, MooncakeHiddenStatesStore, packed_layout
from safetensors.torch import save_file
from transformers import PreTrainedModel

FAULTS = ("nan", "other tokens", "other layers", "no file", "no path", "torn", "late", 503, 400)
STORE_FAULTS = ("nan", "other tokens", "other layers", "no file", "no path", "error", "torn", "late", 503)
"""Of a store; "no file": evicted; "torn": the segment's engine is dead, and the store returns -800."""


@dataclass
class StatesEngine:
    """A target that writes the states of `layers` into `folder`."""

    target: PreTrainedModel
    folder: Path
    layers: Sequence[int]
    context: int = 4096
    faults: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    """Faults of the next answers to a text, whose states are read; the last stays if it is repeated with `for_good`."""
    for_good: bool = False
    store: MooncakeHiddenStatesStore | None = None
    """Where the states go instead of the folder."""
    late_seconds: float = 0.05
    asked: list[tuple[int, ...]] = field(default_factory=list)
    """All prompts, of which the engine computes every token."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        answers = model_answers(deepcopy(self.target))  # hooks are those of a thread
        self.answering = Engine(model="target", answer=answers)

    def fault_of(self, prompt: tuple[int, ...]) -> Any:
        with self.lock:
            self.asked.append(prompt)
            faults = self.faults.get(prompt, [])
            if not faults:
                return None
            return faults[0] if self.for_good else faults.pop(0)

    @torch.no_grad()
    def states(self, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states [T, S, H] and the log-probabilities [T - 1] of the prompt's tokens after the first."""
        with self.lock:  # hooks of an OnlineTeacher on the same model are not meant for threads
            ids = torch.tensor([list(prompt)])
            states: list[torch.Tensor] = []
            decoder = self.target.model
            hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in decoder.layers]
            try:
                logits = self.target(ids, use_cache=False).logits
            finally:
                for hook in hooks:
                    hook.remove()
        every = [self.target.get_input_embeddings()(ids), *(it if torch.is_tensor(it) else it[0] for it in states)]
        told = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return torch.stack([every[layer][0] for layer in sorted(set(self.layers))], 1), told

    def answer(self, body: dict[str, Any], fault: Any) -> dict[str, Any]:
        prompt, reply = self.answering.prompt_of(body), {"choices": [{"text": "x"}]}
        read = prompt
        if "return_token_ids" in body:
            self.answering.begin(body)
            reply = self.answering.reply(body)
            if (body.get("kv_transfer_params") or {}).get("include_output_tokens"):
                read = [*prompt, *reply["choices"][0]["token_ids"][:-1]]
        states, told = self.states(read)
        if fault == "nan":
            states[0, 0, 0] = torch.nan
        if fault == "other layers":
            states = states[:, :-1]
        tokens = torch.tensor(read) + (1 if fault == "other tokens" else 0)
        sample = {"token_ids": tokens, "hidden_states": states.contiguous()}
        name = f"{'chat' if 'messages' in body else ''}cmpl-{uuid.uuid4()}-0"
        params = (
            self._to_folder(name, sample, fault) if self.store is None else self._to_store(self.store, sample, fault)
        )
        if "prompt_logprobs" in body:
            shown = zip(prompt[1:], told.tolist(), strict=True)
            listed = [None, *({str(token): {"logprob": value}} for token, value in shown)]
            reply["choices"][0]["prompt_logprobs"] = listed
        return {**reply, **({} if fault == "no path" else {"kv_transfer_params": params})}

    def _to_folder(self, name: str, sample: dict[str, torch.Tensor], fault: Any) -> dict[str, Any]:
        path = self.folder / f"{name}.safetensors"
        if fault == "late":
            threading.Thread(target=self._write_late, args=(path, sample), daemon=True).start()
        elif fault == "torn":
            path.write_bytes(b"\x10\x00\x00\x00")
        elif fault not in ("no file", "no path"):
            save_file(sample, path)
        return {"hidden_states_path": str(path)}

    def _write_late(self, path: Path, sample: dict[str, torch.Tensor]) -> None:
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(self.late_seconds)
            save_file(sample, path)

    def _to_store(
        self, store: MooncakeHiddenStatesStore, sample: dict[str, torch.Tensor], fault: Any
    ) -> dict[str, Any]:
        tensors, size = packed_layout({name: (tuple(it.shape), it.dtype) for name, it in sample.items()})
        sizes = {"total_aligned_bytes": size}
        handle = f"cmpl-{uuid.uuid4()}-0-{'dead' if fault == 'torn' else 'a1b2'}"
        manifest = {"handle": handle, "version": VERSION, "tensors": tensors, "metadata": sizes}
        if fault == "late":
            threading.Timer(self.late_seconds, store.put_sample, (manifest, sample)).start()
        elif fault == "error":
            store.put_error(manifest, "NonFiniteTensorError")
        elif fault not in ("no file", "no path"):
            store.put_sample(manifest, sample)
        return manifest


@contextmanager
def running(engine: StatesEngine, port: int = 0) -> Iterator[str]:
    """Serve until the end of the block; yields the address."""

    closed = threading.Event()  # connections stay open after the server has ended

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "target", "max_model_len": engine.context}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if closed.is_set():
                self.close_connection = True
                return
            fault = engine.fault_of(tuple(engine.answering.prompt_of(body)))
            if isinstance(fault, int):
                self._send(fault, {"error": {"message": "a fault"}})
            else:
                self._send(200, engine.answer(body, fault))

        def _send(self, status: int, payload: dict[str, Any]) -> None:
            content = json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
