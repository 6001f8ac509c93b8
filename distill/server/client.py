"""Requests to a server; the `openai` client sends them again where a failure may pass."""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from draftsmith.distill.data_section import (
    SERVER_KEY,
    ServerSection,
    certificates,
    is_this_machine,
    require_client,
    server_key,
    server_section,
)
from draftsmith.errors import ConfigError, DraftsmithError, one_line, reason_of
from draftsmith.reading import parse_json
from draftsmith.terminal import printable

RETRIES = 10
"""Retries of the `openai` client after lost connections and the statuses 408, 409, 429 and 5xx: about a minute."""
ATTEMPTS = 3
"""Tries of a request whose answer cannot be read or comes too late."""
LONGEST_REASON = 200
"""Characters of a server's message in an error."""
LOST = "answers so far are kept, and the same command continues with the others"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Environment variables that name proxies, in capital or small letters."""
ROUTES = ("/chat/completions", "/completions", "/models", "/metrics")
"""Ends of addresses that were copied with a route."""
T = TypeVar("T")


class BadAnswer(Exception):
    """An answer that cannot be read; the request is sent again."""


class RequestFailed(DraftsmithError):
    """A request that was not answered after all retries, or that the server refuses."""


class ServerUnusable(DraftsmithError):
    """No request would be answered: an unknown route or model, a wrong key, or a server that is gone."""


@dataclass(frozen=True)
class ServedName:
    """A model that a server has."""

    name: str
    context: int | None
    """The longest text in tokens, where the server tells it (vLLM, SGLang, llama-server)."""


@dataclass
class ServerClient:
    """A connection to a server, as an async context manager."""

    settings: ServerSection
    retries: int = RETRIES
    _client: Any = field(default=None, init=False)
    _answered: bool = field(default=False, init=False)
    _listing: bool = field(default=False, init=False)
    """It has a list of models."""
    _unlisted: str = field(default="", init=False)
    """The reason where it has none."""

    async def __aenter__(self) -> Self:
        require_client()
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        timeout = self.settings.timeout_seconds
        key = server_key() or "none"
        http = opened(DefaultAsyncHttpxClient, self.url)
        self._client = AsyncOpenAI(
            base_url=self.url, api_key=key, max_retries=self.retries, timeout=timeout, http_client=http
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    @property
    def url(self) -> str:
        """The address with which OpenAI's routes begin."""
        return self.settings.base_url

    async def served(self, name: str | None) -> "ServedName":
        """Return the model with this name, or the only one that the server lists.

        Raises:
            ConfigError: for a name that the server does not list, no name where it lists several or none, and an
                address at which no server listens.
            ServerUnusable: for a wrong key.
        """
        listed = {entry["id"]: entry for entry in await self._listed() if isinstance(entry.get("id"), str)}
        shown = one_line(", ".join(listed), LONGEST_REASON)
        if name is None and len(listed) != 1:
            none = f"the server lists no model{self._unlisted}"
            has = f"the server has {shown}; expected one of them" if listed else none
            raise ConfigError(f"--model is missing, and {has}")
        chosen = next(iter(listed)) if name is None else name
        if listed and chosen not in listed:
            raise ConfigError(f"server {self.url} does not serve {chosen}; expected one of {shown}")
        entry = listed.get(chosen, {})
        meta = entry.get("meta")
        told = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        return ServedName(chosen, told if type(told) is int and told > 0 else None)

    async def _listed(self) -> list[dict[str, Any]]:
        """Return the entries of the server's list of models."""
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                once = self._client.with_options(max_retries=0)
                payload = parse_json(await once.get("/models", cast_to=str))
        except Exception as error:
            reason = _reason(error)
            if getattr(error, "status_code", 0) in (401, 403):
                raise self._unusable(reason) from None
            if _not_connected(error):
                raise ConfigError(f"server {self.url} {reason}; expected a running server") from None
            self._unlisted = f" ({self.url}/models: {reason}{self._place(error)})"
            return []  # sampling needs no list
        self._listing = True
        entries = payload.get("data") if isinstance(payload, dict) else None
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return the result of `read` on the JSON that the server answers with; it raises `BadAnswer` to ask again.

        Raises:
            RequestFailed: for a request that is refused, or not answered after all retries.
            ServerUnusable: if no request would be answered.
        """
        import openai

        reason = ""
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout(self.settings.timeout_seconds):
                    found = read(parse_json(await self._client.post(path, body=body, cast_to=str)))
                    self._answered = True
                    return found
            except (BadAnswer, ValueError, TimeoutError, openai.APITimeoutError) as error:
                reason = _reason(error)
            except openai.APIStatusError as error:
                reason = f"{_reason(error)}{self._place(error)}"
                if error.status_code in (401, 403, 404, 405):
                    raise self._unusable(reason) from None
                break
            except openai.APIConnectionError as error:
                raise self._unusable(_reason(error)) from None
        raise RequestFailed(f"{self.url}: {reason}")

    def _unusable(self, reason: str) -> ServerUnusable:
        return ServerUnusable(f"{self.url}: {reason}{f'; {LOST}' if self._answered else ''}")

    def _place(self, error: Exception) -> str:
        """Return an addition to the reason where the address may have the wrong path: it lists no models, either."""
        if self._answered or getattr(error, "status_code", 0) not in (404, 405) or self._listing:
            return ""
        end = next((route for route in ROUTES if self.url.endswith(route)), None)
        like = "an address that ends before OpenAI's routes, such as http://localhost:8000/v1"
        return f"; expected {like if end is None else self.url.removesuffix(end)}"


def opened(client: Callable[..., T], url: str, **options: Any) -> T:
    """Return an HTTP client with the environment's certificates and, unless `url` is this machine's, its proxies.

    Raises:
        ConfigError: for proxies that the client cannot use; the message shows no address, which may hold a password.
    """
    elsewhere, trusted = not is_this_machine(url), certificates()
    try:
        return client(trust_env=elsewhere, verify=trusted, **options)
    except Exception as error:
        named = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.lower())]
        if not elsewhere or not named:
            raise
        socks = ", and for SOCKS the package socksio" if isinstance(error, ImportError) else ""
        raise ConfigError(
            f"server {url}: the environment's {', '.join(named)} cannot be used; expected proxies such as "
            f"http://HOST:PORT{socks}, or the server's host in NO_PROXY"
        ) from error


def served_at(addresses: Iterable[str], model: str | None) -> list[ServedName]:
    """Return the model with this name at each address; see `ServerClient.served`. It imports no torch."""

    async def ask(address: str) -> ServedName:
        async with ServerClient(server_section(url=address, model=model or "")) as client:
            return await client.served(model)

    return [asyncio.run(ask(address)) for address in addresses]


def _not_connected(error: Exception) -> bool:
    """Return whether no connection was made: a wrong host or port, or a server that has not started."""
    return type(error.__cause__).__name__ == "ConnectError"  # of httpx or of httpx2, as openai has it


def _reason(error: Exception) -> str:
    """Return why a request got no answer; an error that no server causes is raised again."""
    import openai

    if isinstance(error, openai.APIStatusError):
        reason = f"status {error.status_code} ({_shown(error, error.response.text)})"
        return f"{reason}; expected its key in ${SERVER_KEY}" if error.status_code in (401, 403) else reason
    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return "no answer in time"
    if isinstance(error, openai.APIConnectionError):
        return f"cannot be reached ({_shown(error.__cause__ or error)})"
    if isinstance(error, BadAnswer | ValueError):
        return f"answered something else than expected ({_shown(error)})"
    raise error


def _shown(error: BaseException, said: str = "") -> str:
    """Return the server's message, or the error's text, without the key, which some servers repeat."""
    key, text = server_key(), said.strip() or str(error).strip() or type(error).__name__
    # Before the text is shortened: a part of a key is not found any more.
    text = text if key is None else text.replace(key, "***")
    return printable(one_line(text, LONGEST_REASON) if said.strip() else reason_of(Exception(text)))
