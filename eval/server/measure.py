"""Measure servers: the prompts and batches of a local measurement, asked over HTTP."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, ServerSection
from draftsmith.distill.server.answers import Answer, NoTokens
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.probe import alike, check_temperatures, require_served
from draftsmith.distill.server.responses import ServerSampler
from draftsmith.distill.turns import Asked
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.eval.harness import Grid
from draftsmith.eval.journal import COUNTED, Journal, Numbers, Place, ServedCell
from draftsmith.eval.prompts import Prompt, PromptBatch, batches
from draftsmith.eval.server.counters import CounterRoutes, Counters, settled
from draftsmith.eval.settings import BASELINE, Arm, Settings
from draftsmith.provenance import environment
from draftsmith.terminal import stage


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
    notes: list[str] = field(default_factory=list)
    """Conditions that do not hold, named while it is measured."""

    async def checked(self, client: ServerClient) -> ServerSampler:
        """Return the client of the server, after the checks that it serves the target."""
        sampler, questions = self.sampler(self.settings.temperatures[0], 0), self._questions()
        await require_served(sampler, questions, client, target=self.settings.target)
        if max(self.settings.temperatures) > 0:
            await check_temperatures(sampler, questions, client)
        return sampler

    async def alike(self, sampler: ServerSampler, client: ServerClient) -> bool:
        """Return whether it was to sample, and answers every seed alike."""
        return max(self.settings.temperatures) > 0 and await alike(sampler, self._questions(), client)

    def _questions(self) -> Dataset:
        return Dataset.from_list([{"input_ids": p.input_ids, "turns": _turns(p)} for p in self.prompts])

    def sampler(self, temperature: float, repeat: int) -> ServerSampler:
        """Return a function that asks with the seed of a repeat."""
        tokens = self.settings.max_new_tokens
        data = DataSection(response_tokens=tokens, temperature=temperature, server=self.server)
        seed = self.settings.seed + 10_007 * repeat
        return ServerSampler(data, self.chat, seed, self.context, self.settings.target)

    async def turn(
        self, sampler: ServerSampler, client: ServerClient, texts: Sequence[Asked], place: list[int]
    ) -> tuple[int, float, list[str | None]]:
        """Return the tokens and the seconds of one turn of texts that are asked at a time, and why each of them ends.

        The first token of an answer is no round's, and does not count; the seconds are those of whole requests. None:
        the text continues; '': it is complete.
        """
        started = time.perf_counter()
        answers = await asyncio.gather(*(_answer(sampler, client, text, place) for text in texts))
        seconds = time.perf_counter() - started
        tokens = sum(answer.usage["completion_tokens"] - 1 for answer in answers)
        return tokens, seconds, [_end(sampler, *both, place[1]) for both in zip(texts, answers, strict=True)]


@dataclass
class _Measured:
    """A server while it is measured."""

    arm: Arm
    run: ServerRun
    client: ServerClient
    sampler: ServerSampler
    routes: CounterRoutes
    counters: Counters | None = None
    """As they are after the warm-up."""

    def numbers(self, tokens: int, seconds: float, before: Counters, after: Counters) -> Numbers:
        """Return a batch's numbers; ConfigError where it is not counted as the first one, or a baseline drafts."""
        after.since(self.counters or before)  # raises where they were not read after the warm-up, or are not now
        counted = after.since(before)
        if self.arm == BASELINE and counted.rounds:
            raise ConfigError(f"baseline={self.run.server.url} drafts; expected a server without a drafter")
        return Numbers(tokens, seconds, counted.rounds, counted.accepted, counted.drafted)


async def _batch(servers: Sequence[_Measured], group: PromptBatch, place: Place) -> list[Numbers]:
    """Return each server's numbers of a batch: all its prompts at a time, turn by turn, in the order of the servers.

    All are asked the same questions: a conversation ends for all of them where an answer of one cannot be continued.
    """
    asking = [replace(s.run.sampler(place.temperature, place.repeat), accepts=s.sampler.accepts) for s in servers]
    texts = [[Asked(number, p.input_ids, _turns(p)) for number, p in enumerate(group.prompts)] for _ in servers]
    sums, left_out, turn = [[0, 0.0] for _ in servers], Counter[str](), 0
    before = [await settled(server.routes) for server in servers]
    while texts[0]:
        ends: list[list[str | None]] = []
        for server, sampler, own, total in zip(servers, asking, texts, sums, strict=True):
            tokens, seconds, ended = await server.run.turn(sampler, server.client, own, [place.group, turn])
            total[0], total[1] = total[0] + tokens, total[1] + seconds
            ends.append(ended)
        turn += 1
        why = [next((end for end in of_text if end is not None), None) for of_text in zip(*ends, strict=True)]
        for text, reason in zip(texts[0], why, strict=True):
            left_out[reason or ""] += 0 if reason is None else text.turns - turn
        texts = [[text for text, end in zip(own, why, strict=True) if end is None] for own in texts]
    lost = tuple((reason, count) for reason, count in left_out.items() if count)
    after = [await settled(server.routes) for server in servers]
    parts = zip(servers, sums, before, after, strict=True)
    return [server.numbers(int(n), s, *read)._replace(left_out=lost) for server, (n, s), *read in parts]


def measure_in_turns(runs: dict[str, ServerRun], grid: Grid[ServedCell], identity: dict[str, Any]) -> None:
    """Check that the servers serve the target, warm them up, and ask all of each batch in turns.

    The first of them changes with each batch, so that changes of the machine concern all. `identity`: what the numbers
    in the journal depend on besides the settings.
    """
    with stage(f"measuring {' and '.join(runs)}", len(runs) * len([*grid.places()])) as done:
        asyncio.run(_measure(runs, grid, identity, done))


async def _measure(
    runs: dict[str, ServerRun], grid: Grid[ServedCell], identity: dict[str, Any], done: Callable[[int], None]
) -> None:
    async with AsyncExitStack() as stack:
        servers: dict[Arm, _Measured] = {}
        for name, run in reversed(runs.items()):  # the baseline first: nothing is asked where it cannot be used
            client = await stack.enter_async_context(ServerClient(run.server))
            routes = CounterRoutes(run.server.base_url)
            sampler = await run.checked(client)
            if await run.alike(sampler, client):
                run.notes.append(
                    f"{run.server.url} answers every seed alike: it ignores seeds or temperatures, or its settings "
                    "leave one token to choose, so that rows above T=0 do not show it, nor repeats other texts."
                )
            servers = {(name, ""): _Measured((name, ""), run, client, sampler, routes), **servers}
        grid.journal.begin(grid.settings, identity, environment())
        for each in servers.values():
            place = Place(0, grid.settings.temperatures[0], 1, 0, 0)
            await _batch([each], batches(grid.prompts, 1)[0], place)  # warm-up
            each.counters = await settled(each.routes)
        _require_counted_alike(servers.values(), grid.journal)
        for place in grid.places():
            if grid.pending(servers, place):  # all are asked, since a conversation ends for all of them alike
                turns = [servers[arm] for arm in grid.order(servers, place)]
                numbers = await _batch(turns, grid.batch(place), place)
                for each, measured in zip(turns, numbers, strict=True):
                    grid.journal.add(ServedCell(each.arm, place, measured))
            done(len(servers))


def _require_counted_alike(servers: Iterable[_Measured], journal: Journal[ServedCell]) -> None:
    """Store why each server's counters are not known; ConfigError where those of earlier batches were known, or not."""
    why = {each.arm[0]: each.counters.why for each in servers if each.counters is not None}
    before = journal.facts.get(COUNTED, why)
    if any(bool(reason) != bool(before.get(name)) for name, reason in why.items()):
        raise ConfigError(
            f"server's /metrics were {'' if any(why.values()) else 'not '}read for the first batches "
            f"({next(filter(None, [*why.values(), *before.values()]))}); expected the same, or --overwrite"
        )
    journal.fact(COUNTED, why)


def _turns(prompt: Prompt) -> str:
    asked = prompt.conversation
    return "" if asked is None else json.dumps({"turns": asked.turns, "tools": asked.tools}, default=str)


async def _answer(sampler: ServerSampler, client: ServerClient, text: Asked, place: list[int]) -> Answer:
    try:
        answer = await sampler.ask(client, text, [text.index, *place])
    except (RequestFailed, NoTokens) as error:
        raise DraftsmithError(f"server: a prompt was not answered ({error}); expected an answer to each") from error
    if "completion_tokens" not in answer.usage:
        raise ConfigError("server does not say how many tokens it generated (usage); expected completion_tokens")
    if answer.usage["completion_tokens"] < 1:
        raise ConfigError(
            f"server says completion_tokens={answer.usage['completion_tokens']} of an answer (finish_reason="
            f"{answer.finish}); expected at least 1: prompts that the target continues"
        )
    return answer


def _end(sampler: ServerSampler, text: Asked, answer: Answer, turn: int) -> str | None:
    """Append the answer and the next question; return None, or why there is none: '' for a text that is complete."""
    last = turn + 1 == text.turns
    try:
        more = sampler.add(text, answer, turn)
    except NoTokens as reason:  # without its tokens the next question cannot follow the answer
        return "" if last else str(reason)
    return None if more else "" if last else "leave no room in the context"
