"""Responses of the target that a running server samples, as rows like those of `draftsmith.distill.regeneration`."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from rich.progress import TaskID, TextColumn

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, ServerSection, require_client
from draftsmith.distill.server.answers import (
    CHAT,
    COMPLETION,
    KEPT,
    Accepts,
    Answer,
    AnswerJournal,
    AnswerReader,
    NoTokens,
    prompt_fields,
    read_answer,
)
from draftsmith.distill.server.client import LOST, RequestFailed, ServerClient
from draftsmith.distill.turns import Asked, question_numbers, text_seed
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.provenance import fingerprint
from draftsmith.storage import cache_dir, hold_cache, writing
from draftsmith.terminal import Bars, Terminal, units

VERSION = 2
ANSWERS = "answers.jsonl"
LEFT_OUT_FIRST = 20
"""Answers that may be left out before half of all answers must be usable."""
FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "spans": List(List(Value("int64"))),
        "question": Value("int64"),
        "messages": Value("string"),
        "usage": Value("string"),
    }
)
"""Columns of the rows. `usage`: the numbers of tokens that the server counted for each span, as JSON."""


@dataclass
class ServerSampler:
    """Ask a server for the responses to all questions.

    Args:
        chat: the target's tokenizer, with the chat template that the server uses.
        data: how many tokens to sample, how often and at which temperature, and the server.
        context: the target's context limit.
        target: for the cache key: the fingerprint of its numbers or, where it is not loaded, its name.
    """

    data: DataSection
    chat: Chat
    seed: int
    context: int | None
    target: str
    accepts: Accepts = field(default_factory=Accepts)
    """As the greedy probe found them."""

    def __post_init__(self) -> None:
        assert self.data.server is not None, "the section names a server"
        self.server: ServerSection = self.data.server
        thinking = self.server.thinking == "keep"
        self._reader = AnswerReader(self.chat, self.data.response_tokens, thinking)

    def target_key(self) -> str:
        """Return a key of what an answer depends on besides the question and the number of the response."""
        return fingerprint([VERSION, self.target, self.described(), self.chat.key()])

    def key(self, questions: Dataset) -> str:
        """Return the cache key of the answers, from everything that they depend on except their number."""
        return fingerprint([self.target_key(), question_numbers(questions)])

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
    """Return the server's responses to all questions as rows (`FEATURES`), those of the first response first.

    Answers are stored as they come, by question. After a kill the same call asks only for the others; for more
    responses, or for another data set with some of the questions, only for the new ones.

    Args:
        say: called with the numbers and reasons of what is left out.
        check: an async function that checks the server before anything is asked, see `check_server`.
        folder: store the answers here instead of in the cache.

    Raises:
        ConfigError: for a server of another model, and if no answer can be used.
        DraftsmithError: for too many failures; the answers are kept.
    """
    cached = folder is None
    folder = folder or cache_dir() / "samples" / f"server-{sampler.target_key()}" / sampler.key(questions)
    rows = folder / f"rows-{sampler.data.responses}.arrow"
    with nullcontext() if rows.exists() else hold_cache(folder):
        if not rows.exists():
            require_client()
            journal = AnswerJournal(folder / ANSWERS, sampler.described())
            run = _Run(sampler, questions, journal, say)
            for other in sorted(folder.parent.glob(f"*/{ANSWERS}")) if cached else ():
                journal.copy(other, set(run.numbers))
            asyncio.run(run.complete(check, progress))
            run.write(rows)
    return Dataset.from_file(str(rows))


class _Run:
    """The conversations of one call, and their answers."""

    def __init__(
        self, sampler: ServerSampler, questions: Dataset, journal: AnswerJournal, say: Callable[[str], None]
    ) -> None:
        self.sampler, self.questions, self.journal, self.say = sampler, questions, journal, say
        self.numbers = question_numbers(questions)
        self.left_out: Counter[str] = Counter()
        self.failures: list[str] = []

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the number of every response and question."""
        for response in range(self.sampler.data.responses):
            for question in range(len(self.questions)):
                yield response, question

    def replay(self, response: int, question: int) -> tuple[Asked, int | None]:
        """Return a conversation with its stored answers, and the turn that is to be asked; None if it is complete."""
        row, number = self.questions[question], self.numbers[question]
        asked, turn = Asked(question, list(row["input_ids"]), row["turns"]), 0
        while (answer := self.journal.get((response, number, turn))) is not None:
            if not self._add(asked, answer, turn):
                return asked, None
            turn += 1
        return asked, turn

    def _add(self, asked: Asked, answer: Answer, turn: int) -> bool:
        try:
            return self.sampler.add(asked, answer, turn)
        except NoTokens as reason:
            self.left_out[str(reason)] += 1
            return False

    async def complete(self, check: Callable[..., Any], progress: bool) -> None:
        """Ask for everything that is not stored yet."""
        pending = [place for place in self.places() if self.replay(*place)[1] is not None]
        total = len(self.questions) * self.sampler.data.responses
        if not pending:
            return
        self.say(f"responses: {len(pending):,} of {total:,} are new")
        state = TextColumn("{task.fields[state]}")
        async with ServerClient(self.sampler.server) as client:
            await check(self.sampler, self.questions, client)
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
                self.left_out[str(reason)] += 1
            bar.update(task, advance=1, state=f"{len(self.failures)} failed" if self.failures else "")

    async def _converse(self, response: int, question: int, client: ServerClient) -> None:
        asked, turn = self.replay(response, question)
        number = self.numbers[question]
        while turn is not None:
            answer = await self.sampler.ask(client, asked, [response, number, turn])
            self.journal.add((response, number, turn), answer)
            turn = turn + 1 if self._add(asked, answer, turn) else None
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
        count = sum(self.left_out.values())
        if count > LEFT_OUT_FIRST and count > len(self.journal) / 2:
            reason, _ = self.left_out.most_common(1)[0]
            raise DraftsmithError(f"{count} of {len(self.journal)} answers {reason}; expected a server of the target")

    def write(self, file: Path) -> None:
        """Write the rows of all conversations in the order of the questions, and report what is left out."""
        self.left_out.clear()
        temporary, count = file.with_suffix(".tmp"), 0
        with writing(file, KEPT), ArrowWriter(features=FEATURES, path=str(temporary)) as writer:
            for place in self.places():
                for row in self._rows(*place):
                    writer.write(row)
                    count += 1
            writer.finalize()
        for reason, number in self.left_out.items():
            self.say(f"server: {number:,} conversations {reason}: left out from there on")
        if self.failures:
            self.say(f"server: {len(self.failures):,} conversations failed ({self.failures[-1]}): left out")
        if not count:
            raise ConfigError(
                f"server: {'; '.join(self.left_out) or 'no answers'}; expected at least one that is usable"
            )
        temporary.replace(file)

    def _rows(self, response: int, question: int) -> Iterator[dict[str, Any]]:
        asked, _ = self.replay(response, question)
        turn = 0
        for row in asked.rows():
            turns = range(turn, turn + len(row["spans"]))
            answers = [self.journal.get((response, self.numbers[question], turn)) for turn in turns]
            turn = turns.stop
            yield {**row, "usage": json.dumps([answer.usage for answer in answers if answer is not None])}


async def together(jobs: list[Any]) -> None:
    """Run coroutines until all are done; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
