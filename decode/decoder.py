"""The loop: propose, verify, commit, until EOS or the length; the target alone is the same loop with empty drafts."""

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.decode.cache import PointerCache, causal_mask
from draftsmith.decode.chance import Chance, SeededChance
from draftsmith.decode.output import DecodeOutput, Round
from draftsmith.decode.processors import Probabilities, Sampling
from draftsmith.decode.target import Target, TransformersTarget
from draftsmith.decode.verify import Verdict, verify_greedy, verify_token_rule
from draftsmith.errors import ConfigError
from draftsmith.heads.draft import Draft
from draftsmith.heads.drafter import Drafter

DEFAULT_DRAFT_LENGTH = 4
OnTokens = Callable[[list[int], Round | None], None]


class Decoding:
    """One text while it is being decoded. To the drafter it is the `Context` of heads/drafter.py."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        draft_length: int,
        prompt: list[int],
        max_length: int,
        sampling: Sampling,
        chance: Chance,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.tokens = list(prompt)
        self.max_length = max_length
        self.hidden: Tensor | None = None
        self.stopped_by: Literal["eos", "length"] | None = None
        self._target, self._drafter, self._draft_length = target, drafter, draft_length
        self._greedy = sampling.greedy
        self._probabilities = Probabilities(sampling) if not sampling.greedy else None
        self._chance, self._eos = chance, eos

    # What the drafter sees, beside tokens, hidden and max_length.

    def new_cache(self, model: nn.Module) -> PointerCache:
        return PointerCache(model.config, self.max_length)

    def mask(self, start: int, count: int) -> Tensor | None:
        device = self.hidden.device if self.hidden is not None else torch.device("cpu")
        return causal_mask(start, count, device)

    def choose(self, logits_V: Tensor) -> tuple[int, Tensor | None]:
        if self._greedy:
            return int(logits_V.argmax()), None
        q_V = self._probabilities(logits_V[None])[0]
        return self._chance.categorical(q_V), q_V

    # The loop's two steps.

    def prefill(self) -> list[int]:
        """Read the prompt and commit the first token."""
        self._target.start(self.max_length)
        logits_1V = self._target.prefill(self.tokens)
        verdict = self._verdict(logits_1V, Draft.chain([], None))
        self.hidden = self._target.hidden(-1)
        if self._drafter is not None:
            self._drafter.start(self)
        return self._commit([verdict.next_token])

    def round(self) -> tuple[list[int], Round]:
        """Propose, verify and commit once: the committed tokens and the round's record."""
        started = _now(self.hidden)
        base = len(self.tokens)
        # The bonus token needs a place too. Decided before anything is drawn, so the distribution stays exact.
        room = min(self._draft_length, self.max_length - base - 1)
        draft = Draft.chain([], None)
        if self._drafter is not None and room > 0:
            draft = self._drafter.propose(self, room)
        drafted = _now(self.hidden)
        logits_PV = self._target.verify([self.tokens[-1], *draft.tokens])
        verdict = self._verdict(logits_PV, draft)
        verified = _now(self.hidden)
        self.hidden = self._target.hidden(verdict.accepted)
        new = self._commit([*draft.tokens[: verdict.accepted], verdict.next_token])
        self._target.commit(base + verdict.accepted)
        if self._drafter is not None:
            self._drafter.observe(base + verdict.accepted)
        record = Round(
            drafted=len(draft),
            accepted=verdict.accepted,
            committed=len(new),
            overlap=verdict.overlap,
            draft_seconds=drafted - started,
            verify_seconds=verified - drafted,
            seconds=_now(self.hidden) - started,
        )
        return new, record

    def _verdict(self, logits_PV: Tensor, draft: Draft) -> Verdict:
        if self._greedy:
            return verify_greedy(logits_PV.argmax(-1).tolist(), draft)
        return verify_token_rule(self._probabilities(logits_PV), draft, self._chance)

    def _commit(self, new: list[int]) -> list[int]:
        """Append `new` up to and including the first EOS; nothing ever follows an EOS."""
        for index, token in enumerate(new):
            if token in self._eos:
                new = new[: index + 1]
                self.stopped_by = "eos"
                break
        self.tokens += new
        if self.stopped_by is None and len(self.tokens) >= self.max_length:
            self.stopped_by = "length"
        return new


def _now(hidden: Tensor | None) -> float:
    """Seconds; on an accelerator, after the work queued so far is done."""
    if hidden is not None and hidden.is_cuda:
        torch.cuda.synchronize(hidden.device)
    return time.perf_counter()


class SpeculativeDecoder:
    """Decodes with a target and a drafter; without a drafter, with the target alone in the same engine.

    Args:
        target: a decoder-only transformers causal LM, unmodified.
        drafter: from `load_drafter`, or any `Drafter`; None decodes with the target alone.
        draft_length: draft tokens a round (gamma), at least 1; by default what the drafter was trained for.
    """

    def __init__(self, target: nn.Module, drafter: Drafter | None = None, *, draft_length: int | None = None) -> None:
        self._target = TransformersTarget(target)
        self._model = target
        self.drafter = drafter
        self.draft_length = _draft_length(drafter, draft_length)
        if drafter is not None and drafter.vocab_size != target.config.get_text_config(decoder=True).vocab_size:
            vocabulary = target.config.get_text_config(decoder=True).vocab_size
            raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor | list[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | list[int] | Literal["model"] | None = "model",
        on_tokens: OnTokens | None = None,
    ) -> DecodeOutput:
        """Decode one prompt.

        Args:
            input_ids: the prompt, [T] or [1, T] or a list, at least one token.
            max_new_tokens: the most tokens to produce; cut to what the target's context still holds.
            temperature, top_k, top_p: applied to the target and the drafter alike; temperature 0 is greedy.
            seed: of everything drawn in this call.
            eos_token_id: ends the text; "model" takes the model's own, None never ends it.
            on_tokens: called with each run of committed tokens: `([first], None)` behind the prefill, then
                `(tokens, round)`, where `tokens[: round.accepted]` were drafted and the last is the target's.

        Raises:
            ConfigError: for an empty prompt, one that fills the context, or settings out of range.
        """
        sampling = Sampling(temperature, top_k, top_p)
        prompt = _prompt_tokens(input_ids)
        max_length = self._max_length(prompt, max_new_tokens)
        decoding = Decoding(
            self._target,
            self.drafter,
            self.draft_length,
            prompt,
            max_length,
            sampling,
            SeededChance(seed),
            self._eos(eos_token_id),
        )
        started = time.perf_counter()
        new = decoding.prefill()
        prefill_seconds = time.perf_counter() - started
        if on_tokens is not None:
            on_tokens(new, None)
        rounds: list[Round] = []
        while decoding.stopped_by is None:
            new, record = decoding.round()
            rounds.append(record)
            if on_tokens is not None:
                on_tokens(new, record)
        return DecodeOutput(prompt, decoding.tokens[len(prompt) :], rounds, prefill_seconds, decoding.stopped_by)

    def _max_length(self, prompt: list[int], max_new_tokens: int) -> int:
        if max_new_tokens < 1:
            raise ConfigError.of("max_new_tokens", max_new_tokens, ">= 1")
        limits = [self._target.context_limit, getattr(self.drafter, "context_limit", None)]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is not None and len(prompt) >= limit:
            raise ConfigError(
                f"prompt={len(prompt)} tokens; expected fewer than the context of {limit}, so that one can be added"
            )
        length = len(prompt) + max_new_tokens
        return length if limit is None else min(length, limit)

    def _eos(self, eos_token_id: int | list[int] | Literal["model"] | None) -> frozenset[int]:
        if eos_token_id == "model":
            generation = getattr(self._model, "generation_config", None)
            eos_token_id = getattr(generation, "eos_token_id", None)
            if eos_token_id is None:
                eos_token_id = self._model.config.get_text_config(decoder=True).eos_token_id
        if eos_token_id is None:
            return frozenset()
        return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _draft_length(drafter: Drafter | None, draft_length: int | None) -> int:
    if draft_length is not None and draft_length < 1:
        raise ConfigError.of("draft_length", draft_length, ">= 1")
    if drafter is None:
        return 0
    most = drafter.max_draft_length
    wanted = draft_length or drafter.draft_length_hint or most or DEFAULT_DRAFT_LENGTH
    if most is not None and wanted > most:
        raise ConfigError.of(
            "draft_length", wanted, f"at most {most}, which is what this {drafter.type} drafter can propose"
        )
    return wanted


def _prompt_tokens(input_ids: Tensor | list[int]) -> list[int]:
    if isinstance(input_ids, Tensor):
        if input_ids.dim() > 1 and input_ids.shape[0] != 1:
            raise ConfigError.of("input_ids batch", input_ids.shape[0], "1 prompt a call")
        input_ids = input_ids.flatten().tolist()
    if not input_ids:
        raise ConfigError("prompt=0 tokens; expected at least 1")
    return list(input_ids)
