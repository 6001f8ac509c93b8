"""The public decoder: checks what it is given, decodes one prompt or a batch, and says what happened.

Prompts in the forms that callers have them: lists of tokens, or padded tensors.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from draftsmith.decode.costs import Costs
from draftsmith.decode.loop import DecodeLoop, example_draft, now
from draftsmith.decode.policies import Policy, default_policy, exploring, plans, policy_named
from draftsmith.decode.policies.chain import Chain
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.sampling import Processors, Sampling, SeededRng, require_seed
from draftsmith.decode.sequence import DecodeOutput, DecodeSequence, Round, Stops
from draftsmith.decode.target import TransformersTarget, require_tree_reading
from draftsmith.decode.verification import Rule, rule_named
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.model_config import start_token


def prompt_rows(
    input_ids: Tensor | Sequence, attention_mask: Tensor | None = None, *, may_be_empty: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Each prompt's tokens, and the padding that stood on their left.

    Accepts [T], [B, T], a list of tokens, or a list of such lists. The model never reads the padding; logits processors
    and stopping criteria see it, as they do in transformers' `generate`.
    """
    paddings: list[list[int]] | None = None
    if isinstance(input_ids, Tensor):
        ids = input_ids if input_ids.dim() > 1 else input_ids[None]
        if attention_mask is not None:
            mask = attention_mask if attention_mask.dim() > 1 else attention_mask[None]
            if mask.shape != ids.shape:
                raise ConfigError.of("attention_mask shape", list(mask.shape), f"that of input_ids, {list(ids.shape)}")
            rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
            paddings = [row[: int(keep.argmax())].tolist() for row, keep in zip(ids, mask, strict=True)]
        else:
            rows = ids.tolist()
    else:
        if attention_mask is not None:
            raise ConfigError("attention_mask with lists of tokens; expected it beside a tensor of input_ids only")
        nested = bool(input_ids) and isinstance(input_ids[0], (list, tuple, Tensor))
        rows = [torch.as_tensor(row).tolist() for row in input_ids] if nested else [list(input_ids)]
    for number, row in enumerate(rows):
        if not row and not may_be_empty:
            raise ConfigError(f"prompt{f' {number}' if len(rows) > 1 else ''}=0 tokens; expected at least 1")
    if not rows:
        raise ConfigError("prompts=0; expected at least 1")
    return rows, paddings or [[] for _ in rows]


def require_known(rows: Sequence[list[int]], model: PreTrainedModel) -> None:
    """ConfigError for tokens that the model has no embedding of."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    known = embeddings.shape[0]
    for number, row in enumerate(rows):
        for token in (min(row), max(row)) if row else ():
            if not 0 <= token < known:
                raise ConfigError(
                    f"prompt {number} holds token {token}; expected 0 to {known - 1}, which the target knows"
                )


OnTokens = Callable[[list[int], Round | None], None]
OnBatchTokens = Callable[[int, list[int], Round | None], None]
EosTokens = int | list[int] | Literal["model"] | None


class GenerateSettings(TypedDict, total=False):
    """Keyword arguments that `generate` and `generate_batch` share."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    eos_token_id: EosTokens
    logits_processor: Sequence[LogitsProcessor]
    stopping_criteria: Sequence[StoppingCriteria]
    stop_strings: Sequence[str]
    tokenizer: PreTrainedTokenizerBase | None


class SpeculativeDecoder:
    """Decodes with a target and a drafter; without a drafter, with the target alone in the same engine.

    Args:
        target: a transformers causal LM or encoder-decoder model, unmodified.
        drafter: from `load_drafter`, or any `Drafter`; None decodes with the target alone.
        draft_length: draft tokens a round (gamma), at least 1; short for `policy=Chain(draft_length)`. By default what
            the drafter was trained for.
        policy: how drafts grow: a `Policy` or its name, see `draftsmith.decode.policies`.
        costs: measured seconds of this pair on this machine, from `measure_costs`: for policies that plan with them,
            and to pad passes to cheaper widths. Policies that plan measure them by themselves.
        rule: the verification rule by name, see `decode.verification.RULES`; by default the best lossless one for
            each draft. Under greedy decoding there is one rule only.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        draft_length: int | None = None,
        policy: Policy | str | None = None,
        rule: str | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._target = TransformersTarget(target)
        self._model = target
        self.drafter = drafter
        self.rule = rule_named(rule) if rule is not None else None
        if draft_length is not None and policy is not None:
            raise ConfigError(f"draft_length={draft_length} and policy={policy}; expected one of the two")
        if draft_length is not None:
            policy = Chain(draft_length)
            if drafter is not None:
                _require_reach(drafter, draft_length)
        self.policy: Policy | None = None
        """None without a drafter, and for one that only retrieves."""
        if drafter is not None and not drafter.only_retrieves:
            if isinstance(policy, str):
                costs = measure_costs(target, drafter) if costs is None and plans(policy) else costs
                policy = policy_named(policy, costs)
            self.policy = default_policy(drafter) if policy is None else policy
            _require_same_vocabulary(drafter, target)
        if self.rule is not None and drafter is not None:
            _require_fitting(self.rule, drafter, self.policy)
        require_tree_reading(target)
        self.costs = costs
        self._target.widths = {} if costs is None else costs.verify_widths

    @property
    def lossless(self) -> bool:
        """Whether sampled texts are distributed exactly as the target's. Greedy texts always are the target's."""
        return self.rule is None or self.rule.lossless

    def generate(
        self,
        input_ids: Tensor | list[int],
        *,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> DecodeOutput:
        """Decode one prompt.

        Args:
            input_ids: the prompt, [T] or [1, T] or a list, at least one token; what an encoder-decoder target's encoder
                reads.
            seed: of everything drawn in this call.
            on_tokens: called with each run of committed tokens: `([first], None)` behind the prefill, then
                `(tokens, round)`, where `tokens[: round.accepted]` were drafted and the last is the target's.
            settings: see `generate_batch`.

        Raises:
            ConfigError: for an empty prompt, one that fills the context, or settings out of range.
        """
        rows, _ = prompt_rows(input_ids)
        if len(rows) != 1:
            raise ConfigError.of("input_ids batch", len(rows), "1 prompt a call; `generate_batch` takes several")

        forward = None if on_tokens is None else _without_place(on_tokens)
        return self.generate_batch(rows, seeds=[seed], on_tokens=forward, **settings)[0]

    @torch.inference_mode()
    def generate_batch(
        self,
        input_ids: Tensor | Sequence[list[int]],
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seeds: Sequence[int] | int = 0,
        eos_token_id: EosTokens = "model",
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        decoder_input_ids: Sequence[list[int]] | None = None,
        encoder_states: Sequence[Tensor] | None = None,
        on_tokens: OnBatchTokens | None = None,
    ) -> list[DecodeOutput]:
        """Decode several prompts together; each text is what `generate` gives for it alone.

        Args:
            input_ids: lists of tokens, or [B, T] with `attention_mask` where rows are padded, on either side.
            max_new_tokens: the most tokens to produce for each; cut to what the target's context still holds.
            temperature, top_k, top_p: applied to the target and the drafter alike; temperature 0 is greedy.
            seeds: one for each prompt, or the first of as many that follow one another.
            eos_token_id: ends a text; "model" takes the model's own, None never ends it.
            logits_processor: transformers' or your own, applied before temperature at every node of a draft; each has
                to be a function of the tokens before a position and their scores.
            stopping_criteria: transformers' or your own, asked after every committed token, with `scores=None`.
            stop_strings: a text ends with the token that completes one of them; needs `tokenizer`.
            decoder_input_ids: of an encoder-decoder target, what the decoder of each text begins with, its start token
                first; by default that token alone.
            encoder_states: [T, H] for each text: the encoder's output, which is then not computed. `input_ids` may be
                lists without tokens then, unless the drafter has an encoder of its own.
            on_tokens: called with (place of the text, tokens, round); see `generate`.
        """
        rows, paddings = prompt_rows(input_ids, attention_mask, may_be_empty=encoder_states is not None)
        processors = Processors(Sampling(temperature, top_k, top_p), logits_processor, texts=len(rows))
        stops = Stops(self._eos(eos_token_id), [*stopping_criteria, *_stop_strings(stop_strings, tokenizer)])
        prompt_seeds = _one_seed_each(seeds, len(rows))
        prompts, sources = self._prompts(rows, decoder_input_ids)
        require_known(prompts, self._model)
        require_known(sources, self._model)
        sequences = [
            self._sequence(number, prompt, max_new_tokens, stops, seed)
            for number, (prompt, seed) in enumerate(zip(prompts, prompt_seeds, strict=True))
        ]
        for sequence, source, padding in zip(sequences, sources, paddings, strict=True):
            sequence.source, sequence.padding = source, [] if source else padding
        for sequence, states_TH in zip(sequences, encoder_states or (), strict=encoder_states is not None):
            sequence.encoded = states_TH
        prefill_seconds = self._decode(sequences, processors, on_tokens)
        self._last = sequences[0]
        return [sequence.output(row, prefill_seconds) for row, sequence in zip(rows, sequences, strict=True)]

    def _decode(
        self, sequences: list[DecodeSequence], processors: Processors, on_tokens: OnBatchTokens | None
    ) -> float:
        """Decode until every sequence has ended; return the seconds of the prefill."""
        widths = None if self.costs is None else self.costs.draft_widths
        loop = DecodeLoop(self._target, self.drafter, self.policy, sequences, processors, self.rule, widths)
        device = next(self._model.parameters()).device
        started = now(device)
        read = loop.prefill()
        prefill_seconds = now(device) - started  # the drafter's pass over the prompt, which is only queued, included
        for sequence, new in read:
            if on_tokens is not None:
                on_tokens(sequence.number, new, None)
        while loop.texts:
            for sequence, new, record in loop.round():
                if on_tokens is not None:
                    on_tokens(sequence.number, new, record)
        return prefill_seconds

    def calibrate(self, prompts: Sequence[list[int]], **settings: Unpack[GenerateSettings]) -> None:
        """Decode `prompts` and let the policy keep what it learns: where `generate` begins from then on.

        Worth a few texts for the policies that learn, at each temperature that will be used; others stay as they are.
        """
        policy = self.policy
        if policy is None or not policy.learns:
            return
        for seed, prompt in enumerate(prompts):
            self.policy = exploring(policy, True)
            self.generate(prompt, seed=seed, **settings)
            policy = self._last.policy
            assert policy is not None, "the text had one"
        self.policy = exploring(policy, False)

    @property
    def learns(self) -> bool:
        """Whether `calibrate` changes anything."""
        return self.policy is not None and self.policy.learns

    def _sequence(self, number: int, prompt: list[int], max_new_tokens: int, stops: Stops, seed: int) -> DecodeSequence:
        if max_new_tokens < 1:
            raise ConfigError.of("max_new_tokens", max_new_tokens, ">= 1")
        limit = self._target.context_limit
        reach = [limit, None if self.drafter is None else self.drafter.context_limit]
        shortest = min((value for value in reach if value is not None), default=None)
        if shortest is not None and len(prompt) >= shortest:
            raise ConfigError(
                f"prompt={len(prompt)} tokens; expected fewer than the context of {shortest}, so that one can be added"
            )
        length = len(prompt) + max_new_tokens
        length = length if limit is None else min(length, limit)
        return DecodeSequence(list(prompt), length, SeededRng(seed), stops, number=number)

    def _prompts(
        self, rows: list[list[int]], decoder_input_ids: Sequence[list[int]] | None
    ) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return what the decoder reads of each text, and what the encoder reads: nothing for a decoder-only target."""
        if not self._model.config.is_encoder_decoder:
            if decoder_input_ids is not None:
                raise ConfigError("decoder_input_ids with a decoder-only target; expected the whole text in input_ids")
            return rows, [[] for _ in rows]
        if decoder_input_ids is None:
            return [[start_token(self._model)] for _ in rows], rows
        if len(decoder_input_ids) != len(rows) or not all(decoder_input_ids):
            raise ConfigError(
                f"decoder_input_ids={len(decoder_input_ids)} rows; expected {len(rows)}, none of them empty"
            )
        return decoder_input_ids, rows

    def _eos(self, eos_token_id: EosTokens) -> frozenset[int]:
        ends = _eos_of(self._model) if eos_token_id == "model" else eos_token_id
        if ends is None:
            return frozenset()
        return frozenset([ends] if isinstance(ends, int) else ends)


def _eos_of(model: PreTrainedModel) -> int | list[int] | None:
    """Return the end tokens of the model's generation config, or of its config without any."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    return model.config.get_text_config(decoder=True).eos_token_id if ends is None else ends


def _without_place(on_tokens: OnTokens) -> OnBatchTokens:
    """Return `on_tokens` for a batch of one text."""

    def forward(_: int, tokens: list[int], record: Round | None) -> None:
        on_tokens(tokens, record)

    return forward


def _one_seed_each(seeds: Sequence[int] | int, count: int) -> Sequence[int]:
    """Return a seed for each of `count` prompts; ConfigError for seeds out of range or of another number."""
    if isinstance(seeds, int):
        seeds = range(seeds, seeds + count)
    for seed in (seeds[0], seeds[-1]) if isinstance(seeds, range) else seeds:
        require_seed("seed", seed, 2**64 - 1)
    if len(seeds) != count:
        raise ConfigError.of("seeds", list(seeds), f"one for each of the {count} prompts")
    return seeds


def _stop_strings(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[StoppingCriteria]:
    if not strings:
        return []
    if tokenizer is None:
        raise ConfigError(f"stop_strings={list(strings)!r} without a tokenizer; expected tokenizer=the target's")
    return [StopStringCriteria(tokenizer, list(strings))]


def _require_fitting(rule: Rule, drafter: Drafter, policy: Policy | None) -> None:
    """ConfigError where the rule would refuse what the drafter copies, or a draft as the policy grows it."""
    if type(drafter).retrieve is not Drafter.retrieve:
        rule.require(Draft.chain([0, 0]))
    if policy is not None:
        for sharpness in (0.0, 4.0):
            rule.require(example_draft(policy, sharpness))


def _require_reach(drafter: Drafter, draft_length: int) -> None:
    """ConfigError for more draft tokens than the drafter proposes."""
    most = drafter.max_draft_length
    if most is not None and draft_length > most:
        raise ConfigError.of(
            "draft_length", draft_length, f"at most {most}, which is what this {drafter.type} drafter proposes"
        )


def _require_same_vocabulary(drafter: Drafter, target: PreTrainedModel) -> None:
    """ConfigError where the drafter's logits are over another vocabulary, unless their common part is known."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab_size in (None, vocabulary) or drafter.shared_vocabulary is not None:
        return
    raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")
