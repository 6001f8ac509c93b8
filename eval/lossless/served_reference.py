"""References for a server's answers: the loaded target, or a server without speculation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.asked import text_seed
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.server.answers import bare
from draftsmith.eval.lossless.draws import BATCH, String
from draftsmith.eval.lossless.greedy import Adjust, Divergence, divergences
from draftsmith.eval.lossless.served_answers import AT_ONCE, Request, Said, ServedModel
from draftsmith.eval.lossless.served_tests import EndingTarget, ExactTests, SampleTests, Tests
from draftsmith.eval.prompts import Prompt

PENALTY = "repetition_penalty"
"""Field of a request in vLLM and SGLang, whose meaning is transformers'."""
WARM, DRAWS, SEEN = 0.1, 64, 2
"""A token that the baseline draws `SEEN` times in `DRAWS` at this temperature is a near tie."""
WARM_GAP = 0.35
"""Difference of logits at which a token is drawn twice in 64 at this temperature, beside one other."""
JUDGED = 1000
"""First number of the places of these draws in the journal."""


class Reference(Protocol):
    """The distribution that a server claims to sample from."""

    def say(self, requests: Sequence[Request]) -> list[Said]:
        """Return its own greedy continuations."""
        ...

    def differences(self, request: Request, theirs: Said, own: Said, slack: float = 0.0) -> list[Divergence]:
        """Return where an answer is not its own, judged; `slack`: a gap of logits that is no bug."""
        ...

    def tests(
        self, requests: list[list[Request]], greedy: Sequence[String], sampling: Sampling, *, tokens: bool
    ) -> tuple[Tests, float]:
        """Return tests of answers to sampled requests, by context, and the tolerance of p.

        Args:
            greedy: by context, the server's greedy continuation.
            tokens: the server returns tokens; otherwise texts are compared.
        """
        ...


def string(text: Said, end: int, *, tokens: bool) -> String:
    """Return a continuation as a tuple of tokens, or of characters, with `end` after it if it has ended."""
    whole = text.tokens if tokens and text.tokens is not None else map(ord, text.text)
    return (*whole, *([end] if text.ended else []))


@dataclass(frozen=True)
class Local:
    """The loaded target."""

    model: PreTrainedModel
    chat: Chat
    seed: int

    def say(self, requests: Sequence[Request]) -> list[Said]:
        return [self._said(request.prompt, self._decode(request)) for request in requests]

    def _decode(self, request: Request, ignored: int = 0) -> list[int]:
        """Return the target's own text; `ignored`: prompt tokens that a repetition penalty does not count."""
        penalty = _penalty(request, ignored)
        output = SpeculativeDecoder(self.model).generate(
            request.prompt,
            max_new_tokens=request.tokens,
            eos_token_id=sorted(self.chat.ends) or None,
            logits_processor=[] if penalty is None else [penalty],
        )
        return output.tokens

    def _said(self, prompt: list[int], tokens: list[int]) -> Said:
        ended = bool(tokens) and tokens[-1] in self.chat.ends
        shown = tokens[:-1] if ended else tokens
        return Said(bare(text_after(self.chat.tokenizer, prompt, shown)), shown, ended)

    def differences(self, request: Request, theirs: Said, own: Said, slack: float = 0.0) -> list[Divergence]:
        found = self._differences(request, theirs, own, slack, 0)
        if PENALTY in request.fields and any(each.kind == "bug" for each in found):
            length = len(request.prompt)  # some engines penalise the tokens of the answer only
            again = self._said(request.prompt, self._decode(request, length))
            other = self._differences(request, theirs, again, slack, length)
            return found if any(each.kind == "bug" for each in other) else other
        return found

    def _differences(self, request: Request, theirs: Said, own: Said, slack: float, ignored: int) -> list[Divergence]:
        prompt, penalty = Prompt(f"#{request.place[1] + 1}", "", request.prompt), _penalty(request, ignored)
        tokens, alone, ended, ends = theirs.tokens, list(own.tokens or ()), own.ended, sorted(self.chat.ends)[:1]
        if tokens is None:
            if theirs.text == own.text:
                return []
            tokens, alone = _retold(self.chat, request.prompt, alone, theirs.text)
            ended = False
        elif theirs.ended:
            tokens = [*tokens, *ends]
        how = {} if penalty is None else {"adjust": _adjusted(penalty, request.prompt)}
        return divergences(self.model, prompt, tokens, [*alone, *(ends if ended else [])], slack=slack, **how)

    def tests(
        self, requests: list[list[Request]], greedy: Sequence[String], sampling: Sampling, *, tokens: bool
    ) -> tuple[Tests, float]:
        if tokens:
            contexts = [Prompt(f"#{of[0].place[1] + 1}", "", of[0].prompt) for of in requests]
            target = EndingTarget(self.model, sampling, self.chat.ends)
            exact = ExactTests(target, contexts, requests[0][0].tokens, self.seed)
            exact.measure(greedy)
            return exact, exact.tolerance
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
                texts += [self._said(part[0].prompt, output.tokens) for output in outputs]
            drawn.append([string(text, -1, tokens=False) for text in texts])
        return SampleTests(drawn, by_place=False), 0.0


def _penalty(request: Request, ignored: int) -> RepetitionPenaltyLogitsProcessor | None:
    rate = request.fields.get(PENALTY)
    return None if rate is None else RepetitionPenaltyLogitsProcessor(rate, prompt_ignore_length=ignored or None)


def _adjusted(penalty: RepetitionPenaltyLogitsProcessor, prompt: list[int]) -> Adjust:
    def adjust(logits_TV: Tensor, tokens: list[int]) -> Tensor:
        rows = []
        for place, row_V in enumerate(logits_TV):
            text = torch.tensor([[*prompt, *tokens[:place]]], device=logits_TV.device)
            rows.append(penalty(cast(torch.LongTensor, text), cast(torch.FloatTensor, row_V[None].clone())))
        return torch.cat(rows)

    return adjust


def _retold(chat: Chat, prompt: list[int], alone: list[int], text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text up to its first difference from the target's own, and the target's own."""
    shown = [bare(text_after(chat.tokenizer, prompt, alone[:length])) for length in range(len(alone) + 1)]
    shared = max(length for length, begun in enumerate(shown) if text.startswith(begun))
    before = [*prompt, *alone[:shared]]
    return [*alone[:shared], *chat.response(before, text[len(shown[shared]) :], "answer")[:1]], alone[: shared + 1]


@dataclass(frozen=True)
class Baseline:
    """A server of the target without speculation."""

    server: ServedModel

    def say(self, requests: Sequence[Request]) -> list[Said]:
        return self.server.say(requests)

    def differences(self, request: Request, theirs: Said, own: Said, slack: float = 0.0) -> list[Divergence]:
        """Judge the first difference by what this server draws there at a low temperature."""
        if theirs.same(own):
            return []
        ours, alone = self._tokens(request, theirs), self._tokens(request, own)
        place = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), None)
        place = min(len(ours), len(alone)) if place is None else place
        first, second = (next(iter(tokens[place:]), None) for tokens in (ours, alone))
        kind = "near tie" if self._draws(request, theirs, ours, place) else "bug"
        return [Divergence(f"#{request.place[1] + 1}", place, first, second, None, None, WARM_GAP, kind)]

    def _tokens(self, request: Request, text: Said) -> list[int]:
        return self.server.chat.response(request.prompt, text.text, "answer") if text.tokens is None else text.tokens

    def _draws(self, request: Request, theirs: Said, ours: list[int], place: int) -> bool:
        """Return whether this server draws the token at `place` of an answer, too."""
        prompt = [*request.prompt, *ours[:place]]
        if not self.server.expressible(prompt):
            return True  # nothing says that it is a bug
        kind, number, _ = request.place
        after = replace(request, prompt=prompt, tokens=1, temperature=WARM)
        requests = [replace(after, place=(JUDGED + kind, number, draw)) for draw in range(DRAWS)]
        drawn = self.server.say(requests, at_once=AT_ONCE)
        rest = bare(text_after(self.server.chat.tokenizer, prompt, ours[place:]))
        if place == len(ours):
            return theirs.ended and sum(text.ended for text in drawn) >= SEEN
        if theirs.tokens is not None:
            return sum(text.tokens == [ours[place]] for text in drawn) >= SEEN
        return sum(bool(text.text) and rest.startswith(text.text) for text in drawn) >= SEEN

    def tests(
        self, requests: list[list[Request]], greedy: Sequence[String], sampling: Sampling, *, tokens: bool
    ) -> tuple[Tests, float]:
        said = [self.server.say(of_context, at_once=AT_ONCE) for of_context in requests]
        drawn = [[string(text, -1, tokens=tokens) for text in texts] for texts in said]
        return SampleTests(drawn, by_place=tokens), 0.0
