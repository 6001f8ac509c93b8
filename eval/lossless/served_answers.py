"""Ask a running server for the continuations of a check; answers are stored, so that a killed check continues."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from datasets import Dataset

from draftsmith.distill.asked import Asked
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, server_section
from draftsmith.distill.server.answers import CUT, STOPPED, Answer, Journal, NoTokens, Place, bare, prompt_fields
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.probe import check_server
from draftsmith.distill.server.sampling import ServerSampler, request_seed, together
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.draws import Done
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import PairSettings

AT_ONCE = 8
"""Requests at a time, where several are sent."""
UNCHANGED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields with which vLLM, SGLang and llama-server sample from the whole distribution; their defaults may not."""
WITH_TOKENS = {"verbose": True, "return_tokens": True}
"""Fields with which llama-server returns token ids."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued. `place` identifies it in the journal."""

    place: Place
    prompt: list[int]
    tokens: int
    temperature: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@dataclass(frozen=True)
class Said:
    """A continuation: its text without outer spaces, and its tokens without the one that ended it, where known."""

    text: str
    tokens: list[int] | None
    ended: bool
    """The model ended it, not the limit of tokens."""

    def same(self, other: "Said") -> bool:
        """Return whether two continuations are equal, as far as both are known."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return (self.tokens, self.ended) == (other.tokens, other.ended)


class ServedModel:
    """A server that continues prompts, as a context manager that holds the file of its answers."""

    def __init__(self, sampler: ServerSampler, context: int | None, journal: Journal, ends: frozenset[int]) -> None:
        self.sampler, self.context, self.chat = sampler, context, sampler.chat
        self._journal, self._ends = journal, ends

    def __enter__(self) -> Self:
        self._journal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None,
        settings: PairSettings,
        chat: Chat,
        prompts: list[Prompt],
        file: Path,
    ) -> Self:
        """Return the server after the checks that it serves the target; ConfigError if it does not.

        Args:
            model: the name under which it has the target; None: the only one that it lists.
            file: for its answers; seeds depend on its name, so that two servers draw independently.
        """

        async def ask() -> tuple[ServerSampler, int | None]:
            section = server_section(url=url, model=model or "", route="completion", top_p=settings.top_p)
            async with ServerClient(section) as client:
                names = [str(entry.get("id")) for entry in await client.listed()]
                if model is None and len(names) != 1:
                    raise ConfigError(f"--model is missing; expected one that the server lists: {', '.join(names)}")
                section = section.model_copy(update={"model": model or names[0]})
                data = DataSection(response_tokens=PROBED, temperature=0.0, server=section)
                sampler = ServerSampler(
                    data, chat, request_seed(settings.seed, *file.stem.encode()), None, settings.target
                )
                questions = Dataset.from_list([{"input_ids": p.input_ids, "turns": ""} for p in prompts])
                await check_server(sampler, questions, client, target=settings.target)
                return await _with_fields(sampler, client, prompts[0], settings), await client.context()

        sampler, context = asyncio.run(ask())
        return cls(sampler, context, Journal(file, sampler.described()), chat.ends)

    def expressible(self, prompt: list[int]) -> bool:
        """Return whether the server can be asked with these tokens: some take only text."""
        try:
            prompt_fields(Asked(0, prompt, ""), self.chat, "/completions", self.sampler.accepts)
        except NoTokens:
            return False
        return True

    def say(self, requests: Sequence[Request], *, at_once: int = 1, done: Done = lambda _: None) -> list[Said]:
        """Return the continuations of all requests, asking for those that are not stored.

        Raises:
            RequestFailed: for a request that is refused, or not answered after all retries.
            ServerUnusable: if no request would be answered.
        """
        pending = [request for request in requests if request.place not in self._journal]
        if pending:
            asyncio.run(self._complete(pending, at_once, done))
        return [self._read(request) for request in requests]

    async def _complete(self, pending: list[Request], at_once: int, done: Done) -> None:
        todo = iter(pending)

        async def work() -> None:
            for request in todo:
                asked = Asked(0, request.prompt, "")
                settings = {"temperature": request.temperature, "max_tokens": request.tokens, **request.fields}
                try:
                    answer = await self.sampler.ask(client, asked, list(request.place), **settings)
                except NoTokens as error:
                    raise RequestFailed(f"{client.url}: prompts {error}") from error
                self._require_sense(answer)
                self._journal.add(request.place, answer)
                done(request.tokens)

        async with ServerClient(self.sampler.server) as client:
            await together([work() for _ in range(min(at_once, len(pending)))])

    def _require_sense(self, answer: Answer) -> None:
        size = len(self.chat.tokenizer)
        where = f"server {self.sampler.server.base_url}"
        if any(token >= size for token in answer.tokens or ()):
            raise ConfigError(f"{where} answers with tokens beyond the tokenizer's {size}; expected the target's")
        if answer.finish == CUT and not (answer.text or answer.tokens or answer.usage.get("completion_tokens")):
            raise ConfigError(f"{where} answers without a token; expected as many as it is asked for")

    def _read(self, request: Request) -> Said:
        answer = self._journal.get(request.place)
        assert answer is not None, "every request was answered"
        return said(answer.text, answer.tokens, self._ends, ended=answer.finish == STOPPED and bool(self._ends))


PROBED = 96
"""Longest answer of a request that names no length."""


def said(text: str, tokens: list[int] | None, ends: frozenset[int], *, ended: bool) -> Said:
    """Return a continuation from a text and its tokens, of which the last may be the one that ended it."""
    if tokens and tokens[-1] in ends:
        return Said(bare(text), tokens[:-1], True)
    return Said(bare(text), tokens, ended)


async def _with_fields(
    sampler: ServerSampler, client: ServerClient, prompt: Prompt, settings: PairSettings
) -> ServerSampler:
    """Return the sampler with the fields that the server accepts beyond OpenAI's."""
    unchanged = UNCHANGED if settings.top_k is None else {**UNCHANGED, "top_k": settings.top_k}
    found = sampler
    for extra in (unchanged, {**unchanged, **WITH_TOKENS}):
        section = sampler.server.model_copy(update={"extra_body": extra})
        trial = replace(sampler, data=sampler.data.model_copy(update={"server": section}))
        try:
            answer = await trial.ask(client, Asked(0, prompt.input_ids, ""), [0], max_tokens=1)
        except RequestFailed:
            return found
        if answer.tokens is not None:
            return trial
        found = trial if extra is unchanged else found
    return found


def seen_before(tokens: list[int], after: list[int]) -> int:
    """Return the place of the first of `after` that is in the text before it; 0 if there is none."""
    known = set(tokens)
    for place, token in enumerate(after):
        if token in known and place:
            return place
        known.add(token)
    return 0


def filled(prompts: Sequence[Prompt], length: int) -> list[int]:
    """Return the prompts' tokens one after another, repeated up to a length."""
    every = list(chain.from_iterable(prompt.input_ids for prompt in prompts))
    return (every * (1 + length // len(every)))[:length]
