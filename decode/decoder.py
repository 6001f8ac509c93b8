"""`SpeculativeDecoder`, the public decoder: validates its arguments and decodes one prompt or a batch.

Prompts are lists of tokens or padded tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from draftsmith.decode.capability import Capability, capability_of, require_compilable
from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.loop import DecodeLoop, example_draft
from draftsmith.decode.policies import MAY_BRANCH, Policy, default_policy, exploring, plans, policy_named
from draftsmith.decode.policies.base import most_nodes, usual_width
from draftsmith.decode.policies.chain import Chain
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.prompt_check import usable_inputs
from draftsmith.decode.prompts import one_seed_each, prompt_rows, require_known
from draftsmith.decode.recurrent_state import is_recurrent
from draftsmith.decode.sampling import Processors, Sampling, SeededRng
from draftsmith.decode.sequence import DecodeOutput, DecodeSequence, Round, Stops
from draftsmith.decode.target import TransformersTarget
from draftsmith.decode.turns import turn, turn_of_others
from draftsmith.decode.verification import Rule, rule_named
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.model_config import eos_tokens, rotary_switch, start_token
from draftsmith.heads.processor_inputs import ProcessorInputs

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
    stop_strings: str | Sequence[str]
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
    ) -> None:
        self._target, self.drafter = TransformersTarget(target), drafter
        with self._turn(target):
            models = capabilities(target, drafter)
        self._target.capability = models[0]
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
                _require_reach(drafter, draft_length)
        self.policy: Policy | None = None
        """None without a drafter, and for one that only retrieves."""
        if drafter is not None and not drafter.only_retrieves:
            _require_same_vocabulary(drafter, target)
            if isinstance(policy, str):
                if costs is None and plans(policy):
                    with self._turn(target):
                        costs = measure_costs(target, drafter, compile=compile)
                policy = policy_named(policy, costs)
            self.policy = default_policy(drafter) if policy is None else policy
        if self.rule is not None and drafter is not None:
            _require_fitting(self.rule, drafter, self.policy)
        if self.policy is not None:
            require_readable(self.policy, models)
            if compile:
                most_nodes(self.policy, greedy=False)  # refuses trees of any size
        self.costs = costs
        self._target.widths = {} if costs is None else costs.verify_widths
        self._target.compile = compile

    @property
    def lossless(self) -> bool:
        """True if sampled texts are distributed as the target's; greedy texts always equal the target's."""
        return self.rule is None or self.rule.lossless

    def generate(
        self,
        input_ids: Tensor | list[int],
        *,
        inputs: ProcessorInputs | None = None,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> DecodeOutput:
        """Decode one prompt.

        Args:
            input_ids: the prompt, [T] or [1, T] or a list, at least one token; for an encoder-decoder target, the input
                of its encoder.
            inputs: the processor's tensors for a prompt with images, see `generate_batch`.
            seed: seed of all random draws in this call.
            on_tokens: called when tokens are committed: `([first], None)` after the prefill, then `(tokens, round)`,
                where `tokens[: round.accepted]` were drafted and the last one is the target's.
            settings: see `generate_batch`.

        Raises:
            ConfigError: for an empty prompt, a prompt that fills the context, or settings out of range.
        """
        rows, _ = prompt_rows(input_ids)
        if len(rows) != 1:
            raise ConfigError.of("input_ids batch", len(rows), "1 prompt per call; `generate_batch` takes several")

        forward = None if on_tokens is None else _without_place(on_tokens)
        return self.generate_batch(rows, inputs=[inputs], seeds=[seed], on_tokens=forward, **settings)[0]

    @torch.inference_mode()
    def generate_batch(
        self,
        input_ids: Tensor | Sequence[list[int]],
        *,
        attention_mask: Tensor | None = None,
        inputs: Sequence[ProcessorInputs | None] | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seeds: Sequence[int] | int = 0,
        eos_token_id: EosTokens = "model",
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        stop_strings: str | Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        decoder_input_ids: Sequence[list[int]] | None = None,
        encoder_states: Sequence[Tensor] | None = None,
        on_tokens: OnBatchTokens | None = None,
    ) -> list[DecodeOutput]:
        """Decode several prompts together; each text equals the output of `generate` for its prompt and seed.

        Args:
            input_ids: lists of tokens, or [B, T] with `attention_mask` where rows are padded, on either side.
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
        processors = Processors(Sampling(temperature, top_k, top_p), logits_processor, texts=len(rows))
        stops = Stops(self._eos(eos_token_id), [*stopping_criteria, *_stop_strings(stop_strings, tokenizer)])
        prompt_seeds = one_seed_each(seeds, len(rows))
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
        forward = None if on_tokens is None else _in_turns_of_others(on_tokens, self._model)
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
        if switch is None or not crossing:
            return self._decode_together(sequences, processors, on_tokens)
        (sequence,) = sequences
        length, sequence.max_length = sequence.max_length, switch + 1  # its last token is not read
        prefill_seconds = self._decode_together(sequences, processors, on_tokens)
        if sequence.stopped_by == "length":
            sequence.resume(length)
            self._decode_together(sequences, processors, on_tokens)
        return prefill_seconds

    def _decode_together(
        self, sequences: list[DecodeSequence], processors: Processors, on_tokens: OnBatchTokens | None
    ) -> float:
        """Decode sequences that share passes, or go on with one; return the seconds of the prefill."""
        widths = None if self.costs is None else self.costs.draft_widths
        policy, target = self.policy, self._target
        target.width = 1 if self.drafter is None else usual_width(policy, greedy=processors.greedy)
        target.nodes = most_nodes(policy, greedy=processors.greedy).verified if target.compile else 0
        loop = DecodeLoop(
            target,
            self.drafter,
            policy,
            sequences,
            processors,
            self.rule,
            widths,
            compile=target.compile,
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
                policy = self._last.policy
                assert policy is not None, "every text of this call had a policy"
            self.policy = exploring(policy, False)

    @property
    def learns(self) -> bool:
        """True if the policy learns, so that `calibrate` has an effect."""
        return self.policy is not None and self.policy.learns

    def _sequence(self, number: int, prompt: list[int], max_new_tokens: int, stops: Stops, seed: int) -> DecodeSequence:
        if max_new_tokens < 1:
            raise ConfigError.of("max_new_tokens", max_new_tokens, ">= 1")
        limit = self._target.context_limit
        reach = [limit, None if self.drafter is None else self.drafter.context_limit]
        shortest = min((value for value in reach if value is not None), default=None)
        if shortest is not None and len(prompt) >= shortest:
            raise ConfigError(
                f"prompt={len(prompt)} tokens; expected fewer than the context of {shortest}: a new token needs room"
            )
        length = len(prompt) + max_new_tokens
        length = length if limit is None else min(length, limit)
        return DecodeSequence(list(prompt), length, SeededRng(seed), stops, number=number)

    def _prompts(
        self, rows: list[list[int]], decoder_input_ids: Sequence[list[int]] | None
    ) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
        """Return (decoder tokens, encoder tokens) of each text; a decoder-only target has no encoder tokens."""
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
        if eos_token_id == "model":
            return eos_tokens(self._model.config, getattr(self._model, "generation_config", None))
        if eos_token_id is None:
            return frozenset()
        return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _cross(sequences: Sequence[DecodeSequence], switch: int) -> bool:
    """Return True unless no text, or every one from its prompt on, reads a position beyond the first `switch` ones."""
    return any(len(sequence.tokens) <= switch for sequence in sequences) and any(
        sequence.max_length > switch + 1 for sequence in sequences
    )


def _in_turns_of_others(on_tokens: OnBatchTokens, target: PreTrainedModel) -> OnBatchTokens:
    """Return `on_tokens`, during which other threads may decode with the target."""

    def forward(number: int, tokens: list[int], record: Round | None) -> None:
        with turn_of_others(target):
            on_tokens(number, tokens, record)

    return forward


def _without_place(on_tokens: OnTokens) -> OnBatchTokens:
    """Return `on_tokens` in the form that `generate_batch` calls, for a batch of one text."""

    def forward(_: int, tokens: list[int], record: Round | None) -> None:
        on_tokens(tokens, record)

    return forward


def _stop_strings(
    stop_strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[StoppingCriteria]:
    """Return the criterion that ends texts there; ConfigError if no text of the tokenizer holds any of the strings."""
    if not stop_strings:
        return []
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if tokenizer is None:
        raise ConfigError(f"stop_strings={strings!r} without a tokenizer; expected the target's tokenizer")
    try:
        return [StopStringCriteria(tokenizer, strings)]
    except ValueError as error:
        expected = f"at least one string that the tokenizer can produce ({reason_of(error)})"
        raise ConfigError.of("stop_strings", strings, expected) from error


def capabilities(target: PreTrainedModel, drafter: Drafter | None) -> list[Capability]:
    """Return the capabilities of the target and of the models that `drafter` runs with a cache of their own."""
    modules = () if drafter is None else drafter.modules()
    models = [target, *(module.model for module in modules if isinstance(module, DraftModel))]
    return [capability_of(model) for model in models]


def require_readable(policy: Policy, models: Sequence[Capability]) -> None:
    """Raise ConfigError if drafts of `policy` may have branches, and one of the models reads chains only."""
    for capability in models:
        if capability.no_trees and (
            isinstance(policy, MAY_BRANCH) or any(not draft.is_chain for draft in _examples(policy))
        ):
            raise ConfigError(capability.refusal(f"policy={policy}"))


def _examples(policy: Policy) -> list[Draft]:
    return [example_draft(policy, sharpness) for sharpness in (0.0, 4.0)]


def _require_fitting(rule: Rule, drafter: Drafter, policy: Policy | None) -> None:
    """Raise ConfigError if `rule` does not apply to retrieved drafts or to drafts of `policy`."""
    if type(drafter).retrieve is not Drafter.retrieve and not rule.fits(Draft.chain([0, 0])):
        raise ConfigError(f"rule={rule.name!r} needs {rule.takes}; a {drafter.type} drafter also retrieves drafts")
    for draft in [] if policy is None else _examples(policy):
        rule.require(draft)


def _require_reach(drafter: Drafter, draft_length: int) -> None:
    """Raise ConfigError for more draft tokens than the drafter proposes."""
    most = drafter.max_draft_length
    if most is not None and draft_length > most:
        raise ConfigError.of(
            "draft_length", draft_length, f"at most {most}, which is what this {drafter.type} drafter proposes"
        )


def _require_same_vocabulary(drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise ConfigError for a drafter with another vocabulary size, unless the number of shared tokens is known."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab_size in (None, vocabulary) or drafter.shared_vocabulary is not None:
        return
    raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")
