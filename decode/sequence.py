"""The state of a sequence during decoding, and the result: its tokens and a record of every round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from draftsmith.decode.policies.policy import Policy
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.metrics import acceptance_at, alpha, position_counts, tau


@dataclass(frozen=True)
class Round:
    """Record of one round, i.e. one target forward pass after the prefill. Times are wall-clock seconds."""

    drafted: int
    """Number of draft tokens that were verified."""
    depth: int
    """Number of draft tokens on the longest path; equal to `drafted` for a chain."""
    accepted: int
    """Number of accepted draft tokens, up to the end of the sequence."""
    committed: int
    """Number of tokens kept: accepted draft tokens, and the target's own unless the sequence ends inside the draft."""
    overlap: tuple[float, ...]
    """Sum over v of min(p_v, q_v) at each tested draft position; 1.0 or 0.0 under greedy decoding.

    Positions after an EOS, a stop string or another end of the sequence are not tested."""
    draft_seconds: float
    verify_seconds: float
    seconds: float
    """Seconds of the whole round; the difference to draft and verify is overhead."""

    @property
    def tested(self) -> int:
        """Number of tested draft positions: those where the accepted path had a child in the draft.

        Other paths of a tree may be deeper.
        """
        return len(self.overlap)


@dataclass(frozen=True)
class DecodeOutput:
    """A decoded sequence. The first new token comes from the prefill, all others from `rounds`."""

    prompt_tokens: list[int]
    tokens: list[int]
    """New tokens, including the EOS if there is one."""
    rounds: list[Round]
    prefill_seconds: float
    stopped_by: Literal["eos", "length", "criteria"]
    shared_with: int = 0
    """Index in the batch of the first sequence with which it shared its passes: its own, if it was decoded alone."""

    @property
    def decode_tokens(self) -> int:
        """Number of tokens that the rounds committed."""
        return len(self.tokens) - 1

    @property
    def decode_seconds(self) -> float:
        """Seconds of all rounds, without the prefill."""
        return sum(record.seconds for record in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second without the prefill; 0 without rounds."""
        return self.decode_tokens / self.decode_seconds if self.rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: mean number of tokens committed per target forward pass, including the bonus or correction."""
        return tau(self.decode_tokens, len(self.rounds))

    @property
    def drafted(self) -> list[bool]:
        """For each new token, whether the drafter proposed it; the others are the target's own."""
        flags = [False]
        for record in self.rounds:
            flags += [True] * record.accepted + [False] * (record.committed - record.accepted)
        return flags

    @property
    def overlaps(self) -> list[float]:
        """Sum over v of min(p_v, q_v) at each tested draft position."""
        return [value for record in self.rounds for value in record.overlap]

    @property
    def alpha(self) -> float:
        """Mean of `overlaps`; 0 without any."""
        return alpha(sum(self.overlaps), len(self.overlaps))

    @property
    def acceptance_at(self) -> list[float]:
        """Measured acceptance at each draft position, given that the positions before it were accepted."""
        return acceptance_at([position_counts(self.rounds)])


@dataclass(frozen=True)
class Stops:
    """Conditions that end a sequence before its maximum length."""

    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriteria] = ()
    """Criteria of transformers, including stop strings; called after every committed token, as in `generate`."""


def stop_string_criteria(
    stop_strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[StoppingCriteria]:
    """Return the criterion that ends sequences at these strings; ConfigError if the tokenizer produces none of them."""
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


@dataclass(eq=False)
class DecodeSequence:
    """One sequence during decoding. Implements `SequenceState` of heads/base.py for drafters."""

    tokens: list[int]
    """Committed tokens; for an encoder-decoder target those of the decoder, including its start token."""
    max_length: int
    seed: int = 0
    """Of its random draws."""
    stops: Stops = Stops()
    source: list[int] = field(default_factory=list)
    encoded: Tensor | None = None
    """[T, H]: the encoder's output for the source, if it was computed before."""
    inputs: ProcessorInputs | None = None
    """The processor's tensors of the prompt, which the target alone reads."""
    padding: list[int] = field(default_factory=list)
    """Padding on the left of the prompt in a batch; read by processors and criteria only, as in `generate`."""
    number: int = 0
    """Index of the sequence in its batch."""
    shared_with: int = 0
    """Index of the first sequence that is decoded in the same passes."""
    policy: Policy | None = None
    stopped_by: Literal["eos", "length", "criteria"] | None = None
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self._shown: Tensor | None = None
        """Padding and tokens, as stopping criteria read them."""

    @property
    def room(self) -> int:
        """Maximum draft depth that leaves room for the token after the draft."""
        return self.max_length - len(self.tokens) - 1

    def commit(self, new: list[int]) -> list[int]:
        """Append `new` up to and including the first token that ends the sequence, and return the appended tokens."""
        for count, token in enumerate(new, 1):
            self.tokens.append(token)
            self.stopped_by = self._stopped(token)
            if self.stopped_by is not None:
                return new[:count]
        return new

    def resume(self, max_length: int) -> None:
        """Continue to `max_length`, after the sequence ended at a smaller one."""
        self.stopped_by, self.max_length, self._shown = None, max_length, None

    def output(self, prompt: list[int], prefill_seconds: float) -> DecodeOutput:
        """Return the result for a sequence that has ended; `prompt`: the tokens that the user passed for it."""
        assert self.stopped_by is not None, "the sequence has not ended"
        new = self.tokens[self.prompt_length :]
        return DecodeOutput(prompt, new, self.rounds, prefill_seconds, self.stopped_by, self.shared_with)

    def _stopped(self, token: int) -> Literal["eos", "length", "criteria"] | None:
        if token in self.stops.eos:
            return "eos"
        if self.stops.criteria:
            ids_1T = self._ids()
            if any(bool(torch.as_tensor(criterion(ids_1T, None)).any()) for criterion in self.stops.criteria):
                return "criteria"
        return "length" if len(self.tokens) >= self.max_length else None

    def _ids(self) -> torch.LongTensor:
        """Return padding and tokens [1, T], a view of storage to which new tokens are written."""
        length = len(self.padding) + len(self.tokens)
        if self._shown is None:
            self._shown = torch.zeros(1, len(self.padding) + max(self.max_length, len(self.tokens)), dtype=torch.int64)
            self._shown[0, :length] = torch.tensor(self.padding + self.tokens)
        else:
            self._shown[0, length - 1] = self.tokens[-1]
        return cast(torch.LongTensor, self._shown[:, :length])
