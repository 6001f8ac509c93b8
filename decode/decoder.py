"""`SpeculativeDecoder`, the public decoder: validates its arguments and decodes one prompt or a batch.

Prompts are lists of tokens or padded tensors.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from draftsmith.decode.arguments import (
    Ids,
    capabilities,
    one_seed_each,
    prompt_rows,
    require_fitting,
    require_known,
    require_reach,
    require_readable,
    require_same_vocabulary,
)
from draftsmith.decode.costs import Costs, now
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.model_locks import turn, turn_of_others
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.capability import require_compilable
from draftsmith.decode.passes.checks import CHAINS_ONLY, require_invariant, usable_inputs
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.policies import Chain, Policy, default_policy, exploring, plans, policy_named
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.rules import rule_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeOutput, DecodeSequence, Round, Stops, stop_string_criteria
from draftsmith.decode.target import TransformersTarget, require_lm_head
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.model_config import context_limit, eos_tokens, plain_model, rotary_switch, start_token, token_set

OnTokens = Callable[[list[int], Round | None], None]
OnBatchTokens = Callable[[int, list[int], Round | None], None]
EosTokens = int | Sequence[int] | Tensor | np.ndarray | Literal["model"] | None
NEW_TOKENS = 128
"""Default of `max_new_tokens`."""


class GenerateSettings(TypedDict, total=False):
    """Keyword arguments that `generate` and `generate_batch` share."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: EosTokens
    logits_processor: Sequence[LogitsProcessor] | None
    stopping_criteria: Sequence[StoppingCriteria] | None
    stop_strings: str | Sequence[str] | None
    tokenizer: PreTrainedTokenizerBase | None


class SpeculativeDecoder:
    """Speculative decoding with a target and a drafter; without a drafter, plain decoding with the same code.

    Args:
        target: a transformers causal LM or encoder-decoder model, unmodified.
        drafter: from `load_drafter`, or any `Drafter`; None decodes with the target alone.
        draft_length: draft tokens per round (gamma), at least 1; short for `policy=Chain(draft_length)`. Default: the
            length that the drafter was trained for.
        policy: how drafts are built: a `Policy` or its name, see `draftsmith.decode.policies`.
        costs: seconds of this pair of models on this machine, from `measure_costs`: used by policies that plan with
            costs, and to pad passes to faster widths. Where such a policy is given by name, default: measured here.
        rule: name of the verification rule, see `decode.verification.RULES`; default: for each draft the lossless rule
            that accepts most. Greedy decoding has one rule only.
        compile: compile the passes of the target and of the drafter's model with torch.compile when they first run, on
            CUDA as CUDA graphs. Later calls use the same graphs for batches of the same size and texts of similar
            length.
        invariant: read every token after the prompt by passes of one shape, in which its logits do not depend on its
            place: greedy texts are then equal with and without a drafter bit by bit, in any dtype. Chains of one text
            at a time; ConfigError for a target whose logits differ nevertheless, which is measured once.
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
        compile: bool = False,
        invariant: bool = False,
    ) -> None:
        target = plain_model(target)
        require_lm_head(target)
        self.drafter, self._compile, self._invariant = drafter, compile, invariant
        with self._turn(target):
            models = capabilities(target, drafter)
            if invariant:
                require_invariant(target, models[0], compile=compile)
                models[0] = replace(models[0], no_trees=CHAINS_ONLY, no_ragged=CHAINS_ONLY)
        self._capability = models[0]
        if compile:
            require_compilable(target, models)
        self._model = target
        self._together = not any(capability.no_ragged for capability in models)
        """Texts of a batch share passes; otherwise they are decoded one after another."""
        self.rule = rule_named(rule) if rule is not None else None
        if draft_length is not None and policy is not None:
            raise ConfigError(f"draft_length={draft_length} and policy={policy}; expected one of the two")
        if draft_length is not None:
            policy = Chain(draft_length)
            if drafter is not None:
                require_reach(drafter, draft_length)
        self.policy: Policy | None = None
        """None without a drafter, and for one that only retrieves."""
        if drafter is not None and not drafter.only_retrieves:
            require_same_vocabulary(drafter, target)
            if isinstance(policy, str):
                if costs is None and plans(policy):
                    with self._turn(target):
                        costs = measure_costs(target, drafter, compile=compile)
                policy = policy_named(policy, costs)
            self.policy = default_policy(drafter) if policy is None else policy
        if self.rule is not None and drafter is not None:
            require_fitting(self.rule, drafter, self.policy)
        if self.policy is not None:
            require_readable(self.policy, models)
        self.costs = costs

    @property
    def lossless(self) -> bool:
        """True if sampled texts are distributed as the target's; greedy texts always equal the target's."""
        return self.rule is None or self.rule.lossless

    def generate(
        self,
        input_ids: Ids | Mapping[str, Any],
        *,
        attention_mask: Ids | None = None,
        inputs: ProcessorInputs | None = None,
        seed: int | None = 0,
        on_tokens: OnTokens | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> DecodeOutput:
        """Decode one prompt.

        Args:
            input_ids: the prompt, [T] or [1, T] as a tensor, array or list, or a tokenizer's output; for an
                encoder-decoder target, the input of its encoder.
            attention_mask: 0 or False at padding.
            inputs: the processor's tensors for a prompt with images, see `generate_batch`.
            seed: seed of all random draws in this call.
            on_tokens: called when tokens are committed: `([first], None)` after the prefill, then `(tokens, round)`,
                where `tokens[: round.accepted]` were drafted and the last one is the target's.
            settings: see `generate_batch`.

        Raises:
            ConfigError: for an empty prompt, a prompt that fills the context, or settings out of range.
        """
        rows, _ = prompt_rows(input_ids, may_be_empty=True)
        if len(rows) != 1:
            raise ConfigError.of("input_ids batch", len(rows), "1 prompt per call; `generate_batch` takes several")
        forward = None if on_tokens is None else lambda _, tokens, record: on_tokens(tokens, record)
        return self.generate_batch(
            input_ids, attention_mask=attention_mask, inputs=[inputs], seeds=seed, on_tokens=forward, **settings
        )[0]

    @torch.inference_mode()
    def generate_batch(
        self,
        input_ids: Ids | Mapping[str, Any],
        *,
        attention_mask: Ids | None = None,
        inputs: Sequence[ProcessorInputs | None] | None = None,
        max_new_tokens: int | None = NEW_TOKENS,
        temperature: float | None = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seeds: Sequence[int] | int | None = 0,
        eos_token_id: EosTokens = "model",
        logits_processor: Sequence[LogitsProcessor] | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        decoder_input_ids: Ids | None = None,
        encoder_states: Sequence[Tensor] | None = None,
        on_tokens: OnBatchTokens | None = None,
    ) -> list[DecodeOutput]:
        """Decode several prompts together; each text equals the output of `generate` for its prompt and seed.

        None is the default of every argument, except that no token ends a text with `eos_token_id=None`.

        Args:
            input_ids: lists of tokens, or a tensor or array [B, T], or the output of a tokenizer, which names the mask.
            attention_mask: 0 or False at padding, on either side.
            inputs: for each prompt the processor's tensors besides its token ids, such as pixel_values, as a batch of
                one; None for a prompt without images. `input_ids` and `attention_mask` in them are ignored.
            max_new_tokens: maximum number of new tokens for each prompt; reduced to the space in the target's context.
            temperature, top_k, top_p: applied to the target and the drafter alike; temperature 0 is greedy.
            seeds: one seed per prompt, or the first of consecutive seeds.
            eos_token_id: token or tokens that end a text; "model": those of the model; None: no token does.
            logits_processor: transformers' or custom processors, applied before the temperature at every draft node;
                each must be a function of the tokens before a position and their scores.
            stopping_criteria: transformers' or custom criteria, called after every committed token with `scores=None`.
            stop_strings: one string or several: a text ends with the token that completes one of them; requires
                `tokenizer`.
            decoder_input_ids: for an encoder-decoder target, the first tokens of each decoder, including its start
                token; default: the start token alone.
            encoder_states: the encoder's output [T, H] for each text, which is then not computed. `input_ids` may then
                be empty lists, unless the drafter has an encoder of its own.
            on_tokens: called with (index of the text, tokens, round); see `generate`.
        """
        rows, paddings = prompt_rows(input_ids, attention_mask, may_be_empty=encoder_states is not None)
        processors = Processors(Sampling(temperature or 0.0, top_k, top_p), logits_processor or (), texts=len(rows))
        criteria = [*(stopping_criteria or ()), *stop_string_criteria(stop_strings or (), tokenizer)]
        stops = Stops(self._eos(eos_token_id), criteria)
        prompt_seeds = one_seed_each(0 if seeds is None else seeds, len(rows))
        most = NEW_TOKENS if max_new_tokens is None else max_new_tokens
        prompts, sources = self._prompts(rows, decoder_input_ids)
        require_known(prompts, self._model)
        require_known(sources, self._model)
        sequences = [
            self._sequence(number, prompt, most, stops, seed)
            for number, (prompt, seed) in enumerate(zip(prompts, prompt_seeds, strict=True))
        ]
        for sequence, source, padding in zip(sequences, sources, paddings, strict=True):
            sequence.source, sequence.padding = source, [] if source else padding
        for sequence, states_TH in zip(sequences, encoder_states or (), strict=encoder_states is not None):
            sequence.encoded = states_TH
        forward = None if on_tokens is None else turn_of_others(self._model)(on_tokens)
        with self._turn(self._model):
            self._add_inputs(sequences, inputs)
            prefill_seconds = self._decode(sequences, processors, forward)
            self._last = sequences[0]
        return [sequence.output(row, prefill_seconds) for row, sequence in zip(rows, sequences, strict=True)]

    def _turn(self, target: PreTrainedModel) -> AbstractContextManager[None]:
        """Return a context in which other threads that decode with the target or the drafter wait."""
        return turn(target, self if self.drafter is None else self.drafter)

    def _add_inputs(self, sequences: list[DecodeSequence], inputs: Sequence[ProcessorInputs | None] | None) -> None:
        """Give each sequence the processor's tensors of its prompt."""
        if inputs is not None and len(inputs) != len(sequences):
            raise ConfigError.of("inputs", len(inputs), f"one entry for each of the {len(sequences)} prompts")
        for sequence, given in zip(sequences, inputs or (), strict=False):
            sequence.inputs = usable_inputs(self._model, sequence.tokens, given)

    def _decode(
        self, sequences: list[DecodeSequence], processors: Processors, on_tokens: OnBatchTokens | None
    ) -> float:
        """Decode until every sequence has ended and return the seconds of the prefill."""
        # Recurrent layers read whole batches, prompts with images are read one by one.
        alone = is_recurrent(self._model) and any(sequence.inputs for sequence in sequences)
        switch = rotary_switch(self._model.config)
        crossing = switch is not None and _cross(sequences, switch)
        if len(sequences) > 1 and (alone or crossing or not self._together):
            return sum(self._decode([sequence], processors, on_tokens) for sequence in sequences)
        beyond = [sequence for sequence in sequences if self._is_beyond(sequence.tokens)]
        if 0 < len(beyond) < len(sequences):
            others = [sequence for sequence in sequences if sequence not in beyond]
            return sum(self._decode(group, processors, on_tokens) for group in (others, beyond))
        if switch is None or not crossing:
            return self._decode_together(sequences, processors, on_tokens)
        (sequence,) = sequences
        length, sequence.max_length = sequence.max_length, switch + 1  # its last token is not read
        prefill_seconds = self._decode_together(sequences, processors, on_tokens)
        if sequence.stopped_by == "length":
            sequence.resume(length)
            self._decode_together(sequences, processors, on_tokens)
        return prefill_seconds

    def _is_beyond(self, tokens: list[int]) -> bool:
        """Return whether a text fills the drafter's context."""
        limit = None if self.drafter is None else self.drafter.context_limit
        return limit is not None and len(tokens) >= limit

    def _decode_together(
        self, sequences: list[DecodeSequence], processors: Processors, on_tokens: OnBatchTokens | None
    ) -> float:
        """Decode sequences that share passes, or go on with one; return the seconds of the prefill.

        Without the drafter, if its context is shorter than the texts are now.
        """
        drafter, policy = self.drafter, self.policy
        if self._is_beyond(sequences[0].tokens):
            drafter = policy = None
        widths, draft_widths = ({}, None) if self.costs is None else (self.costs.verify_widths, self.costs.draft_widths)
        # The usual number of tokens of a verification; 0 where it changes from round to round.
        width = 1 if drafter is None else policy.draft_length + 1 if isinstance(policy, Chain) else 0
        nodes = policy.most_nodes.verified if self._compile and policy is not None else 0
        plan = Plan(widths=widths, compile=self._compile, width=width, invariant=self._invariant)
        target = TransformersTarget(self._model, self._capability, plan, nodes)
        loop = DecodeLoop(
            target,
            drafter,
            policy,
            sequences,
            processors,
            self.rule,
            draft_widths,
            compile=self._compile,
        )
        device = next(self._model.parameters()).device
        with closing(target), closing(loop):
            started = now(device)
            read = loop.prefill()
            prefill_seconds = now(device) - started  # including the drafter's pass over the prompt
            for sequence, new in read:
                record = None
                if len(sequence.tokens) - len(new) > sequence.prompt_length:  # a text that goes on
                    record = Round(0, 0, 0, len(new), (), 0.0, prefill_seconds, prefill_seconds)
                    sequence.rounds.append(record)
                if on_tokens is not None:
                    on_tokens(sequence.number, new, record)
            while loop.texts:
                for sequence, new, record in loop.round():
                    if on_tokens is not None:
                        on_tokens(sequence.number, new, record)
        return prefill_seconds

    def calibrate(
        self,
        prompts: Sequence[list[int]],
        *,
        inputs: Sequence[ProcessorInputs | None] | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> None:
        """Decode `prompts` and keep what the policy learns: later calls of `generate` start from it.

        Use a few texts at each temperature that will be used. Without effect on policies that do not learn. `inputs`:
        as for `generate_batch`.
        """
        with self._turn(self._model):
            policy = self.policy
            if policy is None or not policy.learns:
                return
            for seed, prompt in enumerate(prompts):
                self.policy = exploring(policy, True)
                self.generate(prompt, inputs=None if inputs is None else inputs[seed], seed=seed, **settings)
                policy = self._last.policy or policy  # none beyond the drafter's context
            self.policy = exploring(policy, False)

    @property
    def learns(self) -> bool:
        """True if the policy learns, so that `calibrate` has an effect."""
        return self.policy is not None and self.policy.learns

    def _sequence(self, number: int, prompt: list[int], max_new_tokens: int, stops: Stops, seed: int) -> DecodeSequence:
        if max_new_tokens < 1:
            raise ConfigError.of("max_new_tokens", max_new_tokens, ">= 1")
        limit = context_limit(self._model.config)
        if limit is not None and len(prompt) >= limit:
            fits = f"fewer than the target's context of {limit}: a new token needs room"
            raise ConfigError(f"prompt={len(prompt)} tokens; expected {fits}")
        if self.drafter is not None and self._is_beyond(prompt):
            of_drafter = f"the {self.drafter.type} drafter's context of {self.drafter.context_limit}"
            warnings.warn(f"prompt={len(prompt)} tokens fill {of_drafter}: decoded without drafts", stacklevel=4)
        length = len(prompt) + max_new_tokens
        length = length if limit is None else min(length, limit)
        return DecodeSequence(list(prompt), length, seed, stops, number=number)

    def _prompts(
        self, rows: list[list[int]], decoder_input_ids: Ids | None
    ) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return (decoder tokens, encoder tokens) of each text; a decoder-only target has no encoder tokens."""
        if not self._model.config.is_encoder_decoder:
            if decoder_input_ids is not None:
                raise ConfigError("decoder_input_ids with a decoder-only target; expected the whole text in input_ids")
            return rows, [[] for _ in rows]
        if decoder_input_ids is None:
            return [[start_token(self._model)] for _ in rows], rows
        starts, _ = prompt_rows(decoder_input_ids, may_be_empty=True)
        if len(starts) != len(rows) or not all(starts):
            raise ConfigError(f"decoder_input_ids={len(starts)} rows; expected {len(rows)}, none of them empty")
        return starts, rows

    def _eos(self, given: EosTokens) -> frozenset[int]:
        if isinstance(given, str) and given == "model":
            return eos_tokens(self._model.config, getattr(self._model, "generation_config", None))
        return frozenset() if given is None else token_set(given)


def _cross(sequences: Sequence[DecodeSequence], switch: int) -> bool:
    """Return True unless no text, or every one from its prompt on, reads a position beyond the first `switch` ones."""
    return any(len(sequence.tokens) <= switch for sequence in sequences) and any(
        sequence.max_length > switch + 1 for sequence in sequences
    )
