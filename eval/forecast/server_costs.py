"""Seconds of running servers as a profile (hardware.py), and the settings of an engine that a forecast recommends.

A server drafts as many tokens as it was started with. So one server without a drafter is measured, and one for each
draft length. A round is timed by the difference of long and short answers, in which prefill and network cancel:

    seconds of a round = (seconds of long answers - seconds of short ones) / (rounds of long - rounds of short ones)

with rounds from the engine's counters, or one a token without a drafter.
"""

import asyncio
import shlex
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import Chain
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import ServerSection, server_section
from draftsmith.distill.server.answers import COMPLETION
from draftsmith.distill.server.client import BadAnswer, ServerClient
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.eval.forecast.forecast import Forecast, best_of
from draftsmith.eval.forecast.profile import ANY, TARGET, Profile
from draftsmith.eval.server.measure import CounterRoutes, ServerRun, settled
from draftsmith.eval.session import Session
from draftsmith.eval.settings import ForecastSettings, Settings
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.configs import is_named
from draftsmith.heads.formats.common import RARE_IN_SGLANG, SGLANG, VLLM, vllm_type
from draftsmith.heads.formats.writers import LAYOUTS
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.untrusted import local_folder, read_config
from draftsmith.terminal import stage

SHORT, LONG = 8, 72
"""Tokens of short and long answers."""
TURNS = 5
"""Times that every server answers at every batch size, in turns; at least two have to be usable."""
EXPORTED = "exports/{}"
"""Folder for the export to an engine."""
RoundSeconds = dict[int, dict[int, float]]
"""Seconds of a round by draft length (0: without a drafter) and batch size."""


def measure_servers(settings: ForecastSettings, session: Session) -> Profile:
    """Return the profile of the servers, with `*` for the drafter's seconds at the lengths that they draft."""
    sections = [server_section(url=url, model=settings.model) for url in settings.servers]
    same = settings.model_dump(include={"target", "prompts", "temperatures", "max_new_tokens"})
    checked = Settings(drafters={}, **same)
    chat = Chat(session.tokenizer, settings.chat_template, settings.template_options)
    limit = context_limit(session.target.config)
    for section in sections:
        ServerRun(section, checked, chat, limit, session.prompts).check()
    prompts = _prompts([prompt.input_ids for prompt in session.prompts], settings.context, limit)
    with stage("timing the servers", TURNS * len(sections) * len(settings.batch_sizes)) as done:
        turns = asyncio.run(_turns(sections, prompts, settings, done))
    usable = [turn for turn in turns if all(value > 0 for of in turn.values() for value in of.values())]
    if len(usable) < 2:
        raise DraftsmithError(
            f"servers: longer answers took longer in {len(usable)} of {TURNS} turns; expected at least 2, without "
            "other requests to the servers"
        )
    means = {
        length: {batch: fmean(turn[length][batch] for turn in usable) for batch in of}
        for length, of in usable[0].items()
    }
    turns = tuple(_costs(turn, settings) for turn in usable)
    costs, alone = replace(_costs(means, settings), repeats=turns), tuple(replace(turn, chains={}) for turn in turns)
    return {TARGET: replace(costs, chains={}, repeats=alone), ANY: costs}


def _prompts(prompts: list[list[int]], context: int | None, limit: int | None) -> list[list[int]]:
    """Return the prompts, repeated or cut to `context` tokens."""
    if context is not None:
        prompts = [(ids * (context // len(ids) + 1))[:context] for ids in prompts]
    longest = max(map(len, prompts)) + LONG
    if limit is not None and longest > limit:
        raise ConfigError.of(
            "context", longest - LONG, f"at most {limit - LONG}, the target's limit less {LONG} tokens"
        )
    return prompts


async def _turns(
    sections: list[ServerSection], prompts: list[list[int]], settings: ForecastSettings, done: Any
) -> list[RoundSeconds]:
    routes = [CounterRoutes(section.base_url) for section in sections]
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(ServerClient(section)) for section in sections]
        asked = [_Asking(server, route, settings.temperatures[0]) for server, route in zip(opened, routes, strict=True)]
        for each in asked:
            await each.round_seconds(prompts, 1)  # warm-up, which also tells the draft length
        lengths = [each.draft_length for each in asked]
        if 0 not in lengths or len(set(lengths)) < len(lengths):
            named = zip((section.base_url for section in sections), lengths, strict=True)
            shown = ", ".join(f"{url} drafts {length}" for url, length in named)
            raise ConfigError(f"servers: {shown}; expected one without a drafter and different draft lengths")
        turns: list[RoundSeconds] = []
        for _ in range(TURNS):
            turn: RoundSeconds = {length: {} for length in lengths}
            for batch in settings.batch_sizes:
                for length, each in zip(lengths, asked, strict=True):
                    turn[length][batch] = await each.round_seconds(prompts, batch)
                    done()
            turns.append(turn)
        return turns


@dataclass
class _Asking:
    client: ServerClient
    routes: CounterRoutes
    temperature: float
    draft_length: int = 0

    async def round_seconds(self, prompts: list[list[int]], batch: int) -> float:
        """Return the seconds of a round of `batch` texts at a time; not positive where noise exceeds it."""
        before = await settled(self.routes)
        short_seconds, short_tokens = await self._answers(prompts, batch, SHORT)
        between = await settled(self.routes)
        long_seconds, long_tokens = await self._answers(prompts, batch, LONG)
        short, long = between.since(before), (await settled(self.routes)).since(between)
        if short.rounds + long.rounds > 0:
            self.draft_length = await asyncio.to_thread(self._length, long.drafted / max(long.rounds, 1))
            rounds = long.rounds - short.rounds
        else:
            rounds = float(long_tokens - short_tokens)
        return batch * (long_seconds - short_seconds) / rounds if rounds > 0 else 0.0

    def _length(self, drafted: float) -> int:
        length = round(drafted) or self.routes.sglang_draft_length()
        if not length:
            raise ConfigError(
                f"server {self.routes.root} does not tell how many tokens it drafts; expected vLLM, SGLang or "
                "llama-server"
            )
        return length

    async def _answers(self, prompts: list[list[int]], batch: int, tokens: int) -> tuple[float, int]:
        """Return the seconds until `batch` texts are answered together, and the number of tokens."""

        def body(place: int) -> dict[str, Any]:
            prompt = prompts[place % len(prompts)]
            sampling = {"temperature": self.temperature, "seed": place, "ignore_eos": True}
            return {"model": self.client.settings.model, "prompt": prompt, "max_tokens": tokens, **sampling}

        started = time.perf_counter()
        counts = await asyncio.gather(*(self.client.ask(COMPLETION, body(n), _tokens) for n in range(batch)))
        return time.perf_counter() - started, sum(counts)


def _tokens(answer: Any) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(count, int) or count < 1:
        raise BadAnswer("usage without completion_tokens")
    return count


def _costs(seconds: RoundSeconds, settings: ForecastSettings) -> Costs:
    """Return the costs: the target's round, and what a drafting server takes beyond it."""
    alone = seconds[0]
    chains = {
        batch: {length: max(0.0, of[batch] - alone[batch]) for length, of in sorted(seconds.items()) if length}
        for batch in alone
    }
    context = "" if settings.context is None else f", {settings.context} tokens of context"
    name = f"{settings.model} at {', '.join(settings.servers)}{context}"
    return Costs({batch: {1: value} for batch, value in alone.items()}, chains=chains, alone=alone, name=name)


def served_settings(settings: ForecastSettings, profile: Profile) -> ForecastSettings:
    """Return the settings of a forecast for these servers: chains up to the longest measured one, the engines' rule."""
    longest = max(_lengths(profile))
    served = {"max_draft_length": longest, "policies": (str(Chain(longest)),), "rule": settings.rule or "token"}
    return settings.model_copy(update=served)


def _lengths(profile: Profile) -> list[int]:
    return sorted({length for of in profile[ANY].chains.values() for length in of})


class Load(NamedTuple):
    """The best draft length between two numbers of requests; 0: no drafting."""

    first: int
    last: int
    draft_length: int


def served_forecast(predicted: Forecast, profile: Profile) -> Forecast:
    """Return the forecast without draft lengths outside the measured ones, of which nothing is known."""
    low, high = _lengths(profile)[0], _lengths(profile)[-1]
    chains = {str(Chain(length)) for length in range(low, high + 1)}
    rows = [row for row in predicted.rows if row["policy"] in chains]
    best = [best_of(rows, entry["temperature"], entry["batch_size"]) for entry in predicted.best]
    return replace(predicted, rows=rows, best=best)


def loads(predicted: Forecast) -> list[Load]:
    """Return the best draft length by load; that of a measured batch size holds until the next one."""
    found: list[Load] = []
    chains = {str(Chain(length)): length for length in range(1, predicted.settings.max_draft_length + 1)}
    entries = sorted(predicted.best, key=lambda entry: entry["batch_size"])
    for place, entry in enumerate(entries):
        first = 1 if place == 0 else entry["batch_size"]
        last = entries[place + 1]["batch_size"] - 1 if place + 1 < len(entries) else entry["batch_size"]
        length = 0 if entry["policy"] is None else chains[entry["policy"]]
        if found and found[-1].draft_length == length:
            found[-1] = found[-1]._replace(last=last)
        else:
            found.append(Load(first, last, length))
    return found


def _exports(settings: ForecastSettings, path: str, drafter: Drafter) -> dict[str, str]:
    """Return by engine the command that exports a checkpoint of draftsmith; engines load a draft model's as it is."""
    own = drafter.type != "draft_model" and (Path(path).is_dir() or not is_named(path))
    if not own or read_config(local_folder(path), path)[1] is None:
        return {}
    words = ("draftsmith", "export", path, "--target", settings.target)
    return {
        engine: shlex.join([*words, "--format", engine, "--out", EXPORTED.format(engine)])
        for engine in ("vllm", "sglang")
        if drafter.type in LAYOUTS[engine] and (engine == "vllm" or drafter.type not in RARE_IN_SGLANG)
    }


def engine_settings(predicted: Forecast, drafter: Drafter) -> dict[str, Any]:
    """Return the engines' settings: vLLM's `--speculative-config`, SGLang's flags by load, and from where none pays.

    `export` has the commands that write the folders which these settings name, for a drafter that no engine loads.
    """
    (path,), plan = predicted.settings.drafters.values(), loads(predicted)
    exports = _exports(predicted.settings, path, drafter)
    off = plan[-1].first if plan[-1].draft_length == 0 else None
    longest = max(load.draft_length for load in plan)
    method = VLLM.get(vllm_type(drafter.type, drafter.config() if isinstance(drafter, TrainableDrafter) else {}))
    settings: dict[str, Any] = {"off_from": off, "vllm": None, "sglang": {}, "export": exports}
    if longest and method is not None:
        folder = EXPORTED.format("vllm") if "vllm" in exports else path
        settings["vllm"] = {**method, "model": folder, "num_speculative_tokens": longest}
        settings["vllm"]["num_speculative_tokens_per_batch_size"] = [list(load) for load in plan]
    for load in plan if drafter.type in SGLANG.keys() - RARE_IN_SGLANG else ():
        size, folder = load.draft_length, EXPORTED.format("sglang") if "sglang" in exports else shlex.quote(path)
        flags = f"--speculative-algorithm {SGLANG[drafter.type]} --speculative-draft-model-path {folder} "
        flags += f"--speculative-num-steps {size} --speculative-eagle-topk 1 --speculative-num-draft-tokens {size + 1}"
        settings["sglang"][f"{load.first}-{load.last}"] = flags if size else ""
    return settings
