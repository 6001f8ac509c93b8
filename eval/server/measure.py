"""Measure servers: the prompts and batches of a local measurement, asked over HTTP."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from draftsmith.bars import stage
from draftsmith.distill.asked import Asked
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.server.answers import Answer, NoTokens
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.probe import check_server, check_temperatures
from draftsmith.distill.server.sampling import ServerSampler
from draftsmith.distill.server.settings import ServerSection
from draftsmith.errors import ConfigError, DraftsmithError, reason_of
from draftsmith.eval.prompts import Batch, Prompt, batches
from draftsmith.eval.server.counters import CounterRoutes, Counters
from draftsmith.eval.settings import Settings, Variant
from draftsmith.metrics import Series, as_series
from draftsmith.reading import read_text
from draftsmith.storage import write_text, writing

Condition = tuple[float, int]
"""Temperature, and the number of requests at a time."""
SETTLE_SECONDS = 0.2
"""Time between two readings of counters that have to agree: engines update them after an answer."""
SETTLE_READINGS = 50


class Numbers(NamedTuple):
    """Tokens and seconds of a batch, and the engine's counts of verified drafts and of accepted tokens by position."""

    tokens: int
    seconds: float
    drafts: float
    accepted: tuple[float, ...]

    @property
    def rounds(self) -> float:
        """Rounds of all texts.

        Every round commits one token that was not drafted; vLLM counts the rounds with a draft only. The tokens of a
        server without drafts are one a round.
        """
        if self.accepted:
            return max(self.drafts, self.tokens - sum(self.accepted))
        return self.drafts or self.tokens

    @property
    def tested(self) -> tuple[float, ...]:
        """Rounds that tested each draft position; empty where the engine does not count positions."""
        return (self.drafts, *self.accepted[:-1]) if self.accepted else ()


Batches = dict[tuple[int, int], Numbers]
"""By unit (batch of prompts) and repeat."""


def series_of(arm: Variant, condition: Condition, units: list[list[str]], found: Batches) -> Series:
    """Return the numbers as a local measurement has them; alpha is the share of tested positions that were accepted."""
    sums = np.zeros((5, len(units), 1 + max(repeat for _, repeat in found)))
    for (unit, repeat), batch in found.items():
        sums[:, unit, repeat] = batch.tokens, batch.rounds, batch.seconds, sum(batch.accepted), sum(batch.tested)
    return as_series(arm, *condition, units, sums)


@dataclass(frozen=True)
class Measured:
    """A server's numbers by condition, and whether they have rounds."""

    conditions: Mapping[Condition, Batches]
    counted: bool
    """The engine counts drafts or verifications, so that tau is known."""
    sglang_tau: float | None = None
    """SGLang's own mean since its start, where it counts no verifications."""


def _numbers(tokens: Any, seconds: Any, drafts: Any, accepted: Any) -> Numbers:
    return Numbers(int(tokens), float(seconds), float(drafts), tuple(float(count) for count in accepted))


class BatchJournal:
    """The measured batches, one line of JSON each, so that a measurement continues after a kill.

    Args:
        key: of everything that the numbers depend on.
        earlier: the key of the same measurement in earlier versions.
    """

    def __init__(self, file: Path, key: str, earlier: str | None = None) -> None:
        self._file = file
        try:
            text = read_text(file) if file.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            stored, *entries = [json.loads(line) for line in whole.splitlines()] or [key]
            self._done = {json.dumps(place): _numbers(*numbers) for place, numbers in entries}
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{file} is damaged ({reason_of(error)}); expected another --out") from error
        if stored not in (key, earlier):
            raise ConfigError(
                f"{file} has batches of a measurement with other options; expected them, or another --out"
            )
        if whole != text:
            write_text(file, whole)
        self._head = "" if whole else json.dumps(key) + "\n"

    def get(self, place: list[Any]) -> Numbers | None:
        """Return the numbers of a batch; None for one that was not measured."""
        return self._done.get(json.dumps(place))

    def add(self, place: list[Any], numbers: Numbers) -> None:
        """Store the numbers of a batch."""
        with writing(self._file, "batches so far are kept"), self._file.open("a", encoding="utf-8") as file:
            file.write(f"{self._head}{json.dumps([place, numbers])}\n")
        self._head = ""


@dataclass(frozen=True)
class ServerRun:
    """The measurement of one server.

    Args:
        settings: prompts, temperatures, batch sizes (requests at a time), repeats and seeds of a local measurement.
    """

    server: ServerSection
    settings: Settings
    chat: Chat
    context: int | None
    prompts: list[Prompt]

    @property
    def conditions(self) -> list[Condition]:
        """Every temperature with every number of requests."""
        return [(t, size) for t in self.settings.temperatures for size in self.settings.batch_sizes]

    def units(self, size: int) -> list[list[str]]:
        """Return the ids of the prompts of each batch."""
        return [[prompt.id for prompt in group.prompts] for group in batches(self.prompts, size)]

    def check(self) -> None:
        """Raise ConfigError unless the server serves the target."""

        async def ask() -> None:
            async with ServerClient(self.server) as client:
                await self.checked(client)

        CounterRoutes(self.server.base_url).counters()
        asyncio.run(ask())

    async def checked(self, client: ServerClient) -> ServerSampler:
        """Return the client of the server, after the checks that it serves the target."""
        sampler = self.sampler(self.settings.temperatures[0], 0)
        questions = Dataset.from_list([{"input_ids": p.input_ids, "turns": _turns(p)} for p in self.prompts])
        await check_server(sampler, questions, client, target=self.settings.target)
        if max(self.settings.temperatures) > 0:
            await check_temperatures(sampler, questions, client)
        return sampler

    def sampler(self, temperature: float, repeat: int) -> ServerSampler:
        """Return a function that asks with the seed of a repeat."""
        tokens = self.settings.max_new_tokens
        data = DataSection(response_tokens=tokens, temperature=temperature, server=self.server)
        seed = self.settings.seed + 10_007 * repeat
        return ServerSampler(data, self.chat, seed, self.context, self.settings.target)

    async def batch(self, sampler: ServerSampler, client: ServerClient, group: Batch, unit: int) -> tuple[int, float]:
        """Return the tokens and the seconds of a batch: all its prompts at a time, turn by turn.

        The first token of an answer is no round's, and does not count; the seconds are those of whole requests.
        """
        texts = [Asked(number, p.input_ids, _turns(p)) for number, p in enumerate(group.prompts)]
        tokens, seconds, turn = 0, 0.0, 0
        while texts:
            started = time.perf_counter()
            answers = await asyncio.gather(*(_answer(sampler, client, text, [unit, turn]) for text in texts))
            seconds += time.perf_counter() - started
            tokens += sum(answer.usage["completion_tokens"] - 1 for answer in answers)
            texts = [
                text for text, answer in zip(texts, answers, strict=True) if _continues(sampler, text, answer, turn)
            ]
            turn += 1
        return tokens, seconds


@dataclass
class _Asked:
    """A server while it is measured."""

    run: ServerRun
    client: ServerClient
    sampler: ServerSampler
    routes: CounterRoutes

    async def numbers(self, temperature: float, repeat: int, unit: int, group: Batch) -> Numbers:
        """Return a batch's tokens and seconds, and the engine's counts."""
        asking = replace(self.run.sampler(temperature, repeat), accepts=self.sampler.accepts)
        before = await settled(self.routes)
        tokens, seconds = await self.run.batch(asking, self.client, group, unit)
        counted = (await settled(self.routes)).since(before)
        return Numbers(tokens, seconds, counted.rounds, counted.accepted)


def measure_in_turns(runs: dict[str, ServerRun], journal: BatchJournal) -> dict[str, Measured]:
    """Check that the servers serve the target, warm them up, and ask all of each batch in turns.

    The first of them changes with each batch, so that changes of the machine concern all.
    """
    first = next(iter(runs.values()))
    total = first.settings.repeats * sum(len(first.units(size)) for _, size in first.conditions)
    with stage(f"measuring {' and '.join(runs)}", len(runs) * total) as done:
        return asyncio.run(_measured(runs, journal, done))


async def _measured(runs: dict[str, ServerRun], journal: BatchJournal, done: Any) -> dict[str, Measured]:
    async with AsyncExitStack() as stack:
        asked: dict[str, _Asked] = {}
        for name, run in reversed(runs.items()):  # the baseline first: nothing is asked where it cannot be used
            client = await stack.enter_async_context(ServerClient(run.server))
            asked[name] = _Asked(run, client, await run.checked(client), CounterRoutes(run.server.base_url))
        for each in (asked[name] for name in runs):
            await each.run.batch(each.sampler, each.client, batches(each.run.prompts, 1)[0], 0)  # warm-up
        run, found = next(iter(runs.values())), {name: dict[Condition, Batches]() for name in runs}
        for condition in run.conditions:
            groups = batches(run.prompts, condition[1])
            for repeat in range(run.settings.repeats):
                for unit, group in enumerate(groups):
                    for name in list(runs)[:: -1 if (repeat + unit) % 2 else 1]:
                        place = [name, *condition, repeat, unit]
                        numbers = journal.get(place)
                        if numbers is None:
                            numbers = await asked[name].numbers(condition[0], repeat, unit, group)
                            journal.add(place, numbers)
                        found[name].setdefault(condition, {})[unit, repeat] = numbers
                        done()
    counted = {name: any(n.drafts for of in each.values() for n in of.values()) for name, each in found.items()}
    return {
        name: Measured(each, counted[name], None if counted[name] else asked[name].routes.sglang_tau())
        for name, each in found.items()
    }


def _turns(prompt: Prompt) -> str:
    asked = prompt.conversation
    return "" if asked is None else json.dumps({"turns": asked.turns, "tools": asked.tools}, default=str)


async def _answer(sampler: ServerSampler, client: ServerClient, text: Asked, place: list[int]) -> Answer:
    try:
        answer = await sampler.ask(client, text, [text.index, *place])
    except (RequestFailed, NoTokens) as error:
        raise DraftsmithError(f"server: a prompt was not answered ({error}); expected an answer to each") from error
    if not answer.usage.get("completion_tokens"):
        raise ConfigError("server does not say how many tokens it generated (usage); expected completion_tokens")
    return answer


def _continues(sampler: ServerSampler, text: Asked, answer: Answer, turn: int) -> bool:
    try:
        return sampler.add(text, answer, turn)
    except NoTokens:
        return False  # without its tokens the next question cannot follow the answer


async def settled(routes: CounterRoutes) -> Counters:
    """Return the counters once two readings agree; ConfigError if no two of `SETTLE_READINGS` do."""
    last = await asyncio.to_thread(routes.counters)
    for _ in range(SETTLE_READINGS):
        if not last.known:
            return last
        await asyncio.sleep(SETTLE_SECONDS)
        before, last = last, await asyncio.to_thread(routes.counters)
        if last == before:
            return last
    raise ConfigError(
        f"server {routes.root} answers other requests: its counters changed in each of {SETTLE_READINGS} readings; "
        "expected none during a measurement"
    )
