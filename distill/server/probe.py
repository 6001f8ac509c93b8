"""The check that a server serves the target: its name, greedy answers to a few prompts, and its temperatures."""

import asyncio
import itertools
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.server.answers import COMPLETION, Accepts, Answer, AnswerReader, NoTokens
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.responses import ServerSampler
from draftsmith.distill.turns import Asked
from draftsmith.errors import ConfigError

PROBES = 3
"""Prompts that the server answers greedily."""
PROBE_TOKENS = 24
"""Tokens of such an answer."""
AGREEMENT = 0.9
"""Share of the tokens that have to be the target's own most likely ones: an engine rounds differently, and another
model of the same family agrees less."""
COLD = 0.01
"""A temperature at which a token is drawn that is not the most likely one only where two are nearly as likely."""
COLD_ANSWERS = 8
"""Answers at this temperature; more than half of them must be the greedy text."""
HOT = 2.0
"""A temperature at which even a target that is certain at T=1 answers two seeds differently."""
HOT_PROMPTS, HOT_SEEDS = 4, 3


async def require_served(
    sampler: ServerSampler,
    questions: Dataset,
    client: ServerClient,
    *,
    target: str,
    model: PreTrainedModel | None = None,
) -> None:
    """Check that the server serves `target`, and set what it accepts (`sampler.accepts`).

    Args:
        target: the name of the target.
        model: the target, if it is loaded; the answers are then compared with its own most likely tokens.

    Raises:
        ConfigError: for a name that is not served or belongs to another model, prompts of which the server makes other
            tokens, answers that the tokenizer reads as another text, another model's answers, and several responses of
            a server that answers every seed alike.
    """
    name = sampler.server.model
    require_related(target, name)
    await client.served(name)
    shortest = _shortest(questions, PROBES)
    sampler.accepts = await _accepted(sampler, questions, shortest[0], client)
    answers = await asyncio.gather(*(_probe(sampler, questions, index, client) for index in shortest))
    _require_target(sampler, answers, client.url, model)
    responses = sampler.data.responses
    if responses > 1 and sampler.data.temperature > 0 and await alike(sampler, questions, client):
        raise ConfigError(
            f"responses={responses}, and the server answers every seed alike: it ignores seeds or temperatures, or its "
            "settings leave one token to choose; expected responses=1, or a server that samples"
        )


async def check_temperatures(sampler: ServerSampler, questions: Dataset, client: ServerClient) -> None:
    """Raise ConfigError for a server whose answers at T=0.01 are mostly other texts than its greedy ones.

    A request's temperature is lost in some engines where they draft; tau and speed above T=0 are then those of noise.
    """
    shortest = _shortest(questions, COLD_ANSWERS)
    greedy = await asyncio.gather(*(_probe(sampler, questions, index, client) for index in shortest))
    texts = {index: _text(answer) for index, (_, answer) in zip(shortest, greedy, strict=True)}
    asked = [(index, n) for n, index in zip(range(COLD_ANSWERS), itertools.cycle(shortest), strict=False)]
    cold = await asyncio.gather(*(_probe(sampler, questions, index, client, n, COLD) for index, n in asked))
    other = sum(_text(answer) != texts[index] for (index, _), (_, answer) in zip(asked, cold, strict=True))
    if 2 * other > len(asked):
        raise ConfigError(
            f"server {client.url}: {other} of {len(asked)} answers at T={COLD:g} are other texts than the greedy ones; "
            "expected the same: the server does not sample at the temperature that it is asked for (builds of vLLM "
            "0.32 for CPUs with a drafter do not), so that nothing above T=0 can be measured"
        )


async def alike(sampler: ServerSampler, questions: Dataset, client: ServerClient) -> bool:
    """Return whether the server answers each of a few prompts alike whatever the seed, at `HOT`."""
    shortest = _shortest(questions, HOT_PROMPTS)
    asked = [(index, seed) for index in shortest for seed in range(1, HOT_SEEDS + 1)]
    try:
        hot = await asyncio.gather(*(_probe(sampler, questions, i, client, seed, HOT, top_p=1.0) for i, seed in asked))
    except ConfigError:  # a server that refuses so high a temperature
        return False
    texts = {(index, _text(answer)) for (index, _), (_, answer) in zip(asked, hot, strict=True)}
    return len(texts) == len(shortest)


def _text(answer: Answer) -> tuple[str, str]:
    return answer.reasoning, answer.text


def _shortest(questions: Dataset, count: int) -> list[int]:
    """Return the indices of the shortest prompts."""
    return sorted(range(len(questions)), key=lambda index: len(questions[index]["input_ids"]))[:count]


def require_related(target: str, name: str) -> None:
    """Raise ConfigError for a served name that is another model's on the Hub.

    A name without an owner is an alias, and a quantised model begins with the target's name.
    """
    if name.count("/") != 1 or Path(target).expanduser().is_dir() or target.count("/") != 1:
        return
    ours, theirs = (part.rpartition("/")[2].lower() for part in (target, name))
    if not theirs.startswith(ours) and not ours.startswith(theirs):
        raise ConfigError(f"server.model={name} with the target {target}; expected the name of the target")


async def _accepted(sampler: ServerSampler, questions: Dataset, index: int, client: ServerClient) -> Accepts:
    """Return the most that the server accepts: its own token ids, and prompts as tokens."""
    asked = _asked(questions, index)
    token_prompts = (True, False) if sampler.path(asked) == COMPLETION else (True,)
    refusals: list[str] = []
    for prompts, ids in itertools.product(token_prompts, (True, False)):
        trial = replace(sampler, accepts=Accepts(token_ids=ids, token_prompts=prompts))
        try:
            await trial.ask(client, asked, [index], temperature=0.0, max_tokens=1)
        except (RequestFailed, NoTokens) as error:
            refusals.append(str(error))
        else:
            return trial.accepts
    raise ConfigError(f"server refuses every form of a request ({refusals[-1]}); expected an answer")


def _asked(questions: Dataset, index: int) -> Asked:
    row = questions[index]
    return Asked(index, list(row["input_ids"]), row["turns"])


async def _probe(
    sampler: ServerSampler,
    questions: Dataset,
    index: int,
    client: ServerClient,
    seed: int = 0,
    temperature: float = 0,
    **instead: Any,
) -> tuple[Asked, Answer]:
    asked = _asked(questions, index)
    most = min(PROBE_TOKENS, sampler.data.response_tokens)
    try:
        fields = {"temperature": temperature, "max_tokens": most, **instead}
        return asked, await sampler.ask(client, asked, [index, seed], **fields)
    except (RequestFailed, NoTokens) as error:
        what = "greedy probe" if temperature == 0 else f"probe at T={temperature:g}"
        raise ConfigError(f"server does not answer the {what} ({error}); expected an answer") from error


def _date(chat: Chat) -> str:
    """Return an addition to an error where prompts may differ because the chat template shows the date."""
    if not chat.shows_time:
        return ""
    return f" on the same day: the template shows the date, here of {chat.now or datetime.now():%Y-%m-%d}"


def _require_target(
    sampler: ServerSampler, answers: list[tuple[Asked, Answer]], url: str, model: PreTrainedModel | None
) -> None:
    """Raise ConfigError unless the answers are in the target's tokens, and, with `model`, its own."""
    thinking, problems, read = sampler.server.thinking == "keep", list[str](), 0
    reader = AnswerReader(sampler.chat, PROBE_TOKENS, thinking)
    for asked, answer in answers:
        if answer.same_prompt is False:
            counted = answer.usage.get("prompt_tokens")
            raise ConfigError(
                f"server {url} reads a prompt of {len(asked.prompt)} tokens as others ({counted} tokens); expected the "
                f"target's tokenizer and chat template (chat_template, template_options){_date(sampler.chat)}"
            )
        if answer.reasoning and (answer.tokens is None or not thinking):
            continue  # the answer is cut inside the thinking
        read += 1
        try:
            reader.add(asked, answer, sampler.path(asked))
        except NoTokens as reason:
            problems.append(str(reason))
    if problems and len(problems) == read:
        raise ConfigError(f"server {url}: all greedy answers {problems[0]}; expected the target's")
    rows = [row for asked, _ in answers for row in asked.rows()]
    if model is not None and rows and (share := _agreement(model, rows)) < AGREEMENT:
        raise ConfigError(
            f"server {url}: {share:.0%} of the tokens of greedy answers are the target's most likely ones; expected "
            f"at least {AGREEMENT:.0%}: it serves another model"
        )


@torch.no_grad()
def _agreement(model: PreTrainedModel, rows: list[dict]) -> float:
    """Return the share of the answers' tokens that `model` finds most likely after the tokens before them."""
    same = total = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=model.device)
        ((start, end),) = row["spans"]
        best = model(input_ids=ids).logits[0, start - 1 : end - 1].argmax(-1)
        same += int((best == ids[0, start:end]).sum())
        total += end - start
    return same / total
