"""Requests to servers: bounded concurrency that adapts to each server, retries with backoff, several addresses."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

from draftsmith.distill.server.settings import KEY, ServerSection, require_client, server_key
from draftsmith.errors import ConfigError, DraftsmithError, one_line, reason_of
from draftsmith.reading import parse_json
from draftsmith.safe_text import HIDDEN, printable

ATTEMPTS = 8
"""Tries of one request, apart from those that a server refuses because it is overloaded."""
FIRST_LIMIT = 4
"""Requests to a server at a time in the beginning."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry, and the most before any; every further pause is twice as long."""
OUTAGE_SECONDS = 120.0
"""Time without a single answer from any server after which the run stops."""
LONGEST_REASON = 200
"""Characters of a server's message in an error."""
LOST = "answers so far are kept, and the same command continues with the others"
T = TypeVar("T")


class BadAnswer(Exception):
    """An answer that cannot be read; the request is sent again."""


class RequestFailed(DraftsmithError):
    """A request that was not answered after all retries, or that no server accepts."""


class ServerUnusable(DraftsmithError):
    """No request would be answered: an unknown route or model, a wrong key, or servers that are gone."""


class Trouble(NamedTuple):
    """Why a request got no answer, and what follows from it."""

    reason: str
    kind: str
    """'overloaded', 'slow' and 'unreachable' concern the server, 'once' may pass, 'refused' the request, 'unusable'
    every request."""
    pause: float | None = None
    """Seconds that the server asks to wait."""


@dataclass
class _Lane:
    """One server: how many requests it has, and how many it may have."""

    url: str
    client: Any
    most: int
    limit: float = FIRST_LIMIT
    busy: int = 0
    growing: bool = True
    """It has never been overloaded, so that its limit doubles; later it rises by one."""
    rests_until: float = -math.inf
    troubles: int = 0
    """Since the last answer."""
    last_trouble: float = -math.inf
    failing_since: float = math.inf
    last: tuple[str, dict[str, Any]] | None = None
    """Route and body of the request that was answered last."""

    def open(self, now: float) -> bool:
        # A server in trouble gets one request at a time, until it answers.
        return self.rests_until <= now and self.busy < (1 if self.troubles else int(self.limit))

    def answered(self, path: str, body: dict[str, Any]) -> None:
        self.last = path, body
        self.limit = min(self.most, self.limit + (1.0 if self.growing else 1.0 / self.limit))
        self.troubles, self.failing_since = 0, math.inf

    def rest(self, trouble: Trouble, sent: float, now: float) -> bool:
        """Pause the server and return True, unless the request was sent before it paused for another one."""
        if sent < self.last_trouble:
            return False
        self.last_trouble, self.failing_since = now, min(self.failing_since, now)
        if trouble.kind != "unreachable":
            self.limit, self.growing = max(1.0, self.limit / 2), False
        self.rests_until = now + (_pause(self.troubles) if trouble.pause is None else trouble.pause)
        self.troubles += 1
        return True


@dataclass
class Servers:
    """Servers of the same model, as an async context manager.

    Args:
        first: requests to each at a time in the beginning.
    """

    settings: ServerSection
    first: int = FIRST_LIMIT
    _lanes: list[_Lane] = field(default_factory=list, init=False)
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque, init=False)

    async def __aenter__(self) -> Self:
        require_client()
        from openai import AsyncOpenAI

        for url in self.settings.urls:
            client = AsyncOpenAI(
                base_url=url, api_key=server_key() or "none", max_retries=0, timeout=self.settings.timeout_seconds
            )
            limit = min(self.first, self.settings.concurrency)
            self._lanes.append(_Lane(url, client, self.settings.concurrency, limit))
        return self

    async def __aexit__(self, *_: object) -> None:
        for lane in self._lanes:
            await lane.client.close()

    def alone(self) -> list["Servers"]:
        """Return each server by itself, to check it; they share their connections with this one."""
        parts = []
        for lane in self._lanes:
            part = Servers(self.settings.model_copy(update={"url": lane.url}))
            part._lanes = [lane]
            parts.append(part)
        return parts

    @property
    def running(self) -> int:
        """Requests that have been sent and not yet answered."""
        return sum(lane.busy for lane in self._lanes)

    async def models(self) -> list[list[str]]:
        """Return the names that each server lists; an empty list where it lists none.

        Raises:
            ConfigError: for an address at which no server listens.
            ServerUnusable: for a wrong key.
        """
        return [await self._models(lane) for lane in self._lanes]

    async def _models(self, lane: _Lane) -> list[str]:
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                return _names(parse_json(await lane.client.get("/models", cast_to=str)))
        except Exception as error:
            trouble = trouble_of(error)
            if trouble.kind == "unusable" and getattr(error, "status_code", 0) in (401, 403):
                raise _unusable(lane.url, trouble) from None
            if _nobody_listens(error):  # a server that stops later is waited for, see `OUTAGE_SECONDS`
                raise ConfigError(f"server {lane.url} {trouble.reason}; expected a running server") from None
            return []  # sampling needs no list

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the JSON that a server answers with; it raises `BadAnswer` to ask again.

        Raises:
            RequestFailed: for a request that is refused, or not answered in `ATTEMPTS` tries.
            ServerUnusable: if no request would be answered.
        """
        now, tries = asyncio.get_running_loop().time, 0
        patience = now() + self.settings.timeout_seconds
        while True:
            lane = await self._enter()
            sent = now()
            try:
                async with asyncio.timeout(self.settings.timeout_seconds):
                    answer = read(parse_json(await lane.client.post(path, body=body, cast_to=str)))
                lane.answered(path, body)
                return answer
            except Exception as error:
                trouble = trouble_of(error)
                tries += trouble.kind != "overloaded" and not self._known_to_be_down(lane, trouble)
                paused = trouble.kind in ("overloaded", "slow", "unreachable") and lane.rest(trouble, sent, now())
            finally:
                self._leave(lane)
            if paused and trouble.kind == "slow":
                await self._check(lane)
            self._require_usable(lane, trouble, now())
            late = now() > patience if trouble.kind == "overloaded" else tries >= ATTEMPTS
            if late or trouble.kind == "refused":
                raise RequestFailed(f"{lane.url}: {trouble.reason}")
            if trouble.kind == "once":
                await asyncio.sleep(_pause(tries - 1))

    async def _check(self, lane: _Lane) -> None:
        """Ask a server that was too slow for the first token of its last answer: it may be the request that is slow."""
        if lane.last is None:
            return
        path, body = lane.last
        try:
            async with asyncio.timeout(min(OUTAGE_SECONDS, self.settings.timeout_seconds)):
                await lane.client.post(path, body={**body, "max_tokens": 1}, cast_to=str)
        except Exception as error:
            trouble_of(error)
        else:
            lane.answered(path, body)
            self._wake()

    def _known_to_be_down(self, lane: _Lane, trouble: Trouble) -> bool:
        """Return whether a failure says nothing about the request: its server was in trouble, and another is not."""
        others = any(not each.troubles for each in self._lanes)
        return trouble.kind == "unreachable" and lane.troubles > 0 and others

    def _require_usable(self, lane: _Lane, trouble: Trouble, now: float) -> None:
        """Raise ServerUnusable where no further request can succeed."""
        if trouble.kind == "unusable":
            raise _unusable(lane.url, trouble)
        if all(now - each.failing_since > OUTAGE_SECONDS for each in self._lanes):
            raise ServerUnusable(f"{lane.url}: no answer for {OUTAGE_SECONDS:g} seconds ({trouble.reason}); {LOST}")

    async def _enter(self) -> _Lane:
        """Wait until a server has room, and return the one with the most."""
        loop = asyncio.get_running_loop()
        while True:
            free = [lane for lane in self._lanes if lane.open(loop.time())]
            if free:
                lane = min(free, key=lambda each: each.busy / each.limit)
                lane.busy += 1
                return lane
            future = loop.create_future()
            self._waiting.append(future)
            await future

    def _leave(self, lane: _Lane) -> None:
        lane.busy -= 1
        loop = asyncio.get_running_loop()
        self._wake()
        if lane.rests_until > loop.time():
            loop.call_at(lane.rests_until, self._wake)

    def _wake(self) -> None:
        """Let every waiting request look for a free place again."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


def _nobody_listens(error: Exception) -> bool:
    """Return whether there was no connection: a wrong host or port, or a server that has not started."""
    return type(error.__cause__).__name__ == "ConnectError"  # of httpx or of httpx2, as openai has it


def _names(payload: Any) -> list[str]:
    """Return the names in a list of models, and the names of what is loaded where a server gives them (vLLM)."""
    entries = payload.get("data") if isinstance(payload, dict) else None
    models = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [name for entry in models for name in (entry.get("id"), entry.get("root")) if isinstance(name, str)]


def _pause(tries: int) -> float:
    """Return the seconds before the next try: they double, and vary so that requests spread out."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries, 16)) * random.uniform(0.5, 1.0)


def _unusable(url: str, trouble: Trouble) -> ServerUnusable:
    return ServerUnusable(f"{url}: {trouble.reason}; {LOST}")


def trouble_of(error: Exception) -> Trouble:
    """Return what an error of a request means; an error that no server causes is raised again."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return _status_trouble(error)
    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return Trouble("no answer in time", "slow")
    if isinstance(error, openai.APIConnectionError):
        return Trouble(f"cannot be reached ({_shown(error.__cause__ or error)})", "unreachable")
    if isinstance(error, BadAnswer | ValueError):
        return Trouble(f"answered something else than expected ({_shown(error)})", "once")
    raise error


def _status_trouble(error: Any) -> Trouble:
    status = error.status_code
    reason = f"status {status} ({_shown(error, error.response.text)})"
    if status in (401, 403):
        return Trouble(f"{reason}; expected its key in ${KEY}", "unusable")
    if status in (404, 405):
        return Trouble(reason, "unusable")
    if status in (429, 503):
        return Trouble(reason, "overloaded", _seconds(error.response.headers.get("retry-after")))
    return Trouble(reason, "once" if status == 408 or status >= 500 else "refused")


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return min(seconds, LONGEST_PAUSE) if seconds >= 0 else None


def _shown(error: BaseException, said: str = "") -> str:
    """Return what the server said, or the error's text, without the key, which some servers repeat."""
    key, text = server_key(), one_line(said, LONGEST_REASON) or reason_of(error)
    return printable(text if key is None else text.replace(key, HIDDEN))
