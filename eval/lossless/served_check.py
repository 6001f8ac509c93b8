"""The losslessness check of a running server: what it is asked, and the verdict on each kind of question."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import require_client
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.server.answers import bare
from draftsmith.distill.server.client import RequestFailed
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.check import (
    ALPHA,
    GREEDY_TOKENS,
    INCONCLUSIVE,
    LOSSLESS,
    SERVED_RULE,
    ArmCheck,
    Check,
    CheckSettings,
    greedy_verdict,
)
from draftsmith.eval.lossless.greedy import Divergence, GreedyCheck, WiderPassFailed
from draftsmith.eval.lossless.hypotheses import Drawn, RuleSample, SamplingCheck, String, judged
from draftsmith.eval.lossless.sampled_texts import Done
from draftsmith.eval.lossless.served_answers import (
    AT_ONCE,
    AgainstReference,
    Baseline,
    Completion,
    CompletionRequest,
    Local,
    Reference,
    ServedModel,
    filled,
    string,
)
from draftsmith.eval.prompts import Prompt, PromptRows, left_out
from draftsmith.eval.server.counters import CounterRoutes, Counters, settled
from draftsmith.heads.model_config import context_limit, vocabulary_of
from draftsmith.provenance import environment, model_fingerprint
from draftsmith.terminal import stage

ALONE, TOGETHER, COLD, STOP, END, SAMPLED = 0, 1, 2, 3, 4, 6  # 0.3 used 5
"""First element of a request's place in the journal: the kind of question; `SAMPLED` + i at the i-th temperature."""
TOKENS = 8
"""Tokens of a sampled continuation: more than are tested jointly, so that drafts have their whole length."""
COLDEST = 0.01
"""A temperature at which texts are the greedy ones but for near ties."""
COLD_GAP = 14 * COLDEST
"""Difference of two logits over which a token is drawn once in a million at this temperature."""
PROBED = 4
"""Prompts of a probe."""
LONGEST_CONTEXT = 8192
"""A longer context is not filled."""
LEFT = (8, 5)
"""Tokens of the context that are left after a prompt; with both, drafts end at different distances from its end."""
STOP_CHARACTERS = 3
END_OF_CONTEXT = "the end of the context"
CONTROL = 4
"""In the control, one answer in `CONTROL` is replaced by the greedy one."""


@dataclass
class ServedCheck:
    """The questions to one server, and the reference that its answers are compared with.

    Args:
        limit: the longest text in tokens; None: not known.
    """

    server: ServedModel
    reference: Reference
    prompts: list[Prompt]
    settings: CheckSettings
    limit: int | None
    notes: list[str] = field(default_factory=list)
    """The parts that were not tested, and the reasons."""
    drafts: Callable[[int], int | None] = lambda _: None
    """See `DraftCount`."""

    def arms(self) -> Iterator[ArmCheck]:
        """Yield the results of each kind of question."""
        requests = [CompletionRequest((ALONE, n, 0), p.input_ids, self._room(p)) for n, p in enumerate(self.prompts)]
        one, several = "one request at a time", f"{AT_ONCE} requests at a time"
        with self._stage("the reference's greedy texts", requests) as done:
            self._own = self.reference.complete(requests, done=done)
        with self._stage(f"greedy texts, {one}", requests) as done:
            alone = self.server.complete(requests, done=done)
        yield self._arm(one, self._compared(requests, alone, self._own))
        together = [replace(request, place=(TOGETHER, *request.place[1:])) for request in requests]
        with self._stage(f"greedy texts, {several}", together) as done:
            said = self.server.complete(together, at_once=AT_ONCE, done=done)
        yield self._arm(several, self._compared(together, said, self._own))
        cold = [replace(request, place=(COLD, *request.place[1:]), temperature=COLDEST) for request in requests]
        with self._stage(f"texts at T={COLDEST:g}, {one}", cold) as done:
            said = self.server.complete(cold, done=done)
        yield self._arm(one, self._compared(cold, said, self._own, COLD_GAP), COLDEST)
        for name, probe in {
            "stop strings": self._stop,
            END_OF_CONTEXT: self._end,
        }.items():
            try:
                length = self.limit if name == END_OF_CONTEXT and self.limit is not None else None
                with stage(name, None if length is None else 2 * len(LEFT) * length) as done:
                    found = probe(requests[:PROBED], alone, done)
            except RequestFailed as error:
                found = f"the server refuses the request ({error})"
            if isinstance(found, GreedyCheck) and found.drafted == 0 and not found.bugs:
                found = "the server drafted nothing"  # a few tokens, in which some drafters find no draft
            if isinstance(found, str):
                self.notes.append(f"{name}: not tested: {found}.")
            else:
                yield self._arm(name, found)
        for number, temperature in enumerate(t for t in self.settings.temperatures if t > 0):
            yield self._sampled(number, temperature, alone)

    def _stage(self, name: str, requests: Sequence[CompletionRequest]) -> AbstractContextManager[Done]:
        return stage(name, sum(request.tokens for request in requests))

    def _room(self, prompt: Prompt, tokens: int = GREEDY_TOKENS) -> int:
        return tokens if self.limit is None else min(tokens, self.limit - len(prompt.input_ids))

    def _arm(self, name: str, greedy: GreedyCheck, temperature: float = 0.0) -> ArmCheck:
        (served,) = self.settings.drafters
        return ArmCheck(served, name, SERVED_RULE, temperature, greedy_verdict(greedy), greedy)

    def _compared(
        self,
        requests: Sequence[CompletionRequest],
        said: Sequence[Completion],
        own: Sequence[Completion],
        slack: float = 0.0,
    ) -> GreedyCheck:
        """Compare greedy answers with the reference's."""
        differing, identical, tokens = list[Divergence](), 0, 0
        for request, theirs, ours in zip(requests, said, own, strict=True):
            identical += theirs.same(ours)
            tokens += len(theirs.tokens if theirs.tokens is not None else ours.tokens or ())
            differing += self.reference.differences(request, theirs, ours, slack)
        return GreedyCheck(len(requests), identical, tokens, self.drafts(len(requests)), differing)

    def _stop(self, requests: Sequence[CompletionRequest], alone: Sequence[Completion], _: Done) -> GreedyCheck | str:
        """Stop greedy answers at characters from their middle; compare with the same answers, cut there."""
        expected, asked = [], []
        for request, said in zip(requests, alone, strict=False):
            middle = len(said.text) // 2
            stop = said.text[middle : middle + STOP_CHARACTERS].strip()
            if stop:
                expected.append((said.text, self._cuts(request, said, stop)))
                place = (STOP, *request.place[1:])
                asked.append(replace(request, place=place, fields={"stop": [stop]}))
        if not asked:
            return "the answers are too short"
        answers, bugs = [said.text for said in self.server.complete(asked)], list[Divergence]()
        for request, text, (whole, cuts) in zip(asked, answers, expected, strict=True):
            # An answer that leaves the text before the stop is judged with the other greedy texts.
            if text not in cuts and (whole.startswith(text) or request.fields["stop"][0] in text):
                name = f"#{request.place[1] + 1}"
                bugs.append(Divergence(name, len(text), None, None, None, None, 0.0, "bug"))
        same = sum(text in cuts for text, (_, cuts) in zip(answers, expected, strict=True))
        drafted = self.drafts(len(asked))
        return GreedyCheck(len(asked), same, sum(request.tokens for request in asked), drafted, bugs)

    def _cuts(self, request: CompletionRequest, said: Completion, stop: str) -> set[str]:
        """Return a text up to its stop, and up to the token that completes it: transformers ends there."""
        chat, before = self.server.chat, request.prompt
        tokens = said.tokens if said.tokens is not None else chat.response(before, said.text, "answer")
        shown = (bare(text_after(chat.tokenizer, before, tokens[: n + 1])) for n in range(len(tokens)))
        cut = said.text[: said.text.index(stop)].strip()
        return {cut, next((text for text in shown if stop in text), cut)}

    def _end(self, _: Sequence[CompletionRequest], __: Sequence[Completion], done: Done) -> GreedyCheck | str:
        """Ask for the last tokens of the context; `done`: called with the tokens that were read."""
        if self.limit is None:
            return "the length of the context is not known"
        if self.limit > LONGEST_CONTEXT:
            return f"the context of {self.limit:,} tokens is too long (at most {LONGEST_CONTEXT:,})"
        requests, own, first = [], [], 0
        for number, left in enumerate(left for left in LEFT if left < self.limit):
            # A prompt after which the text reaches the end: that of the last length is a good guess.
            for shift in range(first, min(PROBED, len(self.prompts))):
                prompts = [*self.prompts[shift:], *self.prompts[:shift]]
                request = CompletionRequest((END, number, shift), filled(prompts, self.limit - left), left)
                if not self.server.expressible(request.prompt):
                    return "the prompt is not the same tokens again when it is sent as text"
                (text,) = self.reference.complete([request])
                if not text.ended:
                    requests.append(request)
                    own.append(text)
                    first = shift
                    done(self.limit)
                    break
        if not requests:
            return "the target ends its texts before"
        said = []
        for request in requests:
            said += self.server.complete([request])
            done(self.limit)
        return self._compared(requests, said, own)

    def _sampled(self, number: int, temperature: float, alone: Sequence[Completion]) -> ArmCheck:
        """Sample the first tokens after each prompt with many seeds."""
        settings, sampling = self.settings, self.settings.sampling(temperature)
        contexts = [n for n, prompt in enumerate(self.prompts) if self._room(prompt, TOKENS) == TOKENS]
        if not contexts:
            raise ConfigError(f"prompts leave fewer than {TOKENS} tokens of the context; expected shorter ones")
        draws = max(1, settings.tokens // (TOKENS * len(contexts)))
        requests = [
            [
                CompletionRequest((SAMPLED + number, n, draw), self.prompts[n].input_ids, TOKENS, temperature)
                for draw in range(draws)
            ]
            for n in contexts
        ]
        with self._stage(f"sampling at T={temperature:g}", list(chain(*requests))) as done:
            said = [self.server.complete(of_context, at_once=AT_ONCE, done=done) for of_context in requests]
        drafted = self.drafts(sum(map(len, requests)))
        tokens = all(text.tokens is not None for texts in said for text in texts)
        end = min(self.server.chat.ends, default=-1) if tokens else -1
        drawn = [[string(text, end, tokens=tokens) for text in texts] for texts in said]
        greedy = [self._begin(self.prompts[n], alone[n], end, tokens=tokens) for n in contexts]
        level = ALPHA / sum(t > 0 for t in settings.temperatures)
        compared = self.reference.against(requests, greedy, sampling, tokens=tokens)
        found = check_samples(drawn, greedy, level, compared)
        found = replace(found, rule=replace(found.rule, drafted=drafted))
        alike = draws > 1 and all(len(set(of_context)) == 1 for of_context in drawn)
        if alike:
            self.notes.append(
                f"sampled at T={temperature:g}: the server answers every seed alike: it ignores seeds or temperatures, "
                "so that its answers are no sample, with or without speculation."
            )
        if found.verdict == LOSSLESS and (alike or drafted == 0):
            found = replace(found, verdict=INCONCLUSIVE)
        (served,) = settings.drafters
        return ArmCheck(served, "sampled", SERVED_RULE, temperature, found.verdict, None, found)

    def _begin(self, prompt: Prompt, text: Completion, end: int, *, tokens: bool) -> String:
        """Return the first tokens of a greedy answer, or their text."""
        if tokens:
            return string(text, end, tokens=True)[:TOKENS]
        first = self.server.chat.response(prompt.input_ids, text.text, "answer")[:TOKENS]
        return tuple(map(ord, bare(text_after(self.server.chat.tokenizer, prompt.input_ids, first))))


class DraftCount:
    """The drafts of a server between two calls, from its counters.

    A call is told how many requests were made since the last one. It returns None where the counters do not tell, and
    where nothing was drafted and some of these answers are of an earlier command.
    """

    def __init__(self, server: ServedModel) -> None:
        self.routes, self._server = CounterRoutes(server.sampler.server.base_url), server
        self.all: list[int | None] = []
        """What the calls returned."""
        self._last, self._answers = self._read(), len(server.journal)

    def __call__(self, requests: int) -> int | None:
        before, self._last = self._last, self._read()
        answers, self._answers = self._answers, len(self._server.journal)
        try:
            drafts = int(self._last.since(before).rounds) if self._last.known else None
        except ConfigError as error:  # read once, or started again
            self._last, drafts = replace(self._last, why=str(error)), None
        drafts = drafts or (0 if drafts == 0 and len(self._server.journal) - answers >= requests else None)
        self.all.append(drafts)
        return drafts

    @property
    def why(self) -> str:
        """The reason for which the drafts are not known."""
        return self._last.why or "the answers of an earlier command"

    def _read(self) -> Counters:
        try:
            return asyncio.run(settled(self.routes))
        except ConfigError as error:  # the texts are compared without them
            return Counters(False, why=str(error))


def check_samples(drawn: Drawn, greedy: Sequence[String], level: float, compared: AgainstReference) -> SamplingCheck:
    """Apply the tests to a sample and to its control; `greedy`: by context, its greedy continuation."""
    control = [
        [own if number % CONTROL == 0 else text for number, text in enumerate(texts)]
        for texts, own in zip(drawn, greedy, strict=True)
    ]
    try:
        return judged(compared(drawn, level), compared(control, level), level)
    except WiderPassFailed as error:
        none = RuleSample([], sum(len(text) for texts in drawn for text in texts), 0.0)
        return SamplingCheck(INCONCLUSIVE, level, none, none, str(error))


def check_server(
    settings: CheckSettings,
    rows: PromptRows,
    out: Path | None,
    *,
    keep: Callable[[Check], None] = lambda _: None,
) -> Check:
    """Check a running server against the target, or against `settings.baseline`, a server without speculation.

    Args:
        out: folder for the answers, which are kept until the check is finished.
        keep: called with the results so far after each arm.
    """
    require_client()
    if rows.images:
        raise ConfigError("prompts with images; expected text, which a server is asked with")
    tokenizer, config = settings.target_section.load_tokenizer()
    ends = settings.target_section.load_ends()
    if isinstance(tokenizer.eos_token_id, int):
        ends |= {tokenizer.eos_token_id}
    chat = Chat(tokenizer, settings.chat_template, settings.template_options, ends=ends)
    how: dict[str, Any] = {"chat_template": settings.chat_template, "template_options": settings.template_options}
    how["vocab_size"] = vocabulary_of(config)
    prompts, notes = rows.encode(tokenizer, count=settings.count, context=context_limit(config), **how)
    (url,) = settings.drafters.values()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if out is None else out
        files = folder / "answers.jsonl", folder / "answers-baseline.jsonl"
        asked = (url, settings.model, settings, chat, prompts, files[0])
        with stage("asking what the server serves"):
            server = ServedModel.connect(*asked)
        if settings.baseline is None:
            with stage("loading the target"):
                loaded = settings.target_section.load().model
            reference, identity = Local(loaded, chat, settings.seed), model_fingerprint(loaded)
        else:
            other = (settings.baseline, settings.model, settings, chat, prompts, files[1])
            reference, identity = Baseline(ServedModel.connect(*other)), settings.target
        limit = min((n for n in (server.context, context_limit(config)) if n is not None), default=None)
        sent = [p for p in prompts if server.expressible(p.input_ids) and (limit is None or len(p.input_ids) < limit)]
        if not sent:
            raise ConfigError("prompts cannot be sent to the server; expected some that fit its context and tokenizer")
        if len(sent) < len(prompts):
            first = next(p.id for p in prompts if p not in sent)
            notes.append(
                left_out(
                    len(prompts) - len(sent), len(prompts), f"{first} does not fit the server's context or tokenizer"
                )
            )
        run = ServedCheck(server, reference, sent, settings, limit, notes)
        checked = _complete(run, Check(settings, environment(), {"target": identity}, notes=run.notes), url, keep)
    for file in files:
        file.unlink(missing_ok=True)
    return checked


def _complete(run: ServedCheck, checked: Check, url: str, keep: Callable[[Check], None]) -> Check:
    keep(checked)
    run.drafts = drafts = DraftCount(run.server)
    other = DraftCount(run.reference.server) if isinstance(run.reference, Baseline) else None
    for arm in run.arms():
        checked.arms.append(arm)
        keep(checked)
    arms = checked.arms
    if options := drafts.routes.lossy_options():
        run.notes.append(
            f"{url} runs with {', '.join(options)}, which does not keep the target's distribution: a lossless verdict "
            "then says only that these tests did not find it."
        )
    if not any(drafts.all):
        if None in drafts.all:
            run.notes.append(f"{url} counts no drafts: whether it drafted anything is not known ({drafts.why}).")
        else:
            run.notes.append(f"{url} has drafted nothing during the check, as its counters say.")
    if other is not None and other(0):
        run.notes.append(f"baseline={checked.settings.baseline} drafts: its texts are not those of the target alone.")
        arms = [replace(arm, verdict=INCONCLUSIVE) if arm.verdict == LOSSLESS else arm for arm in arms]
    finished = replace(checked, arms=arms, finished=True)
    keep(finished)
    return finished
