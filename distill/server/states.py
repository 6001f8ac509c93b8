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
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.data_section import TeacherServerSection, server_section
from draftsmith.distill.hidden_state_cache import CachedTeacher
from draftsmith.distill.layerless import finish_of
from draftsmith.distill.server.client import BadAnswer, RequestFailed, ServerClient, ServerUnusable
from draftsmith.distill.server.state_folder import FolderTransport, text_key
from draftsmith.distill.server.transport import opened
from draftsmith.distill.state_files import (
    COMPARED_TOKENS,
    TOLERANCE,
    UNREADABLE,
    StoredText,
    compared_texts,
    in_order,
    nearest_layers,
    texts_of,
)
from draftsmith.distill.teacher import TargetHead, stored_layers
from draftsmith.errors import ConfigError, EngineLost, reason_of
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.model_config import text_config

# Shapes: T tokens, S layers of the engine, H hidden size, B rows, W = (1 + other layers) x H.

T = TypeVar("T")
ATTEMPTS = 3
"""Requests for the states of one text."""
RETRIES = 2
"""Retries of a lost connection, before the server counts as down."""
AGAIN_SECONDS = 10.0
"""Time after which a server that was down is asked again."""
SAY_SECONDS = 60.0
MOST_NATS = 0.1
"""Largest median difference between the server's log-probabilities and those of its states."""


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
    answers: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    """What names the states that were written with answers and are not read yet, by `text_key`."""
    lm_head: TargetHead = field(init=False)

    def __post_init__(self) -> None:
        self.lm_head = cast(TargetHead, logits_head(self.model))  # modules are typed loosely
        used = [text_config(self.model).num_hidden_layers, *stored_layers(self.layers)]
        self.served = sorted(set(used))
        self._order, self._finish = [self.served.index(layer) for layer in used], finish_of(self.model)
        self.transport = opened(self.settings)
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

    def found_answers(self) -> dict[int, dict[str, Any]]:
        """Return `answers`, say how many there are, and delete the states of texts that no row has."""
        if not isinstance(self.transport, FolderTransport) or not self.settings.answers_gib:
            return {}
        keys = [text_key(ids) for row in range(len(self.rows)) for ids in texts_of(self.rows, row)]
        found = self._wait(self.transport.answers(set(keys)))
        count = sum(key in found for key in keys)
        self.say(f"teacher: the states of {count:,} of {len(keys):,} texts were written with their answers")
        return found

    def delete_left(self) -> None:
        """Delete the states of texts that were never trained on, and of requests that ended too late."""
        if isinstance(self.transport, FolderTransport):
            self._wait(self.transport.answers(()))

    def expect(self, order: Iterable[Sequence[int]]) -> None:
        """Request the states of the rows that are read next, in place of those of earlier calls."""
        batches = [tuple(rows) for rows in order]
        self._limit = max(self._limit, sum(map(len, batches[: self.settings.ahead + 1])))
        self._wanted = deque(row for rows in batches for row in rows)
        self._start()

    @torch.no_grad()
    def read(self, rows: Sequence[int]) -> tuple[Tensor]:
        """Return the states [B, T, W] of rows: the final ones, then `stored_layers`; zeros after each.

        Raises:
            EngineLost: where no server answers, or more than `failures` rows have no usable states.
        """
        for row in rows:
            self._request(row)
        found = {row: self._collected(row) for row in dict.fromkeys(rows)}
        self._start()
        return (nn.utils.rnn.pad_sequence([found[row] for row in rows], batch_first=True),)

    def missing(self, rows: Sequence[int]) -> list[int]:
        """Wait for the states of rows, and return those of them that have none."""
        for row in rows:
            self._request(row)
        for row in rows:
            self._pending[row].result()
        return [row for row in rows if row in self.lost]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.weight.shape[1]

    def _collected(self, row: int) -> Tensor:
        """Return the states [T, W] of a row, and forget them; zeros for a lost row."""
        texts = self._pending.pop(row).result()
        if texts is None:
            return torch.zeros(1, len(self._order) * self.hidden_size, dtype=self.model.dtype)
        return torch.cat([in_order(states_TSH, self._order, self._finish) for states_TSH in texts])

    def _start(self) -> None:
        """Request wanted rows up to the limit of rows that are not read yet."""
        while self._wanted and len(self._pending) < self._limit:
            self._request(self._wanted.popleft())

    def _request(self, row: int) -> None:
        if row not in self._pending:
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
            if context is not None and context <= longest and "documents" not in self.rows.column_names:
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
            return [await self._states(ids) for ids in texts_of(self.rows, row)]
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
        if (written_TSH := await self._written(ids)) is not None:
            return written_TSH
        attempts, reason = 0, ""
        while attempts < ATTEMPTS:
            server = await self._least_busy()
            server.waiting += 1
            try:
                async with server.slots:
                    states_TSH, _ = await self._fetched(server, ids)
                self._alive = time.monotonic()
                return states_TSH
            except ServerUnusable as error:
                self._down(server, error)
            except (BadAnswer, RequestFailed, *UNREADABLE) as error:
                attempts, reason = attempts + 1, reason_of(error)
            finally:
                server.waiting -= 1
        raise BadAnswer(reason)

    async def _fetched(self, server: _Server, ids: list[int], **more: Any) -> tuple[Tensor, Any]:
        """Return the states of a text [T, S, H], which are then deleted, and the server's answer."""
        body = {"model": self.settings.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, **more}
        named, payload = await server.client.ask("/completions", body, lambda payload: (self._named(payload), payload))
        try:
            return await self._read(named, ids), payload
        finally:
            await self.transport.delete(named)

    async def _written(self, ids: list[int]) -> Tensor | None:
        """Return the states that were written with a text's answer, zeros for its last token; None for no usable ones.

        They are then deleted. No training target depends on the last one.
        """
        named = self.answers.pop(text_key(ids), None)
        if named is None or not Path(named["hidden_states_path"]).exists():  # another process has read it
            return None
        try:
            states_TSH = await self._read(named, ids[:-1])
        except (BadAnswer, *UNREADABLE):
            return None
        finally:
            await self.transport.delete(named)
        self._alive = time.monotonic()  # no server was asked meanwhile
        return nn.functional.pad(states_TSH, (0, 0, 0, 0, 0, 1))

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
            other = states_TSH.ndim == 3 and states_TSH.shape[1] != shape[1]
            layers = f"; the engine was started with other layers than {self.served}" * other
            raise BadAnswer(f"states of shape {list(states_TSH.shape)}; expected {list(shape)}{layers}")
        if not states_TSH.isfinite().all():
            raise BadAnswer("states that are not finite")
        return states_TSH

    def verify(self, whole: PreTrainedModel | None) -> tuple[float, float | None]:
        """Compare the states of a few texts with each server's log-probabilities and, where given, the whole target.

        A wrong norm, revision, lm_head or last layer shows in the log-probabilities; other layers in the states alone.

        Returns:
            The median difference in nats, and the largest one of the layers, relative to the target's.

        Raises:
            ConfigError: for a difference that is too large, or an engine that returns no states.
        """
        texts = [ids[:COMPARED_TOKENS] for ids in compared_texts(self.rows)]
        answers = {server: [self._wait(self._asked(server, ids)) for ids in texts] for server in self._servers}
        median = float(torch.cat([nats_T for each in answers.values() for _, nats_T in each]).median())
        if not median < MOST_NATS:
            raise ConfigError(
                f"teacher.server: the states, with the norm and lm_head of the target, give log-probabilities that are "
                f"{median:.2f} nats from the server's (median); expected less than {MOST_NATS}: another model or "
                "revision, a quantized lm_head (target.head_from), or another last layer"
            )
        if whole is None:
            return median, None
        return median, max(self._off(server, whole, [text for text, _ in each]) for server, each in answers.items())

    def _off(self, server: _Server, whole: PreTrainedModel, texts: list[StoredText]) -> float:
        """Return the largest difference between a server's layers and the whole target's; ConfigError for others."""
        nearest = nearest_layers(whole, texts)
        if [it.layer for it in nearest if it.known] != self.served:
            raise ConfigError(
                f"teacher.server: {server.client.url} returns {', '.join(map(str, nearest))} as layers {self.served}; "
                f"expected these, less than {TOLERANCE:.0%} off: start it as `draftsmith data server` prints"
            )
        return max(it.error for it in nearest)

    async def _asked(self, server: _Server, ids: list[int]) -> tuple[StoredText, Tensor]:
        """Return a text's states, and the differences of its log-probabilities from them in nats [T - 1]."""
        try:
            states_TSH, payload = await self._fetched(server, ids, prompt_logprobs=0)
            try:
                listed = payload["choices"][0]["prompt_logprobs"]
                told = [float(entry[str(token)]["logprob"]) for entry, token in zip(listed[1:], ids[1:], strict=True)]
            except (TypeError, LookupError, ValueError) as error:
                raise BadAnswer(f"no prompt_logprobs of the text ({reason_of(error)})") from error
        except (BadAnswer, RequestFailed, ServerUnusable, *UNREADABLE) as error:
            raise ConfigError(f"teacher.server: {reason_of(error)}; expected hidden states of {self.served}") from error
        with torch.no_grad():
            weight = self.lm_head.weight
            final_TH = in_order(states_TSH[:-1], self._order[:1], self._finish).to(weight)
            labels_T1 = torch.tensor(ids[1:], device=weight.device)[:, None]
            own_T = self.lm_head(final_TH).float().log_softmax(-1).gather(1, labels_T1)[:, 0]
        return StoredText(torch.tensor(ids), states_TSH), (own_T.cpu() - torch.tensor(told)).abs()


class ServedTeacher(CachedTeacher):
    """A teacher whose states a running engine computes; `expect` requests them ahead."""

    def __init__(self, states: ServedStates) -> None:
        super().__init__(states, states.read)
        self.states = states

    def expect(self, order: Iterable[Sequence[int]]) -> None:
        """Request the states of the rows that `signals` will be called with next."""
        self.states.expect(order)
