"""The recipe's section `data`: the prompts of a run, and how the target's responses to them are sampled.

Also `teacher.server`, whose engine may write them.
"""

import math
import os
import re
import ssl
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from draftsmith.config import Count, Number, Section, TemplateVariables, Whole, section_of
from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import parse_yaml

SELF = "self"
"""The value of `prompts` with which the target writes the prompts itself."""
SERVER_KEY = "DRAFTSMITH_SERVER_KEY"
"""Environment variable with the server's key. Keys of other services are never sent."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables with a file or a folder of certificates."""
ENGINE = "http://ENGINE:8000"
PLACES = {"urls": ENGINE, "store": "STORE:50051", "folder": "STATES"}
"""What is published in place of the addresses and the folder in `teacher.server`."""
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


class TeacherServerSection(Section):
    urls: str | list[str]
    """Address of a running vLLM that returns hidden states, such as http://localhost:8000, or a list of them; the
    command `draftsmith data server RECIPE` prints how to start it."""
    model: str = "target"
    """The name under which the servers have the target."""
    folder: str | None = None
    """Folder into which the servers write states, which this process can read; on one machine in shared memory, such
    as /dev/shm/states. Files are deleted once they are read."""
    transfer: Literal["file", "fp8", "mooncake"] = "file"
    """'file' has states in the server's dtype. 'fp8' has 8 bits a number and a scale a token (hs-connectors).
    'mooncake' sends them over the network through a Mooncake store, without a folder."""
    store: str | None = None
    """For 'mooncake': address of mooncake_master, such as 10.0.0.1:50051."""
    store_gib: Annotated[Number, Field(gt=0)] = 4.0
    """For 'mooncake': GiB that each engine gives to the store; states in flight must fit into 90 % of them."""
    answers_gib: Annotated[Number, Field(ge=0)] = 0.0
    """GiB of `folder` for states that the servers write with answers, which are kept until their row is trained on, so
    that it is not requested again. Those that do not fit are deleted, by default all."""
    in_flight: Count = 8
    """Requests at a time to each server."""
    ahead: Count = 2
    """Steps whose states are requested before they are needed."""
    timeout_seconds: Annotated[Number, Field(gt=0)] = 120.0
    """Longest time for the states of one text; it is then requested again, three times in all."""
    patience_minutes: Annotated[Number, Field(ge=0)] = 30.0
    """Time without any server after which the run stops."""
    failures: Annotated[Whole, Field(ge=0)] = 20
    """Texts without usable states after all requests, before the run stops; they are left out of their steps."""
    compare: bool = False
    """Before the first step, load the whole target in the first process and compare all layers of a few texts with it;
    then release it. For targets that fit here: log-probabilities do not show a wrong layer in between."""

    @field_validator("urls")
    @classmethod
    def _require_addresses(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ConfigError("urls is empty; expected at least one address")
        for address in [value] if isinstance(value, str) else value:
            require_address("urls", address)
        return value

    @model_validator(mode="after")
    def _require_place(self) -> Self:
        """Raise ConfigError for a transfer without its folder or store, and for the other's."""
        key, other = ("store", "folder") if self.transfer == "mooncake" else ("folder", "store")
        places, given = {"store": self.store, "folder": self.folder}, f"teacher.server.transfer={self.transfer!r}"
        if places[key] is None:
            raise ConfigError(f"teacher.server.{key} is missing, with {given}; expected a {key}")
        if places[other] is not None:
            raise ConfigError(f"teacher.server.{other}={places[other]!r} with {given}; expected null")
        if self.answers_gib and key == "store":
            raise ConfigError(f"teacher.server.answers_gib={self.answers_gib:g} with {given}; expected 0, or a folder")
        if self.store is not None and not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", self.store):
            raise ConfigError.of("teacher.server.store", self.store, "host:port of mooncake_master")
        return self

    @property
    def addresses(self) -> list[str]:
        return [self.urls] if isinstance(self.urls, str) else list(dict.fromkeys(self.urls))


Kind = Literal["code", "math", "writing", "extraction"]
"""Kinds of prompts that the target writes, see distill/self_prompts.py."""


class SourceSection(Section):
    prompts: str
    """'embedded', a file or a folder, a Hub data set, or 'self', as one string in `data.prompts`."""
    share: Annotated[Number, Field(ge=0, le=1e9)] = 1.0
    """Part of the samples, relative to the sum of all shares; 0 leaves the source out."""
    subset: str | None = None
    """Configuration of a Hub data set; of a local folder, a folder inside it."""
    split: str = "train"
    """Split of a Hub data set, or of a local folder whose files name splits; files that name none are of train."""
    response: Literal["target", "text"] | None = None
    """As `data.response`, which is the default."""
    kind: Kind | None = None
    """Kind of the prompts that the target writes, with 'self'."""

    @property
    def label(self) -> str:
        """The source for messages: `prompts`, with the kind, or the subset and split of a Hub data set."""
        named = [self.kind, self.subset, None if self.split == "train" else self.split]
        return " ".join([self.prompts, *(name for name in named if name is not None)])


def _require_sources(prompts: "str | list[SourceSection]") -> "str | list[SourceSection]":
    if isinstance(prompts, str):
        return prompts
    if not sum(source.share for source in prompts):
        raise ValueError("at least one source, and shares that sum to more than 0")
    for source in prompts:
        _require_self(source.kind, source.prompts)
    return prompts


def _require_self(kind: Kind | None, prompts: str) -> None:
    if kind is not None and prompts != SELF:
        raise ConfigError(f"kind={kind} with prompts={prompts}; expected it with prompts={SELF!r} only")


Prompts = Annotated[str | list[SourceSection], AfterValidator(_require_sources)]
"""One source, or several with shares."""


def sources_of(prompts: Prompts | None) -> list[SourceSection]:
    """Return all sources; none for None."""
    return [SourceSection(prompts=prompts)] if isinstance(prompts, str) else prompts or []


def counts_of(sources: Sequence[SourceSection], count: int) -> list[int]:
    """Return the number of samples of each source, by its share; their sum is `count`."""
    total, passed, counts = math.fsum(source.share for source in sources), 0.0, list[int]()
    for source in sources:
        passed += source.share
        counts.append(round(count * min(1.0, passed / total)) - sum(counts))
    return counts


def for_each_source(check: Callable[[str, str], object]) -> Callable[[Prompts | None, str], None]:
    """Return a check of all sources but 'self' from a check of a name, which is called with its option's name, too."""

    def check_all(prompts: Prompts | None, key: str) -> None:
        for source in sources_of(prompts):
            if source.prompts != SELF:
                check(source.prompts, key)

    return check_all


def with_written_prompts(
    sources: Sequence["DataSection"], write: Callable[["DataSection"], Path]
) -> list["DataSection"]:
    """Return the sources, with the file of prompts that `write` returns in place of 'self'."""
    return [
        source.model_copy(update={"prompts": str(write(source))}) if source.prompts == SELF else source
        for source in sources
    ]


def read_sources_option(text: str, name: str) -> Any:
    """Return the prompts that an option names: one source, or the plain values of a list of several as YAML."""
    if not text.lstrip().startswith("["):
        return text
    try:
        given = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text} is not YAML ({reason_of(error)}); expected a list of sources") from error
    for place, one in enumerate(given):  # messages of the section that holds the list would name `prompts` only
        section_of(SourceSection, lambda path, place=place: ".".join(map(str, (name, place, *path))), one)
    return given


class DataSection(Section):
    prompts: Prompts = "embedded"
    """'embedded'; a file (JSONL, JSON, Parquet, text) or a folder of them; a Hub data set; or 'self': the target writes
    the user's turns of its own chat template (distill/self_prompts.py). Rows have `messages`, `conversations`
    (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`, or `input_ids` with `loss_mask`. Or a list of
    such sources with shares of `data.count`."""
    subset: str | None = None
    """Configuration of a Hub data set; of a local folder, a folder inside it."""
    split: str = "train"
    """Split of a Hub data set, or of a local folder whose files name splits; files that name none are of train."""
    kind: Kind | None = None
    """With 'self', ask for one kind of prompts by a system prompt before the user's turn; by default any kind."""
    count: Count = 1000
    """At most this many prompts, or samples of a file with answers."""
    prompt_tokens: Count = 48
    """Embedded prompts have this length; longer prompts of a file are left out and counted."""
    response: Literal["target", "text"] = "target"
    """'target' samples a response to each prompt from the target; 'text' uses the responses in the file, which follow
    another distribution than the one that the drafter will see."""
    response_tokens: Count = 128
    """Longest response; with several turns, everything after the first prompt. Longer ones in a file are left out and
    counted."""
    turns: Literal["first", "all"] = "first"
    """Turns of a conversation that the target answers; with 'all', each turn follows the target's own answers."""
    train_on: Literal["answers", "all"] = "answers"
    """'all' also trains at the positions of prompts, whose states are computed or cached anyway; messages that the data
    marks as not trained and tokens of images stay untrained. Sampled answers and cached states stay valid."""
    responses: Count = 1
    """Responses sampled for each prompt, each with its own seed; with several, a few hundred prompts suffice."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """Sampling temperature of the responses."""
    batch_size: Count = 64
    """Prompts that are decoded together."""
    server: ServerSection | None = None
    """Sample the responses from a running server of the target instead of in this process."""
    chat_template: str | None = None
    """A file with a chat template that replaces the tokenizer's, 'vicuna', or 'plain', which joins the texts of the
    messages by line breaks; needed for messages where the tokenizer has none."""
    template_options: TemplateVariables = Field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""
    images: str | None = None
    """Folder of the images that messages name; needed for rows with images. A change in it encodes the rows again."""
    exclude_rows: list[Annotated[Whole, Field(ge=0)]] = Field(default_factory=list)
    """Rows to leave out of training and validation, by their number in failed_batch.json, such as one for which the
    target's states are not finite; may be changed when a run continues."""
    validation: Count | None = None
    """Keep the samples of this many prompts out of training, and compute the mean objective over them at every
    evaluation."""
    pack: bool = False
    """Pack several samples into one row of data.prompt_tokens + data.response_tokens, to reduce padding; attention
    stays within a sample."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for key, value in {"subset": self.subset, "split": None if self.split == "train" else self.split}.items():
            if value is not None and not isinstance(self.prompts, str):
                raise ConfigError(f"{key}={value} with a list of prompts; expected it in each source")
        _require_self(self.kind, self.prompts if isinstance(self.prompts, str) else "a list")
        return self

    @property
    def sources(self) -> list["DataSection"]:
        """The section of each source, with its part of `count`; of one source, this section."""
        if isinstance(self.prompts, str):
            return [self]
        parts = zip(self.prompts, counts_of(self.prompts, self.count), strict=True)
        return [
            self.model_copy(
                update={
                    **source.model_dump(include={"prompts", "subset", "split", "kind"}),
                    "count": count,
                    "response": source.response or self.response,
                }
            )
            for source, count in parts
            if count
        ]

    @property
    def source(self) -> str:
        """The prompts of a section with one source."""
        assert isinstance(self.prompts, str), "each of several sources has a section of its own"
        return self.prompts

    @property
    def label(self) -> str:
        """The one source for messages, see `SourceSection.label`."""
        return SourceSection(prompts=self.source, kind=self.kind, subset=self.subset, split=self.split).label

    @property
    def answered(self) -> bool:
        """Whether all responses are in the files."""
        return all(source.response == "text" for source in self.sources)

    @property
    def prompts_trained(self) -> bool:
        """Whether the positions of prompts are trained, too."""
        return self.train_on == "all"

    @property
    def every_turn(self) -> bool:
        """Whether the target answers every turn of a conversation."""
        return self.turns == "all"


def server_section(**values: Any) -> ServerSection:
    """Return the section of these values, without those that are None; ConfigError for the first that is wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    return section_of(ServerSection, lambda path: f"server.{path[0]}", given)


def require_address(key: str, address: str) -> None:
    """Raise ConfigError for anything but http:// or https:// with a host; the message shows no user name or key."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known, parts = False, urlsplit("")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{key} has a user name, a query or a fragment; expected an address, with the key in ${SERVER_KEY}"
        )
    if not known or not address.isprintable() or " " in address:
        raise ConfigError.of(key, address, "an address such as http://localhost:8000")


def base_url(address: str) -> str:
    """Return the address with which OpenAI's routes begin: /v1 is added to an address without a path."""
    address = address.rstrip("/")
    return address if urlsplit(address).path else f"{address}/v1"


def is_address(text: str | None) -> bool:
    """Return whether a text is meant as a server's address, not as a file."""
    return text is not None and text.startswith(("http://", "https://"))


def is_this_machine(address: str) -> bool:
    """Return whether an address is this machine's own, which no proxy of the environment can reach."""
    host = urlsplit(address).hostname or ""
    try:
        ip = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return ip.is_loopback or ip.is_unspecified


def certificates() -> ssl.SSLContext | bool:
    """Return the trusted certificates: those of SSL_CERT_FILE or SSL_CERT_DIR; True: the default ones."""
    file, folder = (os.environ.get(name) or None for name in CERTIFICATES)
    if file is None and folder is None:
        return True
    try:
        return ssl.create_default_context(cafile=file, capath=folder)
    except (OSError, ValueError) as error:
        named = ", ".join(f"{name}={value}" for name, value in zip(CERTIFICATES, (file, folder), strict=True) if value)
        raise ConfigError(f"{named} cannot be read ({reason_of(error)}); expected certificates in PEM") from error


def server_key() -> str | None:
    """Return the server's key from the environment.

    Raises:
        ConfigError: for a key with other characters around it, or that no header can hold; it does not show the key.
    """
    key = os.environ.get(SERVER_KEY, "")
    wrong = (n for n, letter in enumerate(key, 1) if letter in "'\"" or not "!" <= letter <= "~")
    if place := next(wrong, 0):
        raise ConfigError(
            f"{SERVER_KEY}: character {place} of {len(key)} is a space, a line break, a quote or not ASCII; expected "
            "the key alone, without quotes or 'Bearer'"
        )
    return key or None


def require_client() -> None:
    """Raise ConfigError where the extra `serve` is not installed."""
    if find_spec("openai") is None:
        raise ConfigError("server: the package openai is not installed; expected it, from: pip install '.[serve]'")
