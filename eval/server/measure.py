"""Measure servers: the prompts and batches of a local measurement, asked over HTTP.

Engines count their drafts. vLLM and llama-server count accepted tokens by position, too; SGLang counts verifications.
They are Prometheus counters of the whole server, so other requests during the measurement would count too.
"""

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from datasets import Dataset

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, ServerSection, is_this_machine, server_key
from draftsmith.distill.server.answers import Answer, NoTokens
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.probe import check_server, check_temperatures
from draftsmith.distill.server.responses import ServerSampler
from draftsmith.distill.turns import Asked
from draftsmith.errors import ConfigError, DraftsmithError, reason_of
from draftsmith.eval.journal import BATCH, Journal, Numbers
from draftsmith.eval.prompts import Prompt, PromptBatch, batches
from draftsmith.eval.settings import Settings, Variant
from draftsmith.metrics import Series, as_series
from draftsmith.provenance import environment
from draftsmith.terminal import stage

if TYPE_CHECKING:
    import httpx

SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
ROUNDS = ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts", "sglang:spec_verify_calls")
DRAFT_TOKENS = ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens")
PER_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos")
GENERATED = ("vllm:generation_tokens", "llamacpp:tokens_predicted", "sglang:generation_tokens")
"""Counters that exist without speculation, too; they distinguish a server without drafts from one without metrics."""
SECONDS = 30.0


@dataclass(frozen=True)
class Counters:
    """Numbers of a server since its start."""

    known: bool
    """The server has counters at all."""
    rounds: float = 0.0
    """Verified drafts of all texts."""
    accepted: tuple[float, ...] = ()
    """By draft position, drafts that were accepted up to it; empty where the engine does not count positions."""
    drafted: float = 0.0
    """Draft tokens, where the engine counts them."""

    def since(self, before: "Counters") -> "Counters":
        """Return the difference; ConfigError if the server was started again in between."""
        earlier = (*before.accepted, *([0.0] * len(self.accepted)))
        accepted = tuple(now - then for now, then in zip(self.accepted, earlier, strict=False))
        rounds = self.rounds - before.rounds
        if rounds < 0 or any(count < 0 for count in accepted) or len(self.accepted) < len(before.accepted):
            raise ConfigError("server's counters have decreased: it was started again; expected one that keeps running")
        return Counters(self.known, rounds, accepted, self.drafted - before.drafted)


def parse_counters(text: str) -> Counters:
    """Return the numbers in Prometheus' text format, summed over engines and ranks."""
    known, rounds, drafted, accepted = False, 0.0, 0.0, dict[int, float]()
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name, value = match["name"].removesuffix("_total"), _number(match["value"])
        known |= name in GENERATED + ROUNDS
        rounds += value if name in ROUNDS else 0.0
        drafted += value if name in DRAFT_TOKENS else 0.0
        position = POSITION.search(match["labels"] or "") if name in PER_POSITION else None
        if position is not None:
            place = int(position[1])
            accepted[place] = accepted.get(place, 0.0) + value
    positions = tuple(accepted.get(place, 0.0) for place in range(max(accepted, default=-1) + 1))
    return Counters(known, rounds, positions, drafted)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e300 else 0.0


LOSSY_METHODS = ("fly", "synthetic", "typical_acceptance_sampler")
"""vLLM's ways to verify that do not keep the target's distribution; standard, strict, probabilistic and block do."""
LOSSY_BELOW_ONE = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""SGLang's thresholds from which draft tokens are accepted without a test, if below 1."""


class CounterRoutes:
    """The routes of a server's counters, beside OpenAI's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.root = urlunsplit((parts.scheme, parts.netloc, parts.path.removesuffix("/v1"), "", ""))
        import httpx

        headers = {"Authorization": f"Bearer {server_key()}"} if server_key() else {}
        self._client = httpx.Client(headers=headers, timeout=SECONDS, trust_env=not is_this_machine(url))

    def counters(self) -> Counters:
        """Return the counters now; those of a server without the route are not known."""
        answer = self._get("/metrics")
        return Counters(False) if answer is None else parse_counters(answer.text)

    def sglang_tau(self) -> float | None:
        """Return SGLang's mean acceptance length since its start; None if it does not report it."""
        for state in self._states():
            value = state.get("avg_spec_accept_length")
            if isinstance(value, int | float) and 1 <= value < 1e6:
                return float(value)
        return None

    def lossy_options(self) -> list[str]:
        """Return the options with which the server changes the distribution, where it describes itself.

        vLLM does with VLLM_SERVER_DEV_MODE=1, SGLang always.
        """
        config = self._json("/server_info?config_format=json").get("vllm_config")
        section = config.get("speculative_config") if isinstance(config, dict) else None
        method = section.get("rejection_sample_method") if isinstance(section, dict) else None
        found = [f"rejection_sample_method={method}"] if method in LOSSY_METHODS else []
        for state in self._states():
            values = {key: state.get(key) for key in LOSSY_BELOW_ONE}
            below = {key: value for key, value in values.items() if isinstance(value, int | float) and value < 1}
            found += [f"{key}={value:g}" for key, value in below.items()]
        return list(dict.fromkeys(found))

    def _states(self) -> list[dict[str, Any]]:
        """Return SGLang's description of itself and of its ranks."""
        info = self._json("/get_server_info")
        states = info.get("internal_states")
        return [state for state in [info, *(states if isinstance(states, list) else [])] if isinstance(state, dict)]

    def _json(self, path: str) -> dict[str, Any]:
        """Return the object at a route; an empty one where the server has none."""
        answer = self._get(path)
        try:
            info = None if answer is None else answer.json()
        except ValueError:
            return {}
        return info if isinstance(info, dict) else {}

    def _get(self, path: str) -> "httpx.Response | None":
        import httpx

        try:
            answer = self._client.get(self.root + path)
        except httpx.HTTPError as error:
            raise ConfigError(f"server {self.root}{path} cannot be reached ({reason_of(error)})") from error
        return answer if answer.status_code == 200 else None


Condition = tuple[float, int]
"""Temperature, and the number of requests at a time."""
SETTLE_SECONDS = 0.2
"""Time between two readings of counters that have to agree: engines update them after an answer."""
SETTLE_READINGS = 50


Batches = dict[tuple[int, int], Numbers]
"""By unit (batch of prompts) and repeat."""


def series_of(arm: Variant, condition: Condition, units: list[list[str]], found: Batches) -> Series:
    """Return the numbers as a local measurement has them; alpha is the share of tested positions that were accepted."""
    sums = np.zeros((5, len(units), 1 + max(repeat for _, repeat in found)))
    for (unit, repeat), batch in found.items():
        sums[:, unit, repeat] = batch.tokens, batch.rounds, batch.seconds, sum(batch.accepted), sum(batch.tested)
    return as_series(arm, *condition, units, sums)


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

    async def batch(
        self, sampler: ServerSampler, client: ServerClient, group: PromptBatch, unit: int
    ) -> tuple[int, float]:
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

    async def numbers(self, temperature: float, repeat: int, unit: int, group: PromptBatch) -> Numbers:
        """Return a batch's tokens and seconds, and the engine's counts."""
        asking = replace(self.run.sampler(temperature, repeat), accepts=self.sampler.accepts)
        before = await settled(self.routes)
        tokens, seconds = await self.run.batch(asking, self.client, group, unit)
        counted = (await settled(self.routes)).since(before)
        return Numbers(tokens, seconds, counted.rounds, counted.accepted)


def measure_in_turns(
    runs: dict[str, ServerRun], journal: Journal, identity: dict[str, Any]
) -> dict[str, dict[Condition, Batches]]:
    """Check that the servers serve the target, warm them up, and ask all of each batch in turns.

    The first of them changes with each batch, so that changes of the machine concern all. `identity`: what the numbers
    in the journal depend on besides the settings.
    """
    first = next(iter(runs.values()))
    total = first.settings.repeats * sum(len(first.units(size)) for _, size in first.conditions)
    with stage(f"measuring {' and '.join(runs)}", len(runs) * total) as done:
        return asyncio.run(_measured(runs, journal, identity, done))


async def _measured(
    runs: dict[str, ServerRun], journal: Journal, identity: dict[str, Any], done: Any
) -> dict[str, dict[Condition, Batches]]:
    async with AsyncExitStack() as stack:
        asked: dict[str, _Asked] = {}
        for name, run in reversed(runs.items()):  # the baseline first: nothing is asked where it cannot be used
            client = await stack.enter_async_context(ServerClient(run.server))
            asked[name] = _Asked(run, client, await run.checked(client), CounterRoutes(run.server.base_url))
        journal.begin(next(iter(runs.values())).settings, identity, environment())
        for each in (asked[name] for name in runs):
            await each.run.batch(each.sampler, each.client, batches(each.run.prompts, 1)[0], 0)  # warm-up
        run, found = next(iter(runs.values())), {name: dict[Condition, Batches]() for name in runs}
        for condition in run.conditions:
            groups = batches(run.prompts, condition[1])
            for repeat in range(run.settings.repeats):
                for unit, group in enumerate(groups):
                    for name in list(runs)[:: -1 if (repeat + unit) % 2 else 1]:
                        fact = BATCH + json.dumps([name, *condition, repeat, unit])
                        if fact not in journal.facts:
                            journal.fact(fact, await asked[name].numbers(condition[0], repeat, unit, group))
                        found[name].setdefault(condition, {})[unit, repeat] = journal.facts[fact]
                        done()
    return found


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
