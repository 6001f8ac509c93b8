"""A server on the loopback that speaks OpenAI's routes as vLLM, SGLang and transformers do, and fails on request.

An answer is a function of prompt and seed, so that a test knows it in advance.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEY = "sk-" + "SecretOfTheTests" * 2
TEMPLATE = (
    "{% if tools %}T{{ tools | map(attribute='function.name') | join }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}A{{ m.reasoning_content or '' }}"
    "{% if m.reasoning_content %}Z{% endif %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'system' %}S{{ m.content }}{% else %}U{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{{ '' if enable_thinking }}{% endif %}"
)
SLOW = 3.0
"""Seconds that a slow answer takes; tests of it use a shorter limit."""


def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a proxy that does not run, as clusters name one for downloads: an engine on the loopback needs none."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def answer_tokens(prompt: list[int], seed: int, most: int, eos: int = 1) -> list[int]:
    """The answer to a prompt: up to 6 letters and EOS, or as many as fit."""
    digest = hashlib.sha256(f"{prompt}{seed}".encode()).digest()
    letters = [2 + byte % 52 for byte in digest[: 1 + digest[31] % 6]]
    return [*letters, eos][:most]


def model_answers(model: PreTrainedModel) -> Callable[[list[int], int, int], list[int]]:
    """Answers of a real model: greedy ones for seed 0, otherwise sampled ones."""
    lock = threading.Lock()

    def answer(prompt: list[int], seed: int, most: int) -> list[int]:
        with lock:
            torch.manual_seed(seed)
            how = {"do_sample": True, "top_k": 0} if seed else {"do_sample": False}
            ids = torch.tensor([prompt])
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **how)
            return whole[0, len(prompt) :].tolist()

    return answer


@dataclass
class Engine:
    """A served model, the requests it received, and the fault it produces."""

    model: str = "tiny"
    tokenizer: PreTrainedTokenizerBase = field(default_factory=chat_tokenizer)
    names: list[str] | None = None
    """Names in the list of models; by default its own. An empty list lists none."""
    contexts: dict[str, int] = field(default_factory=dict)
    """The longest text in tokens of models in the list."""
    returns_ids: bool = True
    token_prompts: bool = True
    strict: bool = False
    """Refuse fields that it does not know, as `transformers serve` does."""
    thinks: bool = False
    """The first half of an answer is returned as `reasoning_content`."""
    fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
    """Returns the name of the fault for a request, from its number and body; None for none."""
    key: str | None = None
    loses_temperatures: bool = False
    """Sample in the same way at every temperature above 0."""
    answer: Callable[[list[int], int, int], list[int]] = answer_tokens
    metrics: Callable[["Engine"], str] | None = None
    info: dict[str, Any] | None = None
    """SGLang's description of itself."""
    config: Any = None
    """vLLM's, with VLLM_SERVER_DEV_MODE=1."""
    metrics_path: str = "/metrics"
    redirects: dict[str, str] = field(default_factory=dict)
    """Where paths are redirected to with status 307."""
    route_status: Callable[[str], int | None] = lambda path: 200
    """The status of a path's answer to GET; None closes the connection."""
    posts: tuple[str, ...] | None = None
    """The paths of requests for text; None: any."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of all requests for text."""
    answered: Counter[str] = field(default_factory=Counter)
    """Complete answers but greedy ones, by prompt and seed."""
    most_running: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._lock, self.busy = threading.Lock(), 0

    @contextmanager
    def running(self) -> Iterator["Engine"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def begin(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.asked.append(body)
            self.busy += 1
            self.most_running = max(self.most_running, self.busy)
            return len(self.asked) - 1

    def end(self, done: str | None) -> None:
        with self._lock:
            self.busy -= 1
            if done is not None:
                self.answered[done] += 1

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            options = body.get("chat_template_kwargs") or {}
            return self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False, **options
            )
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"]

    def tokens(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        """The tokens of an answer."""
        greedy = body["temperature"] <= (0 if self.loses_temperatures else 0.01)
        return self.answer(prompt, 0 if greedy else body["seed"], body["max_tokens"])

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer as the engines write it."""
        prompt = self.prompt_of(body)
        tokens = self.tokens(prompt, body)
        finish = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
        shown = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if stop := next((text for text in body.get("stop", []) if text in shown), None):
            shown, finish = shown[: shown.index(stop)], "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None, "stop_reason": None}
        ids = {"token_ids": tokens} if body.get("return_token_ids") else {}
        if "messages" in body:
            half = len(shown) // 2 if self.thinks else 0
            message = {"role": "assistant", "content": shown[half:], "tool_calls": [], "refusal": None}
            choice |= {"message": {**message, "reasoning_content": shown[:half] or None}, **ids}
        else:
            choice |= {"text": shown, **ids}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["total_tokens"] = len(prompt) + len(tokens)
        reply = {"id": "r-1", "object": "text", "created": 1, "model": body["model"], "choices": [choice]}
        return {**reply, "usage": usage, **({"prompt_token_ids": prompt} if ids else {})}


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the acknowledgement of its headers

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        names = [self.engine.model] if self.engine.names is None else self.engine.names
        status = self.engine.route_status(self.path)
        if status is None:
            self._dropped(None)
        elif status != 200:
            self._json({"error": "a fault of the test"}, status)
        elif self.path in self.engine.redirects:
            self._json({}, 307, Location=self.engine.redirects[self.path])
        elif self.engine.key is not None and self.headers.get("Authorization") != f"Bearer {self.engine.key}":
            self._json({"error": f"no access with {self.headers.get('Authorization')}"}, 401)
        elif self.path == "/v1/models":
            limits = self.engine.contexts
            told = [{"id": name, "root": f"/models/{name}", "max_model_len": limits.get(name)} for name in names]
            self._json({"object": "list", "data": told})
        elif self.path == self.engine.metrics_path and self.engine.metrics is not None:
            self._send(self.engine.metrics(self.engine).encode(), 200, "text/plain; version=0.0.4")
        elif self.path == "/get_server_info" and self.engine.info is not None:
            self._json(self.engine.info)
        elif self.path == "/server_info?config_format=json" and self.engine.config is not None:
            self._json({"vllm_config": self.engine.config})
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if engine.posts is not None and self.path not in engine.posts:
            return self._json({"detail": "Not Found"}, 404)
        if engine.key is not None and self.headers.get("Authorization") != f"Bearer {engine.key}":
            return self._json({"error": f"no access with {self.headers.get('Authorization')}"}, 401)
        if body["model"] != engine.model:
            return self._json({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        unknown = not engine.returns_ids and "return_token_ids" in body
        if engine.strict and unknown:
            return self._json({"detail": "Unexpected fields in the request"}, 422)
        limit = engine.contexts.get(engine.model)
        if limit is not None and len(engine.prompt_of(body)) + body["max_tokens"] > limit:
            return self._json({"error": f"maximum context length is {limit} tokens"}, 400)
        if not engine.token_prompts and isinstance(body.get("prompt"), list):
            return self._json({"detail": "prompt must be a string."}, 400)
        number = engine.begin(body)
        done = None
        try:
            fault = engine.fault(number, body)
            reply = engine.reply({**body, "return_token_ids": engine.returns_ids and body.get("return_token_ids")})
            if fault is None:
                done = json.dumps([engine.prompt_of(body), body["seed"]]) if body["temperature"] > 0 else None
                return self._json(reply)
            return getattr(self, f"_{fault}")(reply)
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            engine.end(done)

    def _send(self, content: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), status, **headers)

    # Faults

    def _busy(self, _: Any) -> None:
        self._json({"error": "busy"}, 429)

    def _down(self, _: Any) -> None:
        self._json({"error": "down"}, 503, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")

    def _broken(self, _: Any) -> None:
        self._json({"error": f"no, whatever {self.headers.get('Authorization')} says"}, 500)

    def _page(self, _: Any) -> None:
        self._send(b"<html>gateway</html>", 200, "text/html")

    def _half_json(self, reply: Any) -> None:
        content = json.dumps(reply).encode()
        self._send(content[: len(content) // 2])

    def _truncated(self, reply: Any) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def _dropped(self, _: Any) -> None:
        self.close_connection = True
        self.connection.close()

    def _slow(self, reply: Any) -> None:
        time.sleep(SLOW)
        self._json(reply)

    def _empty(self, _: Any) -> None:
        self._json({})

    def _aborted(self, reply: Any) -> None:
        reply["choices"][0]["finish_reason"] = "abort"
        self._json(reply)

    def _no_text(self, reply: Any) -> None:
        choice = reply["choices"][0]
        choice |= {"text": 3, "message": {"content": None}}
        self._json(reply)

    def _bad_ids(self, reply: Any) -> None:
        reply["choices"][0]["token_ids"] = ["a", -1]
        self._json(reply)

    def _refused(self, _: Any) -> None:
        self._json({"error": "this prompt is too long"}, 400)

    def _other_text(self, reply: Any) -> None:
        reply["choices"][0]["token_ids"] = [60, *reply["choices"][0]["token_ids"]]
        self._json(reply)

    def _other_prompt(self, reply: Any) -> None:
        reply["prompt_token_ids"] = [*reply["prompt_token_ids"], 5]
        self._json(reply)

    def _beyond(self, reply: Any) -> None:
        reply["choices"][0]["token_ids"][0] = 64
        self._json(reply)

    def _too_long(self, reply: Any) -> None:
        choice = reply["choices"][0]
        choice["token_ids"] = [2] * 200
        text = "a" * 200
        choice |= {"text": text, "message": {**choice.get("message", {}), "content": text}, "finish_reason": "length"}
        self._json(reply)


FLEETING = (
    *("busy", "down", "broken", "page", "half_json", "truncated", "dropped"),
    *("slow", "empty", "aborted", "no_text", "bad_ids"),
)
"""Faults after which the same request is sent again."""
LASTING = ("refused", "other_text", "other_prompt", "beyond", "too_long")
"""Faults after which the conversation is left out."""
