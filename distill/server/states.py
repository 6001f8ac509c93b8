"""Hidden states of training rows, computed by running engines, such as vLLM with a connector for hidden states.

    row ──▶ POST /completions {prompt: its tokens, max_tokens: 1} ──▶ file or key ──▶ [T, S, H] ──▶ CachedTeacher

The layers are the ids that the engine was started with, sorted: those that the drafter reads, and the last one, whose
output becomes the final state by the target's last norm. hs-connectors reads the states.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.data_section import TeacherServerSection, server_section
from draftsmith.distill.hidden_state_cache import CachedTeacher
from draftsmith.distill.layerless import depth_of, finish_of
from draftsmith.distill.server.client import BadAnswer, RequestFailed, ServerClient, ServerUnusable
from draftsmith.distill.server.transport import opened
from draftsmith.distill.teacher import TargetHead, stored_layers
from draftsmith.errors import ConfigError, EngineLost, reason_of
from draftsmith.heads.lm_head import logits_head

# Shapes: T tokens, S layers of the engine, H hidden size, B rows, W = (1 + other layers) x H.

T = TypeVar("T")
ATTEMPTS = 3
"""Requests for the states of one text."""
RETRIES = 2
"""Retries of a lost connection, before the server counts as down."""
AGAIN_SECONDS = 10.0
"""Time after which a server that was down is asked again."""
SAY_SECONDS = 60.0
COMPARED_TEXTS, COMPARED_TOKENS = 8, 128
TOLERANCE = 0.1
"""Largest median difference in nats between the server's log-probabilities and those of its states."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(eq=False)
class _Server:
    client: ServerClient
    slots: asyncio.Semaphore
    waiting: int = 0
    """Requests that are sent or wait for a slot."""
    down_until: float = 0.0


@dataclass(eq=False)
class ServedStates:
    """Reads the states of rows; see `CachedTeacher`.

    Args:
        settings: the section `teacher.server`.
        rows: the training rows.
        model: the target, without layers.
        layers: those that the drafter reads, see `Needs.layers`.
        say: prints a line.

    Raises:
        ConfigError: for a folder or a store that cannot be read here, and a package that is missing.
    """

    settings: TeacherServerSection
    rows: Dataset
    model: PreTrainedModel
    layers: tuple[int, ...]
    say: Callable[[str], None]
    lost: set[int] = field(default_factory=set, init=False)
    """Rows without usable states."""
    lm_head: TargetHead = field(init=False)

    def __post_init__(self) -> None:
        self.lm_head = cast(TargetHead, logits_head(self.model))  # modules are typed loosely
        self.served = sorted({*stored_layers(self.layers), depth_of(self.model)})
        self.transport = opened(self.settings)
        self._packed = "documents" in self.rows.column_names
        self._wanted: deque[int] = deque()
        self._pending: dict[int, Future[list[Tensor] | None]] = {}
        self._limit = 0
        self._alive = self._said = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hidden states", daemon=True)
        self._thread.start()
        self._servers = self._wait(self._connect())

    def close(self) -> None:
        """End all requests, and delete the states that are not read any more."""
        if self._loop.is_closed():
            return
        self._wait(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.transport.close()

    def expect(self, order: Iterable[Sequence[int]]) -> None:
        """Request the states of the rows that are read next, in place of those of earlier calls."""
        batches = [tuple(rows) for rows in order]
        self._limit = max(self._limit, sum(map(len, batches[: self.settings.ahead + 1])))
        self._wanted = deque(row for rows in batches for row in rows if row not in self._pending)
        self._start()

    @torch.no_grad()
    def read(self, rows: Sequence[int]) -> tuple[Tensor]:
        """Return the states [B, T, W] of rows: the final ones, then `stored_layers`; zeros after each.

        Raises:
            EngineLost: where no server answers, or more than `failures` rows have no usable states.
        """
        for row in rows:
            if row not in self._pending:
                self._request(row)
        found = {row: self._collected(row) for row in dict.fromkeys(rows)}
        self._start()
        parts = [found[row] for row in rows]
        width = (1 + len(stored_layers(self.layers))) * self.hidden_size
        zeros = torch.zeros(1, width, dtype=self.model.dtype)
        return (nn.utils.rnn.pad_sequence([zeros if part is None else part for part in parts], batch_first=True),)

    def missing(self, rows: Sequence[int]) -> list[int]:
        """Wait for the states of rows, and return those of them that have none."""
        for row in rows:
            if row not in self._pending:
                self._request(row)
        for row in rows:
            self._pending[row].result()
        return [row for row in rows if row in self.lost]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.weight.shape[1]

    def _collected(self, row: int) -> Tensor | None:
        """Return the states [T, W] of a row, and forget them; None for a lost row."""
        found = self._pending.pop(row).result()
        return None if found is None else torch.cat([self._finished(states_TSH) for states_TSH in found])

    def _finished(self, states_TSH: Tensor) -> Tensor:
        """Return the final states and those of `stored_layers`, [T, W]."""
        weight = self.lm_head.weight
        last_TH = states_TSH[:, self.served.index(depth_of(self.model))].to(weight)
        final_TH = finish_of(self.model)(last_TH).to(states_TSH)
        others = [states_TSH[:, self.served.index(layer)] for layer in stored_layers(self.layers)]
        return torch.cat([final_TH.to(states_TSH.device), *others], -1)

    def texts(self, row: int) -> list[list[int]]:
        """Return the texts of a row, of which packed ones have several."""
        ids = self.rows[row]["input_ids"]
        lengths = self.rows[row]["documents"] if self._packed else [len(ids)]
        return [part.tolist() for part in torch.tensor(ids).split(lengths)]

    def _start(self) -> None:
        """Request wanted rows up to the limit of rows that are not read yet."""
        while self._wanted and len(self._pending) < self._limit:
            row = self._wanted.popleft()
            if row not in self._pending:
                self._request(row)

    def _request(self, row: int) -> None:
        self._pending[row] = asyncio.run_coroutine_threadsafe(self._states_of(row), self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connect(self) -> list[_Server]:
        """Return the servers; ConfigError for one that is not there, or has no such model or too short a context."""
        settings, longest = self.settings, max(map(len, self.rows["input_ids"]))
        servers: list[_Server] = []
        for address in settings.addresses:
            section = server_section(url=address, model=settings.model, timeout_seconds=settings.timeout_seconds)
            client = await ServerClient(section, retries=RETRIES).__aenter__()
            context = (await client.served(settings.model)).context
            if context is not None and context <= longest and not self._packed:
                raise ConfigError(
                    f"server {address}: max_model_len={context}, and the longest text has {longest} tokens; expected "
                    f"at least {longest + 1}"
                )
            servers.append(_Server(client, asyncio.Semaphore(settings.in_flight)))
        return servers

    async def _disconnect(self) -> None:
        for future in self._pending.values():
            future.cancel()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for server in self._servers:
            await server.client.__aexit__()

    async def _states_of(self, row: int) -> list[Tensor] | None:
        """Return the states of each text of a row; None for a row that is lost.

        Raises:
            EngineLost: see `read`.
        """
        if row in self.lost:
            return None
        try:
            return [await self._states(ids) for ids in self.texts(row)]
        except BadAnswer as error:
            self.lost.add(row)
            self.say(f"teacher: row {row} has no usable states ({error}): left out")
            if len(self.lost) > self.settings.failures:
                raise EngineLost(
                    f"{len(self.lost)} rows have no usable states, more than teacher.server.failures="
                    f"{self.settings.failures}; the last, {row}: {error}"
                ) from None
            return None

    async def _states(self, ids: list[int]) -> Tensor:
        """Return the states of a text [T, S, H]; BadAnswer after `ATTEMPTS` answers without usable ones."""
        attempts, reason = 0, ""
        body = {"model": self.settings.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        while attempts < ATTEMPTS:
            server = await self._least_busy()
            server.waiting += 1
            named: dict[str, Any] | None = None
            try:
                async with server.slots:
                    named = await server.client.ask("/completions", body, self._named)
                    states_TSH = await self._read(named, ids)
                self._alive = time.monotonic()
                return states_TSH
            except ServerUnusable as error:
                self._down(server, error)
            except (BadAnswer, RequestFailed, TimeoutError, *UNREADABLE) as error:
                attempts, reason = attempts + 1, reason_of(error)
            finally:
                server.waiting -= 1
                if named is not None:
                    await self.transport.delete(named)
        raise BadAnswer(reason)

    async def _least_busy(self) -> _Server:
        """Return the server with the fewest requests; wait while none answers, up to `patience_minutes`."""
        while True:
            now = time.monotonic()
            live = [server for server in self._servers if server.down_until <= now]
            if live:
                return min(live, key=lambda server: server.waiting)
            silent = now - self._alive
            if silent > 60 * self.settings.patience_minutes:
                minutes = f"teacher.server.patience_minutes={self.settings.patience_minutes:g}"
                raise EngineLost(f"no server answers for {silent / 60:.0f} minutes, more than {minutes}")
            await asyncio.sleep(0.05)

    def _down(self, server: _Server, error: Exception) -> None:
        """Leave a server out for a while, and say so once a minute."""
        now = time.monotonic()
        server.down_until = now + min(AGAIN_SECONDS, 60 * self.settings.patience_minutes / 4)
        if now - self._said > SAY_SECONDS or len(self._servers) > 1 or now - self._alive < SAY_SECONDS:
            self._said = now
            self.say(f"teacher: {reason_of(error)}; asking it again later")

    def _named(self, payload: Any) -> dict[str, Any]:
        """Return what names the states of an answer; BadAnswer for none."""
        params = payload.get("kv_transfer_params") if isinstance(payload, dict) else None
        return self.transport.named(params if isinstance(params, dict) else {})

    async def _read(self, named: dict[str, Any], ids: list[int]) -> Tensor:
        """Return states [T, S, H] once they are written; BadAnswer for none, or those of other tokens or shapes."""
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                sample = await self.transport.read(named)
        except TimeoutError:
            raise BadAnswer(f"no states for teacher.server.timeout_seconds={self.settings.timeout_seconds:g}") from None
        tokens_T, states_TSH = sample["token_ids"], sample["hidden_states"]
        shape = (len(ids), len(self.served), self.hidden_size)
        if tokens_T.tolist() != ids:
            raise BadAnswer("states of other tokens")
        if tuple(states_TSH.shape) != shape:
            layers = (
                ""
                if states_TSH.ndim != 3 or states_TSH.shape[1] == shape[1]
                else (f"; the engine was started with other layers than {self.served}")
            )
            raise BadAnswer(f"states of shape {list(states_TSH.shape)}; expected {list(shape)}{layers}")
        if not states_TSH.isfinite().all():
            raise BadAnswer("states that are not finite")
        return states_TSH

    def verify(self) -> float:
        """Return the median difference in nats between the server's log-probabilities and those of its states.

        Of a few texts; a wrong norm, revision, lm_head or a shift by one layer shows.

        Raises:
            ConfigError: for a difference above `TOLERANCE`, or an engine that returns no states.
        """
        step = max(1, len(self.rows) // COMPARED_TEXTS)
        texts = [self.texts(row)[0][:COMPARED_TOKENS] for row in range(0, len(self.rows), step)][:COMPARED_TEXTS]
        differences = [self._wait(self._difference(server, ids)) for server in self._servers for ids in texts]
        median = float(torch.cat(differences).median())
        if not median < TOLERANCE:
            raise ConfigError(
                f"teacher.server: the states, with the norm and lm_head of the target, give log-probabilities that are "
                f"{median:.2f} nats from the server's (median); expected less than {TOLERANCE}: another model or "
                "revision, a quantized lm_head (target.head_from), or another last layer"
            )
        return median

    async def _difference(self, server: _Server, ids: list[int]) -> Tensor:
        """Return the differences [T - 1] for a text."""
        body = {"model": self.settings.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

        def read(payload: Any) -> tuple[dict[str, Any], list[float]]:
            named = self._named(payload)
            try:
                listed = payload["choices"][0]["prompt_logprobs"]
                told = [float(entry[str(token)]["logprob"]) for entry, token in zip(listed[1:], ids[1:], strict=True)]
            except (TypeError, KeyError, ValueError) as error:
                raise BadAnswer(f"no prompt_logprobs of the text ({reason_of(error)})") from error
            return named, told

        try:
            named, told = await server.client.ask("/completions", body, read)
            try:
                states_TSH = await self._read(named, ids)
            finally:
                await self.transport.delete(named)
        except (BadAnswer, RequestFailed, ServerUnusable, TimeoutError, *UNREADABLE) as error:
            raise ConfigError(f"teacher.server: {reason_of(error)}; expected hidden states of {self.served}") from error
        with torch.no_grad():
            weight = self.lm_head.weight
            final_TH = self._finished(states_TSH)[:-1, : self.hidden_size].to(weight)
            labels_T1 = torch.tensor(ids[1:], device=weight.device)[:, None]
            own_T = self.lm_head(final_TH).float().log_softmax(-1).gather(1, labels_T1)[:, 0]
        return (own_T.cpu() - torch.tensor(told)).abs()


class ServedTeacher(CachedTeacher):
    """A teacher whose states a running engine computes; `expect` requests them ahead."""

    def __init__(self, states: ServedStates) -> None:
        super().__init__(states, states.read)
        self.states = states

    def expect(self, order: Iterable[Sequence[int]]) -> None:
        """Request the states of the rows that `signals` will be called with next."""
        self.states.expect(order)
