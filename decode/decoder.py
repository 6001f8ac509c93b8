"""`SpeculativeDecoder`, the public decoder: decodes one prompt or a batch with a target and a drafter."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from transformers import PreTrainedModel

from draftsmith.decode.arguments import (
    BatchSettings,
    GenerateSettings,
    Ids,
    capabilities,
    prompt_rows,
    require_fitting,
    require_reach,
    require_readable,
    require_same_vocabulary,
    require_settings,
    sequences_of,
)
from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.locks import Locks, released, running
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.capability import require_compilable
from draftsmith.decode.passes.checks import CHAINS_ONLY, require_invariant, usable_inputs
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.policies import Chain, Policy, default_policy, exploring, plans, policy_named
from draftsmith.decode.profiling import measure_costs
from draftsmith.decode.rules import rule_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeOutput, DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget, require_lm_head
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.model_config import is_compiled, plain_model, rotary_switch

OnTokens = Callable[[list[int], Round | None], None]
OnBatchTokens = Callable[[int, list[int], Round | None], None]
DecodeTogether = Callable[[list[DecodeSequence]], float]
"""Decodes sequences that share passes, and returns the seconds of the prefill."""


class PassSettings(TypedDict, total=False):
    """Keyword arguments of `SpeculativeDecoder` that change how models are run, not their distributions."""

    costs: Costs | None
    """Seconds of this pair of models on this machine, from `measure_costs`: used by policies that plan with costs, and
    to pad passes to faster widths. Where such a policy is given by name, default: measured here."""
    compile: bool
    """Compile the passes of the target and of the drafter's model with torch.compile when they first run, on CUDA as
    CUDA graphs. Later calls use the same graphs for batches of the same size and sequences of similar length."""
    invariant: bool
    """Read every token after the prompt by passes of one shape, in which its logits do not depend on its index: greedy
    sequences are then equal with and without a drafter bit by bit, in any dtype. One sequence at a time, chains only.
    ConfigError for a target whose logits differ nevertheless, which is measured once."""


class SpeculativeDecoder:
    """Speculative decoding with a target and a drafter; without a drafter, plain decoding with the same code.

    Args:
        target: a transformers causal LM or encoder-decoder model, unmodified.
        drafter: from `load_drafter`, or any `Drafter`; None decodes with the target alone.
        draft_length: draft tokens per round (gamma), at least 1; short for `policy=Chain(draft_length)`. Default: the
            length that the drafter was trained for.
        policy: how drafts are built: a `Policy` or its name, see `draftsmith.decode.policies`.
        rule: name of the verification rule, see `decode.rules.RULES`; default: for each draft the lossless rule
            that accepts most. Greedy decoding has one rule only.
        options: `costs`, `compile` and `invariant`, see `PassSettings`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        draft_length: int | None = None,
        policy: Policy | str | None = None,
        rule: str | None = None,
        **options: Unpack[PassSettings],
    ) -> None:
        require_settings(options, PassSettings)
        compile, invariant = options.get("compile", False), options.get("invariant", False)
        self.costs = options.get("costs")
        if plain_model(target) is not target or is_compiled(target):
            ours = "and runs uncompiled here; compile=True compiles its passes"
            warnings.warn(f"the target was compiled with torch.compile, {ours}", stacklevel=2)
        target = plain_model(target)
        require_lm_head(target)
        self.drafter, self._compile, self._invariant = drafter, compile, invariant
        self._locks = Locks(drafter, owner=self)
        with running():
            models = capabilities(target, drafter)
            if invariant:
                require_invariant(target, ragged=not models[0].no_ragged, compile=compile)
                models[0] = replace(models[0], no_trees=CHAINS_ONLY, no_ragged=CHAINS_ONLY)
        self._capability = models[0]
        if compile:
            require_compilable(target, models)
        self._model = target
        self._together = not any(capability.no_ragged for capability in models)
        """Sequences of a batch share passes; otherwise they are decoded one after another."""
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
                if self.costs is None and plans(policy):
                    self.costs = measure_costs(target, drafter, compile=compile)
                policy = policy_named(policy, self.costs)
            self.policy = default_policy(drafter) if policy is None else policy
        if self.rule is not None and drafter is not None:
            require_fitting(self.rule, drafter, self.policy)
        if self.policy is not None:
            require_readable(self.policy, models)

    @property
    def lossless(self) -> bool:
        """True if sampled sequences are distributed as the target's; greedy ones always equal the target's."""
        return self.rule is None or self.rule.lossless

    def generate(
        self,
        input_ids: Ids | Mapping[str, Any],
        *,
        attention_mask: Ids | None = None,
        inputs: ProcessorInputs | None = None,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> DecodeOutput:
        """Continue one prompt and return the sequence with a record of every round.

        Args:
            input_ids: the prompt, for an encoder-decoder target the source: a list of tokens, a tensor or array [T] or
                [1, T], or the output of a tokenizer.
            attention_mask: 0 or False at padding.
            inputs: the processor's tensors for a prompt with images, see `BatchSettings`.
            seed: seed of all random draws in this call.
            on_tokens: called when tokens are committed: `([first], None)` after the prefill, then `(tokens, round)`,
                where `tokens[: round.accepted]` were drafted and the last one is the target's.
            settings: see `GenerateSettings`.

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

    def generate_batch(
        self,
        input_ids: Ids | Mapping[str, Any],
        *,
        seeds: Sequence[int] | int | None = 0,
        on_tokens: OnBatchTokens | None = None,
        **settings: Unpack[BatchSettings],
    ) -> list[DecodeOutput]:
        """Continue several prompts together; each sequence equals the output of `generate` for its prompt and seed.

        Args:
            input_ids: lists of tokens, or a tensor or array [B, T], or the output of a tokenizer, which names the mask.
            seeds: one seed per prompt, or the first of consecutive seeds.
            on_tokens: called with (index of the sequence, tokens, round); see `generate`.
            settings: see `GenerateSettings` and `BatchSettings`; None is the default of every setting, except that no
                token ends a sequence with `eos_token_id=None`.
        """
        return self._decode(input_ids, seeds, on_tokens, self.policy, settings)[0]

    @torch.inference_mode()
    def _decode(
        self,
        input_ids: Ids | Mapping[str, Any],
        seeds: Sequence[int] | int | None,
        on_tokens: OnBatchTokens | None,
        policy: Policy | None,
        settings: BatchSettings,
    ) -> tuple[list[DecodeOutput], list[Policy | None]]:
        """Return the output for each prompt, and the policy at the end of its sequence; see `generate_batch`."""
        rows, sequences = sequences_of(self._model, input_ids, 0 if seeds is None else seeds, settings)
        for sequence in sequences:
            if self.drafter is not None and self._is_beyond(sequence):
                of_drafter = f"the {self.drafter.type} drafter's context of {self.drafter.context_limit}"
                warnings.warn(
                    f"prompt={len(sequence.tokens)} tokens fill {of_drafter}: decoded without drafts", stacklevel=4
                )
        sampling = Sampling(settings.get("temperature") or 0.0, settings.get("top_k"), settings.get("top_p"))
        processors = Processors(sampling, settings.get("logits_processor") or (), sequences=len(rows))
        forward = None if on_tokens is None else released()(on_tokens)
        with self._locks.held():
            self._add_inputs(sequences, settings.get("inputs"))
            decode = partial(self._decode_together, policy=policy, processors=processors, on_tokens=forward)
            prefill_seconds = self._decode_grouped(sequences, decode)
        outputs = [sequence.output(row, prefill_seconds) for row, sequence in zip(rows, sequences, strict=True)]
        return outputs, [sequence.policy for sequence in sequences]

    def _decode_grouped(self, sequences: list[DecodeSequence], decode: DecodeTogether) -> float:
        """Decode until every sequence has ended, those together that may share passes; return the prefill's seconds."""
        # Recurrent layers read whole batches, prompts with images are read one by one.
        alone = is_recurrent(self._model) and any(sequence.inputs for sequence in sequences)
        switch = rotary_switch(self._model.config)
        crossing = switch is not None and _cross(sequences, switch)
        if len(sequences) > 1 and (alone or crossing or not self._together):
            return sum(self._decode_grouped([sequence], decode) for sequence in sequences)
        beyond = [sequence for sequence in sequences if self._is_beyond(sequence)]
        if 0 < len(beyond) < len(sequences):
            others = [sequence for sequence in sequences if sequence not in beyond]
            return sum(self._decode_grouped(group, decode) for group in (others, beyond))
        if switch is None or not crossing:
            return decode(sequences)
        (sequence,) = sequences
        length, sequence.max_length = sequence.max_length, switch + 1  # its last token is not read
        prefill_seconds = decode(sequences)
        if sequence.stopped_by == "length":
            sequence.resume(length)
            decode(sequences)
        return prefill_seconds

    def _decode_together(
        self,
        sequences: list[DecodeSequence],
        policy: Policy | None,
        processors: Processors,
        on_tokens: OnBatchTokens | None,
    ) -> float:
        """Decode sequences that share passes, or continue one; return the seconds of the prefill.

        Without the drafter, if its context is shorter than the sequences are now.
        """
        drafter = self.drafter
        if self._is_beyond(sequences[0]):
            drafter = policy = None
        target = self._target(drafter, policy)
        draft_widths = None if self.costs is None else self.costs.draft_widths
        loop = DecodeLoop(
            target, drafter, policy, sequences, processors, self.rule, draft_widths, compile=self._compile
        )
        device = next(self._model.parameters()).device
        with closing(target), closing(loop):
            started = now(device)
            read = loop.prefill()
            prefill_seconds = now(device) - started  # including the drafter's pass over the prompt
            for sequence, new in read:
                record = None
                if len(sequence.tokens) - len(new) > sequence.prompt_length:  # a sequence that is continued
                    record = Round(0, 0, 0, len(new), (), 0.0, prefill_seconds, prefill_seconds)
                    sequence.rounds.append(record)
                if on_tokens is not None:
                    on_tokens(sequence.number, new, record)
            while loop.sequences:
                for sequence, new, record in loop.round():
                    if on_tokens is not None:
                        on_tokens(sequence.number, new, record)
        return prefill_seconds

    def _target(self, drafter: Drafter | None, policy: Policy | None) -> TransformersTarget:
        """Return the target with the form of its passes."""
        # The usual number of tokens of a verification; 0 where it changes from round to round.
        length = 0 if drafter is None else None if policy is None else policy.fixed_length
        plan = Plan(
            widths={} if self.costs is None else self.costs.verify_widths,
            compile=self._compile,
            width=0 if length is None else length + 1,
            invariant=self._invariant,
        )
        nodes = policy.most_nodes.verified if self._compile and policy is not None else 0
        return TransformersTarget(self._model, self._capability, plan, nodes)

    def _is_beyond(self, sequence: DecodeSequence) -> bool:
        """Return whether a sequence fills the drafter's context."""
        limit = None if self.drafter is None else self.drafter.context_limit
        return limit is not None and len(sequence.tokens) >= limit

    def _add_inputs(self, sequences: list[DecodeSequence], inputs: Sequence[ProcessorInputs | None] | None) -> None:
        """Give each sequence the processor's tensors of its prompt."""
        if inputs is not None and len(inputs) != len(sequences):
            raise ConfigError.of("inputs", len(inputs), f"one entry for each of the {len(sequences)} prompts")
        for sequence, given in zip(sequences, inputs or (), strict=False):
            sequence.inputs = usable_inputs(self._model, sequence.tokens, given)

    def calibrate(
        self,
        prompts: Sequence[list[int]],
        *,
        inputs: Sequence[ProcessorInputs | None] | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> None:
        """Decode `prompts` and keep what the policy learns: later calls of `generate` start from it.

        Use a few prompts at each temperature that will be used. Without effect on policies that do not learn. `inputs`:
        as for `generate_batch`.
        """
        policy = self.policy
        if policy is None or not policy.learns:
            return
        for seed, prompt in enumerate(prompts):
            given: BatchSettings = {**settings, "inputs": None if inputs is None else [inputs[seed]]}
            _, (learned,) = self._decode([prompt], seed, None, exploring(policy, True), given)
            policy = learned or policy  # none beyond the drafter's context
        self.policy = exploring(policy, False)  # not after an error

    @property
    def learns(self) -> bool:
        """True if the policy learns, so that `calibrate` has an effect."""
        return self.policy is not None and self.policy.learns


def _cross(sequences: Sequence[DecodeSequence], switch: int) -> bool:
    """Return True unless no sequence, or each from its prompt on, reads a position beyond the first `switch` ones."""
    return any(len(sequence.tokens) <= switch for sequence in sequences) and any(
        sequence.max_length > switch + 1 for sequence in sequences
    )
