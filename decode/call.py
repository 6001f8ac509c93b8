"""One call of the decoder: which texts share passes, and the loop over each group."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from transformers import PreTrainedModel

from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.capability import Capability
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.policies import Policy
from draftsmith.decode.rules import Rule
from draftsmith.decode.sampling import Processors
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import rotary_switch

OnBatchTokens = Callable[[int, list[int], Round | None], None]


@dataclass(frozen=True)
class Call:
    """Decodes the texts of one call; the locks of its models are held meanwhile."""

    target: PreTrainedModel
    capability: Capability
    """Of the target."""
    drafter: Drafter | None
    policy: Policy | None
    rule: Rule | None
    costs: Costs | None
    """Determine the padding of passes."""
    together: bool
    """Whether texts share passes; otherwise they are decoded one after another."""
    compile: bool
    invariant: bool
    processors: Processors
    on_tokens: OnBatchTokens | None

    def decode(self, sequences: list[DecodeSequence]) -> float:
        """Decode until every sequence has ended and return the seconds of the prefill."""
        # Recurrent layers read whole batches, prompts with images are read one by one.
        alone = is_recurrent(self.target) and any(sequence.inputs for sequence in sequences)
        switch = rotary_switch(self.target.config)
        crossing = switch is not None and _cross(sequences, switch)
        if len(sequences) > 1 and (alone or crossing or not self.together):
            return sum(self.decode([sequence]) for sequence in sequences)
        beyond = [sequence for sequence in sequences if is_beyond(self.drafter, sequence.tokens)]
        if 0 < len(beyond) < len(sequences):
            others = [sequence for sequence in sequences if sequence not in beyond]
            return sum(self.decode(group) for group in (others, beyond))
        if switch is None or not crossing:
            return self._decode_together(sequences)
        (sequence,) = sequences
        length, sequence.max_length = sequence.max_length, switch + 1  # its last token is not read
        prefill_seconds = self._decode_together(sequences)
        if sequence.stopped_by == "length":
            sequence.resume(length)
            self._decode_together(sequences)
        return prefill_seconds

    def _decode_together(self, sequences: list[DecodeSequence]) -> float:
        """Decode sequences that share passes, or continue one; return the seconds of the prefill.

        Without the drafter, if its context is shorter than the texts are now.
        """
        drafter, policy = self.drafter, self.policy
        if is_beyond(drafter, sequences[0].tokens):
            drafter = policy = None
        target, loop = self._loop(drafter, policy, sequences)
        device = next(self.target.parameters()).device
        with closing(target), closing(loop):
            started = now(device)
            read = loop.prefill()
            prefill_seconds = now(device) - started  # including the drafter's pass over the prompt
            for sequence, new in read:
                record = None
                if len(sequence.tokens) - len(new) > sequence.prompt_length:  # a text that is continued
                    record = Round(0, 0, 0, len(new), (), 0.0, prefill_seconds, prefill_seconds)
                    sequence.rounds.append(record)
                if self.on_tokens is not None:
                    self.on_tokens(sequence.number, new, record)
            while loop.texts:
                for sequence, new, record in loop.round():
                    if self.on_tokens is not None:
                        self.on_tokens(sequence.number, new, record)
        return prefill_seconds

    def _loop(
        self, drafter: Drafter | None, policy: Policy | None, sequences: list[DecodeSequence]
    ) -> tuple[TransformersTarget, DecodeLoop]:
        """Return the target and the loop for sequences that share passes."""
        widths, draft_widths = {}, None
        if self.costs is not None:
            widths, draft_widths = self.costs.verify_widths, self.costs.draft_widths
        # The usual number of tokens of a verification; 0 where it changes from round to round.
        length = 0 if drafter is None else None if policy is None else policy.fixed_length
        width = 0 if length is None else length + 1
        nodes = policy.most_nodes.verified if self.compile and policy is not None else 0
        plan = Plan(widths=widths, compile=self.compile, width=width, invariant=self.invariant)
        target = TransformersTarget(self.target, self.capability, plan, nodes)
        rule, compile = self.rule, self.compile
        return target, DecodeLoop(
            target, drafter, policy, sequences, self.processors, rule, draft_widths, compile=compile
        )


def is_beyond(drafter: Drafter | None, tokens: list[int]) -> bool:
    """Return whether a text fills the drafter's context."""
    limit = None if drafter is None else drafter.context_limit
    return limit is not None and len(tokens) >= limit


def _cross(sequences: Sequence[DecodeSequence], switch: int) -> bool:
    """Return True unless no text, or every one from its prompt on, reads a position beyond the first `switch` ones."""
    return any(len(sequence.tokens) <= switch for sequence in sequences) and any(
        sequence.max_length > switch + 1 for sequence in sequences
    )
