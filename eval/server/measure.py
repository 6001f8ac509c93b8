"""Measure servers: the prompts and batches of a local measurement, asked over HTTP."""

import asyncio
import json
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from draftsmith.distill.asked import Asked
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.regeneration import SampleSettings
from draftsmith.distill.server.answers import Answer, NoTokens
from draftsmith.distill.server.client import RequestFailed, Servers
from draftsmith.distill.server.probe import check_servers
from draftsmith.distill.server.sampling import ServerSampler
from draftsmith.distill.server.settings import ServerSection
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.eval.metrics import Series
from draftsmith.eval.prompts import Batch, Prompt, batches
from draftsmith.eval.server.counters import CounterRoutes, Counters
from draftsmith.eval.settings import Settings
from draftsmith.eval.stages import stage

Condition = tuple[float, int]
"""Temperature, and the number of requests at a time."""
SETTLE_SECONDS = 0.2
"""Time between two readings of counters that have to agree: engines update them after an answer."""


class ServerSeries:
    """The numbers of one server under one condition, each [unit][repeat]; a unit is a batch of prompts."""

    def __init__(self, units: list[list[str]], repeats: int) -> None:
        self.units = units
        self.tokens, self.rounds, self.seconds, self.accepted, self.tested = (
            np.zeros((len(units), repeats)) for _ in range(5)
        )
        self.tested_at: list[float] = []
        self.accepted_at: list[float] = []
        """By draft position, over all units and repeats."""

    def add(self, unit: int, repeat: int, tokens: int, seconds: float, counted: Counters) -> None:
        """Add the answers to one batch. The tokens of a server without drafts are one a round."""
        tested = (counted.rounds, *counted.accepted[:-1]) if counted.accepted else ()
        place = (unit, repeat)
        numbers = (tokens, counted.rounds or tokens, seconds, sum(counted.accepted), sum(tested))
        for grid, number in zip(self._grids, numbers, strict=True):
            grid[place] += number
        missing = [0.0] * (len(tested) - len(self.tested_at))
        self.tested_at, self.accepted_at = self.tested_at + missing, self.accepted_at + missing
        for position, (reached, taken) in enumerate(zip(tested, counted.accepted, strict=True)):
            self.tested_at[position] += reached
            self.accepted_at[position] += taken

    @property
    def _grids(self) -> tuple[NDArray, ...]:
        return self.tokens, self.rounds, self.seconds, self.accepted, self.tested

    @property
    def series(self) -> Series:
        """The numbers as a local measurement has them; alpha is the share of tested positions that were accepted."""
        return Series(self.units, *self._grids)


@dataclass(frozen=True)
class Measured:
    """A server's numbers by condition, and whether they have rounds."""

    conditions: dict[Condition, ServerSeries]
    counted: bool
    """The engine counts drafts or verifications, so that tau is known."""
    sglang_tau: float | None = None
    """SGLang's own mean since its start, where it counts no verifications."""


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
            async with Servers(self.server) as servers:
                await self._checked(servers)

        CounterRoutes(self.server.urls[0]).counters()
        asyncio.run(ask())

    def measure(self, name: str) -> Measured:
        """Check that the server serves the target, warm it up, and ask all prompts under every condition."""
        routes = CounterRoutes(self.server.urls[0])
        before = routes.counters()
        total = self.settings.repeats * sum(len(self.units(size)) for _, size in self.conditions)
        with stage(f"measuring {name}", total) as done:
            measured = asyncio.run(self._measure(routes, done))
        drafted = routes.counters().since(before).rounds > 0
        return Measured(measured, drafted, None if drafted else routes.sglang_tau())

    async def _checked(self, servers: Servers) -> ServerSampler:
        sampler = self._sampler(self.settings.temperatures[0], 0)
        await check_servers(sampler, self._questions(), servers, target=self.settings.target)
        return sampler

    async def _measure(self, routes: CounterRoutes, done: Any) -> dict[Condition, ServerSeries]:
        found: dict[Condition, ServerSeries] = {}
        async with Servers(self.server, first=self.server.concurrency) as servers:
            sampler = await self._checked(servers)
            await self._batch(sampler, servers, batches(self.prompts, 1)[0], 0)  # warm-up
            for temperature, size in self.conditions:
                groups = batches(self.prompts, size)
                series = ServerSeries(self.units(size), self.settings.repeats)
                for repeat in range(self.settings.repeats):
                    asking = replace(self._sampler(temperature, repeat), accepts=sampler.accepts)
                    for unit, group in enumerate(groups):
                        before = await settled(routes)
                        tokens, seconds = await self._batch(asking, servers, group, unit)
                        series.add(unit, repeat, tokens, seconds, (await settled(routes)).since(before))
                        done()
                found[temperature, size] = series
        return found

    def _sampler(self, temperature: float, repeat: int) -> ServerSampler:
        samples = SampleSettings(self.settings.max_new_tokens, temperature, 1, self.settings.seed + 10_007 * repeat)
        return ServerSampler(self.server, self.chat, samples, self.context)

    def _questions(self) -> Dataset:
        return Dataset.from_list([{"input_ids": p.input_ids, "turns": _turns(p)} for p in self.prompts])

    async def _batch(self, sampler: ServerSampler, servers: Servers, group: Batch, unit: int) -> tuple[int, float]:
        """Return the tokens and the seconds of a batch: all its prompts at a time, turn by turn.

        The first token of an answer is no round's, and does not count; the seconds are those of whole requests.
        """
        texts = [Asked(number, p.input_ids, _turns(p)) for number, p in enumerate(group.prompts)]
        tokens, seconds, turn = 0, 0.0, 0
        while texts:
            started = time.perf_counter()
            answers = await asyncio.gather(*(_answer(sampler, servers, text, [unit, turn]) for text in texts))
            seconds += time.perf_counter() - started
            tokens += sum(answer.usage["completion_tokens"] - 1 for answer in answers)
            texts = [
                text for text, answer in zip(texts, answers, strict=True) if _continues(sampler, text, answer, turn)
            ]
            turn += 1
        return tokens, seconds


def _turns(prompt: Prompt) -> str:
    asked = prompt.conversation
    return "" if asked is None else json.dumps({"turns": asked.turns, "tools": asked.tools})


async def _answer(sampler: ServerSampler, servers: Servers, text: Asked, place: list[int]) -> Answer:
    try:
        answer = await sampler.ask(servers, text, [text.index, *place])
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
    """Return the counters once two readings agree."""
    last = await asyncio.to_thread(routes.counters)
    while last.known:
        await asyncio.sleep(SETTLE_SECONDS)
        now = await asyncio.to_thread(routes.counters)
        if now == last:
            break
        last = now
    return last
