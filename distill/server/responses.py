"""Responses of the target that a running server samples, as rows like those of `draftsmith.distill.regeneration`."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from rich.progress import TaskID, TextColumn

from draftsmith.distill.answered import FEATURES, AnsweredQuestions, sampling_key
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, ServerSection, require_client
from draftsmith.distill.server.answers import (
    CHAT,
    COMPLETION,
    Accepts,
    Answer,
    AnswerJournal,
    AnswerReader,
    NoTokens,
    prompt_fields,
    read_answer,
)
from draftsmith.distill.server.client import LOST, RequestFailed, ServerClient
from draftsmith.distill.turns import Asked, text_seed
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.provenance import fingerprint
from draftsmith.storage import cache_dir, hold_cache
from draftsmith.terminal import Bars, Terminal, units

VERSION = 2
LEFT_OUT_FIRST = 20
"""Answers that may be left out before half of all answers must be usable."""
USED = Features({**FEATURES, "usage": Value("string")})
"""Columns of the rows. `usage`: the counts of tokens by the server for each span, as JSON."""


@dataclass
class ServerSampler:
    """Ask a server for the responses to all questions.

    Args:
        chat: the target's tokenizer, with the chat template that the server uses.
        data: how many tokens to sample, how often and at which temperature, and the server.
        context: the target's context limit.
        target: for the cache key: the fingerprint of its weights or, where it is not loaded, its name.
    """

    data: DataSection
    chat: Chat
    seed: int
    context: int | None
    target: str
    accepts: Accepts = field(default_factory=Accepts)
    """As the greedy probe found them."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, on which answers do not depend."""

    def __post_init__(self) -> None:
        assert self.data.server is not None, "the section names a server"
        self.server: ServerSection = self.data.server
        thinking = self.server.thinking == "keep"
        self._reader = AnswerReader(self.chat, self.data.response_tokens, thinking)

    def target_key(self, questions: Dataset) -> str:
        return fingerprint([VERSION, self.target, self.described(), self.chat.key()])

    def described(self) -> dict[str, Any]:
        """Return the model and the settings that are stored with the answers."""
        sampled = self.data.model_dump(include={"response_tokens", "temperature"})
        return {**self.server.sampling, **sampled, "seed": self.seed}

    def path(self, asked: Asked) -> str:
        """Return the route of a conversation; ConfigError for the chat route and plain text."""
        if self.server.route == "completion" or (self.server.route == "auto" and not self._templated(asked)):
            return COMPLETION
        if not self._templated(asked):
            raise ConfigError("route='chat' with plain text or a target without a chat template; expected 'completion'")
        return CHAT

    def _templated(self, asked: Asked) -> bool:
        return bool(asked.messages) and bool(self.chat.tokenizer.chat_template)

    def fits(self, prompt: list[int]) -> bool:
        """Return whether a prompt and the longest response fit the target's context."""
        return self.context is None or len(prompt) + self.data.response_tokens <= self.context

    async def ask(self, client: ServerClient, asked: Asked, seed: list[int], **instead: Any) -> Answer:
        """Return the answer to the last question; `instead` replaces fields of the request.

        Raises:
            NoTokens: for a prompt that cannot be sent.
        """
        path = self.path(asked)
        body = {
            "model": self.server.model,
            "temperature": self.data.temperature,
            "top_p": self.server.top_p,
            "max_tokens": self.data.response_tokens,
            "seed": request_seed(self.seed, *seed),
            **prompt_fields(asked, self.chat, path, self.accepts),
            **self.server.extra_body,
            **self.more,
            **instead,
        }
        if self.context is not None:  # engines refuse to be asked for more
            body["max_tokens"] = max(1, min(body["max_tokens"], self.context - len(asked.prompt)))
        return await client.ask(path, body, lambda payload: read_answer(payload, path, asked.prompt))

    def add(self, asked: Asked, answer: Answer, turn: int) -> bool:
        """Append an answer and the next question; return False when the conversation is complete.

        Raises:
            NoTokens: for an answer that is left out, with the rest of the conversation.
        """
        self._reader.add(asked, answer, self.path(asked))
        return asked.ask(self.chat, turn + 1, self.fits)


def request_seed(*parts: int) -> int:
    """Return a seed of 31 bits, which every engine accepts; different for different parts."""
    return text_seed(*parts) >> 32


def server_samples(
    sampler: ServerSampler,
    questions: Dataset,
    say: Callable[[str], None],
    check: Callable[[ServerSampler, Dataset, ServerClient], Any],
    *,
    folder: Path | None = None,
    progress: bool = True,
) -> Dataset:
    """Return the server's responses to all questions as rows (`USED`), those of the first response first.

    Answers are stored as they come, by question. After a kill the same call asks only for the others; for more
    responses, or for another data set with some of the questions, only for the new ones.

    Args:
        say: called with the counts and reasons of what is left out.
        check: an async function that checks the server before anything is asked, see `require_served`.
        folder: store the answers here instead of in the cache.

    Raises:
        ConfigError: for a server of another model, and if no answer can be used.
        DraftsmithError: for too many failures; the answers are kept.
    """
    cached = folder is None
    if folder is None:
        place = cache_dir() / "samples" / f"server-{sampler.target_key(questions)}"
        folder = place / sampling_key(sampler, questions)
    rows = folder / f"rows-{sampler.data.responses}.arrow"
    with nullcontext() if rows.exists() else hold_cache(folder):
        if not rows.exists():
            require_client()
            journal = AnswerJournal(folder / "answers.jsonl", sampler.described())
            answered = AnsweredQuestions(sampler, questions, sampler.data.responses, journal)
            if cached:
                answered.copy_from(folder.parent)
            run = _Run(sampler, answered, say)
            asyncio.run(run.complete(check, progress))
            run.write(rows)
    return Dataset.from_file(str(rows))


class _Run:
    """The questions of one call while a server answers them."""

    def __init__(self, sampler: ServerSampler, answered: AnsweredQuestions, say: Callable[[str], None]) -> None:
        self.sampler, self.answered, self.say = sampler, answered, say
        self.failures: list[str] = []

    async def complete(self, check: Callable[..., Any], progress: bool) -> None:
        """Ask for everything that is not stored yet."""
        pending, questions = self.answered.pending(), self.answered.questions
        total = len(questions) * self.sampler.data.responses
        if not pending:
            return
        self.say(f"responses: {len(pending):,} of {total:,} are new")
        state = TextColumn("{task.fields[state]}")
        async with ServerClient(self.sampler.server) as client:
            await check(self.sampler, questions, client)
            with Bars(*units(), state, console=Terminal(stderr=True), disable=not progress) as bar:
                task = bar.add_task("asking the server", total=total, completed=total - len(pending), state="")
                todo = iter(pending)
                workers = min(self.sampler.server.concurrency, len(pending))
                await together([self._work(todo, client, bar, task) for _ in range(workers)])

    async def _work(self, todo: Iterator[tuple[int, int]], client: ServerClient, bar: Bars, task: TaskID) -> None:
        for response, question in todo:
            try:
                await self._converse(response, question, client)
            except RequestFailed as error:
                self._failed(str(error))
            except NoTokens as reason:
                self.answered.left_out[str(reason)] += 1
            bar.update(task, advance=1, state=f"{len(self.failures)} failed" if self.failures else "")

    async def _converse(self, response: int, question: int, client: ServerClient) -> None:
        asked, turn = self.answered.replay(response, question)
        while turn is not None:
            answer = await self.sampler.ask(client, asked, [response, asked.number, turn])
            turn = self.answered.add(asked, response, turn, answer)
            self._require_usable()

    def _failed(self, reason: str) -> None:
        self.failures.append(reason)
        most = self.sampler.server.failures
        if len(self.failures) > most:
            raise DraftsmithError(
                f"{len(self.failures)} conversations failed, more than failures={most} ({reason}); {LOST}"
            )

    def _require_usable(self) -> None:
        """Stop where more than half of the answers are left out: the server has another tokenizer or template."""
        left_out, journal = self.answered.left_out, self.answered.journal
        count = sum(left_out.values())
        if count > LEFT_OUT_FIRST and count > len(journal) / 2:
            reason, _ = left_out.most_common(1)[0]
            raise DraftsmithError(f"{count} of {len(journal)} answers {reason}; expected a server of the target")

    def write(self, file: Path) -> None:
        """Write the rows of all conversations, and report what is left out."""
        temporary = file.with_suffix(".tmp")
        count = self.answered.write(temporary, _usage, USED)
        left_out = self.answered.left_out
        for reason, number in left_out.items():
            self.say(f"server: {number:,} conversations {reason}: left out from there on")
        if self.failures:
            self.say(f"server: {len(self.failures):,} conversations failed ({self.failures[-1]}): left out")
        if not count:
            raise ConfigError(f"server: {'; '.join(left_out) or 'no answers'}; expected at least one that is usable")
        temporary.replace(file)


def _usage(answers: list[Answer]) -> dict[str, Any]:
    return {"usage": json.dumps([answer.usage for answer in answers])}


async def together(jobs: list[Any]) -> None:
    """Run coroutines until all are done; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
