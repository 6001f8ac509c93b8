"""The continuations of a server, and the references that they are compared with: the target, or another server.

Answers are stored, so that a check that was killed continues.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from datasets import Dataset
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, server_section
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.server.answers import CUT, STOPPED, Answer, AnswerJournal, NoTokens, Place, bare, prompt_fields
from draftsmith.distill.server.client import RequestFailed, ServerClient
from draftsmith.distill.server.probe import require_served
from draftsmith.distill.server.responses import ServerSampler, request_seed, together
from draftsmith.distill.turns import Asked, text_seed
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.greedy import Divergence, divergences
from draftsmith.eval.lossless.hypotheses import Drawn, RuleSample, String, against_others
from draftsmith.eval.lossless.probabilities import AgainstTarget, SampledTarget
from draftsmith.eval.lossless.sampled_texts import BATCH, Done
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import PairSettings

AT_ONCE = 8
"""Requests at a time, where several are sent."""
UNCHANGED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields with which vLLM, SGLang and llama-server sample from the whole distribution; their defaults may not."""
WITH_TOKENS = {"verbose": True, "return_tokens": True}
"""Fields with which llama-server returns token ids."""
PROBED = 96
"""Longest answer of a request that names no length."""


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt, and how it is to be continued. `place` identifies it in the journal."""

    place: Place
    prompt: list[int]
    tokens: int
    temperature: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@dataclass(frozen=True)
class Completion:
    """A continuation: its text without outer spaces, and its tokens without the one that ended it, where known."""

    text: str
    tokens: list[int] | None
    ended: bool
    """The model ended it, not the limit of tokens."""

    def same(self, other: "Completion") -> bool:
        """Return whether two continuations are equal, as far as both are known."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return (self.tokens, self.ended) == (other.tokens, other.ended)


class ServedModel:
    """A server that continues prompts; `journal` holds its answers."""

    def __init__(
        self, sampler: ServerSampler, context: int | None, journal: AnswerJournal, ends: frozenset[int]
    ) -> None:
        self.sampler, self.context, self.chat = sampler, context, sampler.chat
        self.journal, self._ends = journal, ends

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
                served = await client.served(model)
                section = section.model_copy(update={"model": served.name})
                data = DataSection(response_tokens=PROBED, temperature=0.0, server=section)
                sampler = ServerSampler(
                    data, chat, request_seed(settings.seed, *file.stem.encode()), None, settings.target
                )
                questions = Dataset.from_list([{"input_ids": p.input_ids, "turns": ""} for p in prompts])
                await require_served(sampler, questions, client, target=settings.target)
                return await _with_fields(sampler, client, prompts[0], settings), served.context

        sampler, context = asyncio.run(ask())
        return cls(sampler, context, AnswerJournal(file, sampler.described()), chat.ends)

    def expressible(self, prompt: list[int]) -> bool:
        """Return whether the server can be asked with these tokens: some take only text."""
        try:
            prompt_fields(Asked(0, prompt, ""), self.chat, "/completions", self.sampler.accepts)
        except NoTokens:
            return False
        return True

    def complete(
        self, requests: Sequence[CompletionRequest], *, at_once: int = 1, done: Done = lambda _: None
    ) -> list[Completion]:
        """Return the continuations of all requests, asking for those that are not stored.

        Raises:
            RequestFailed: for a request that is refused, or not answered after all retries.
            ServerUnusable: if no request would be answered.
        """
        pending = [request for request in requests if request.place not in self.journal]
        done(sum(request.tokens for request in requests) - sum(request.tokens for request in pending))
        if pending:
            asyncio.run(self._complete(pending, at_once, done))
        return [self._read(request) for request in requests]

    async def _complete(self, pending: list[CompletionRequest], at_once: int, done: Done) -> None:
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
                self.journal.add(request.place, answer)
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

    def _read(self, request: CompletionRequest) -> Completion:
        answer = self.journal.get(request.place)
        assert answer is not None, "every request was answered"
        if answer.tokens and answer.tokens[-1] in self._ends:
            return Completion(bare(answer.text), answer.tokens[:-1], True)
        return Completion(bare(answer.text), answer.tokens, answer.finish == STOPPED and bool(self._ends))


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


def filled(prompts: Sequence[Prompt], length: int) -> list[int]:
    """Return the prompts' tokens one after another, repeated up to a length."""
    every = list(chain.from_iterable(prompt.input_ids for prompt in prompts))
    return (every * (1 + length // len(every)))[:length]


WARM, DRAWS, SEEN = 0.1, 64, 2
"""A token that the baseline draws `SEEN` times in `DRAWS` at this temperature is a near tie."""
WARM_GAP = 0.35
"""Difference of logits at which a token is drawn twice in 64 at this temperature, beside one other."""
JUDGED = 1000
"""First number of the places of these draws in the journal."""


AgainstReference = Callable[[Drawn, float], RuleSample]
"""Returns the tests of continuations, by context, against the reference's distribution, at a level for all tests."""


def string(text: Completion, end: int, *, tokens: bool) -> String:
    """Return a continuation as a tuple of tokens, or of characters, with `end` after it if it has ended."""
    whole = text.tokens if tokens and text.tokens is not None else map(ord, text.text)
    return (*whole, *([end] if text.ended else []))


@dataclass(frozen=True)
class Local:
    """The loaded target, as the reference of a server's answers."""

    model: PreTrainedModel
    chat: Chat
    seed: int

    def complete(self, requests: Sequence[CompletionRequest], *, done: Done = lambda _: None) -> list[Completion]:
        """Return its own greedy continuations."""
        decoder, ends, said = SpeculativeDecoder(self.model), sorted(self.chat.ends) or None, list[Completion]()
        for request in requests:
            output = decoder.generate(request.prompt, max_new_tokens=request.tokens, eos_token_id=ends)
            said.append(self._completion(request.prompt, output.tokens))
            done(request.tokens)
        return said

    def _completion(self, prompt: list[int], tokens: list[int]) -> Completion:
        ended = bool(tokens) and tokens[-1] in self.chat.ends
        shown = tokens[:-1] if ended else tokens
        return Completion(bare(text_after(self.chat.tokenizer, prompt, shown)), shown, ended)

    def differences(
        self, request: CompletionRequest, theirs: Completion, own: Completion, slack: float = 0.0
    ) -> list[Divergence]:
        """Return where an answer is not its own, judged; `slack`: a gap of logits that is no bug."""
        prompt = Prompt(f"#{request.place[1] + 1}", "", request.prompt)
        tokens, alone, ended, ends = theirs.tokens, list(own.tokens or ()), own.ended, sorted(self.chat.ends)[:1]
        if tokens is None:
            if theirs.text == own.text:
                return []
            tokens, alone = _retold(self.chat, request.prompt, alone, theirs.text)
            ended = False
        elif theirs.ended:
            tokens = [*tokens, *ends]
        return divergences(self.model, prompt, tokens, [*alone, *(ends if ended else [])], slack=slack)

    def against(
        self, requests: list[list[CompletionRequest]], greedy: Sequence[String], sampling: Sampling, *, tokens: bool
    ) -> AgainstReference:
        """Return the tests of answers to sampled requests, by context, against its own distribution.

        Args:
            greedy: by context, the server's greedy continuation.
            tokens: the server returns tokens; otherwise texts are compared.
        """
        if tokens:
            contexts = [Prompt(f"#{of[0].place[1] + 1}", "", of[0].prompt) for of in requests]
            target = SampledTarget(self.model, sampling, self.chat.ends, wide=True)
            return AgainstTarget(target, contexts, greedy, requests[0][0].tokens, self.seed)
        decoder, drawn = SpeculativeDecoder(self.model), []
        for of_context in requests:
            texts = []
            for start in range(0, len(of_context), BATCH):
                part = of_context[start : start + BATCH]
                outputs = decoder.generate_batch(
                    [request.prompt for request in part],
                    max_new_tokens=part[0].tokens,
                    eos_token_id=sorted(self.chat.ends) or None,
                    seeds=[text_seed(self.seed, *request.place) for request in part],
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                )
                texts += [self._completion(part[0].prompt, output.tokens) for output in outputs]
            drawn.append([string(text, -1, tokens=False) for text in texts])
        return partial(against_others, drawn, False)


def _retold(chat: Chat, prompt: list[int], alone: list[int], text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text up to its first difference from the target's own, and the target's own."""
    shown = [bare(text_after(chat.tokenizer, prompt, alone[:length])) for length in range(len(alone) + 1)]
    shared = max(length for length, begun in enumerate(shown) if text.startswith(begun))
    before = [*prompt, *alone[:shared]]
    return [*alone[:shared], *chat.response(before, text[len(shown[shared]) :], "answer")[:1]], alone[: shared + 1]


@dataclass(frozen=True)
class Baseline:
    """A server of the target without speculation, as the reference; its methods are those of `Local`."""

    server: ServedModel

    def complete(self, requests: Sequence[CompletionRequest], *, done: Done = lambda _: None) -> list[Completion]:
        return self.server.complete(requests, done=done)

    def differences(
        self, request: CompletionRequest, theirs: Completion, own: Completion, slack: float = 0.0
    ) -> list[Divergence]:
        """Judge the first difference by what this server draws there at a low temperature."""
        if theirs.same(own):
            return []
        ours, alone = self._tokens(request, theirs), self._tokens(request, own)
        place = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), None)
        place = min(len(ours), len(alone)) if place is None else place
        first, second = (next(iter(tokens[place:]), None) for tokens in (ours, alone))
        kind = "near tie" if self._draws(request, theirs, ours, place) else "bug"
        return [Divergence(f"#{request.place[1] + 1}", place, first, second, None, None, WARM_GAP, kind)]

    def _tokens(self, request: CompletionRequest, text: Completion) -> list[int]:
        return self.server.chat.response(request.prompt, text.text, "answer") if text.tokens is None else text.tokens

    def _draws(self, request: CompletionRequest, theirs: Completion, ours: list[int], place: int) -> bool:
        """Return whether this server draws the token at `place` of an answer, too."""
        prompt = [*request.prompt, *ours[:place]]
        if not self.server.expressible(prompt):
            return True  # nothing says that it is a bug
        kind, number, _ = request.place
        after = replace(request, prompt=prompt, tokens=1, temperature=WARM)
        requests = [replace(after, place=(JUDGED + kind, number, draw)) for draw in range(DRAWS)]
        drawn = self.server.complete(requests, at_once=AT_ONCE)
        rest = bare(text_after(self.server.chat.tokenizer, prompt, ours[place:]))
        if place == len(ours):
            return theirs.ended and sum(text.ended for text in drawn) >= SEEN
        if theirs.tokens is not None:
            return sum(text.tokens == [ours[place]] for text in drawn) >= SEEN
        return sum(bool(text.text) and rest.startswith(text.text) for text in drawn) >= SEEN

    def against(
        self, requests: list[list[CompletionRequest]], greedy: Sequence[String], sampling: Sampling, *, tokens: bool
    ) -> AgainstReference:
        said = [self.server.complete(of_context, at_once=AT_ONCE) for of_context in requests]
        drawn = [[string(text, -1, tokens=tokens) for text in texts] for texts in said]
        return partial(against_others, drawn, tokens)


Reference = Local | Baseline
"""The distribution that a server claims to sample from."""
