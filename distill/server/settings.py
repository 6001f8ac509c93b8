"""How responses are asked for: `data.server` in a recipe, and the options of `draftsmith data regenerate --server`."""

import os
from importlib.util import find_spec
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from draftsmith.config import Count, Number, Section, Whole, section_of
from draftsmith.errors import ConfigError

KEY = "DRAFTSMITH_SERVER_KEY"
"""Environment variable with the server's key. Keys of other services are never sent."""
OWN_FIELDS = ("model", "messages", "prompt", "tools", "max_tokens", "temperature", "top_p", "seed", "n", "stream")
"""Fields of a request that `extra_body` cannot replace."""


class ServerSection(Section):
    url: str
    """Address of a server that speaks OpenAI's API, such as http://localhost:8000; of a router before several."""
    model: str
    """The name under which the server has the target."""
    route: Literal["auto", "chat", "completion"] = "auto"
    """'chat' sends messages, and the server applies its chat template; 'completion' sends tokens, or text where the
    server takes no tokens. 'auto' sends conversations to the first and plain text to the second."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of this probability."""
    thinking: Literal["keep", "drop"] = "keep"
    """'drop' leaves out what the server returns as `reasoning_content`, from training and from later turns."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, such as top_k."""
    concurrency: Count = 64
    """Requests at a time."""
    timeout_seconds: Annotated[Number, Field(gt=0)] = 600.0
    """Longest time for one answer; the request is then sent again, three times in all."""
    failures: Annotated[Whole, Field(ge=0)] = 20
    """Conversations that may fail after all retries before the run stops; they are left out and counted."""

    @field_validator("url")
    @classmethod
    def _require_address(cls, value: str) -> str:
        require_address("url", value)
        return value

    @field_validator("extra_body")
    @classmethod
    def _require_free_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(value.keys() & set(OWN_FIELDS))
        if taken:
            raise ConfigError(f"extra_body has {', '.join(taken)}; expected fields that no other setting has")
        return value

    @property
    def base_url(self) -> str:
        """The address with which OpenAI's routes begin."""
        return base_url(self.url)

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that determine the answers."""
        return {"model": self.model, **self.model_dump(include={"route", "top_p", "thinking", "extra_body"})}


def server_section(**values: Any) -> ServerSection:
    """Return the section of these values, without those that are None; ConfigError for the first that is wrong."""
    return section_of(ServerSection, "server.{}".format, **values)


def require_address(key: str, address: str) -> None:
    """Raise ConfigError for anything but http:// or https:// with a host; the message shows no user name or key."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known, parts = False, urlsplit("")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{key} has a user name, a query or a fragment; expected an address, with the key in ${KEY}")
    if not known or not address.isprintable() or " " in address:
        raise ConfigError.of(key, address, "an address such as http://localhost:8000")


def base_url(address: str) -> str:
    """Return the address with which OpenAI's routes begin: /v1 is added to an address without a path."""
    address = address.rstrip("/")
    return address if urlsplit(address).path else f"{address}/v1"


def server_key() -> str | None:
    """Return the server's key from the environment."""
    return os.environ.get(KEY) or None


def require_client() -> None:
    """Raise ConfigError where the extra `serve` is not installed."""
    if find_spec("openai") is None:
        raise ConfigError("server: the package openai is not installed; expected it, from: pip install '.[serve]'")
