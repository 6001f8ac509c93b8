"""One text while it is decoded: its tokens, its randomness, and when it ends.

What a decoded text carries: its tokens and a record of every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria

from draftsmith.decode.policies.base import Policy
from draftsmith.decode.sampling import Rng, token_ids


@dataclass(frozen=True)
class Round:
    """One target forward pass behind the prefill. Times are wall-clock seconds."""

    drafted: int
    """Draft tokens that were verified."""
    depth: int
    """Draft tokens on the longest path; equal to `drafted` for a chain."""
    accepted: int
    committed: int
    """Tokens kept: accepted draft tokens and the target's own, less what an EOS or the length cut off."""
    overlap: tuple[float, ...]
    """Sum over v of min(p_v, q_v) at each draft position that was tested; under greedy decoding 1.0 or 0.0."""
    draft_seconds: float
    verify_seconds: float
    seconds: float
    """The whole round; what draft and verify leave is overhead."""

    @property
    def tested(self) -> int:
        """Draft positions at which the accepted path had a draft token: of a tree, another path may be deeper."""
        return len(self.overlap)


@dataclass(frozen=True)
class DecodeOutput:
    """A decoded text. The first token comes from the prefill, all others from `rounds`."""

    prompt_tokens: list[int]
    tokens: list[int]
    """New tokens, including the EOS when there is one."""
    rounds: list[Round]
    prefill_seconds: float
    stopped_by: Literal["eos", "length", "criteria"]

    @property
    def decode_tokens(self) -> int:
        """Tokens that the rounds committed."""
        return len(self.tokens) - 1

    @property
    def decode_seconds(self) -> float:
        """Seconds of all rounds, without the prefill."""
        return sum(record.seconds for record in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decode only; 0 when the prefill's token was the only one."""
        return self.decode_tokens / self.decode_seconds if self.rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens committed per target forward pass, the bonus or correction included."""
        return self.decode_tokens / len(self.rounds) if self.rounds else 0.0

    @property
    def drafted(self) -> list[bool]:
        """For each new token whether the drafter proposed it; the others are the target's own."""
        flags = [False]
        for record in self.rounds:
            ours = min(record.accepted, record.committed)
            flags += [True] * ours + [False] * (record.committed - ours)
        return flags

    @property
    def alpha(self) -> float:
        """Mean of sum_v min(p_v, q_v) over the tested draft positions; 0 when none was tested."""
        overlaps = [value for record in self.rounds for value in record.overlap]
        return sum(overlaps) / len(overlaps) if overlaps else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """For each draft position, the share accepted among rounds that accepted everything before it and had a draft
        token behind that."""
        return acceptance_at(self.rounds)


def acceptance_at(rounds: list[Round]) -> list[float]:
    """Return measured acceptance by draft position, given a draft token there below what was accepted."""
    shares = []
    for position in range(max((record.tested for record in rounds), default=0)):
        accepted = [record.accepted > position for record in rounds if record.tested > position]
        shares.append(sum(accepted) / len(accepted))
    return shares


@dataclass(frozen=True)
class Stops:
    """What ends a text, beside its length."""

    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriteria] = ()
    """transformers' own, stop strings among them; asked after every committed token, as `generate` does."""


@dataclass
class DecodeSequence:
    """One row of the decoder. Drafters see it as the `SequenceState` of heads/base.py."""

    tokens: list[int]
    """Committed tokens; for an encoder-decoder target those of the decoder, the start token first."""
    max_length: int
    rng: Rng
    stops: Stops = Stops()
    source: list[int] = field(default_factory=list)
    encoded: Tensor | None = None
    """[T, H]: what the encoder made of the source, where it was asked before."""
    padding: list[int] = field(default_factory=list)
    """What stood left of the prompt in a padded batch: only processors and criteria see it, as in `generate`."""
    number: int = 0
    """Its place in the batch that was asked for."""
    hidden: Tensor | None = None
    features: Tensor | None = None
    """[n, F]: of the tokens whose features the drafter has not taken yet."""
    policy: Policy | None = None
    stopped_by: Literal["eos", "length", "criteria"] | None = None
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def room(self) -> int:
        """The deepest draft that still fits: the token behind it needs a place too."""
        return self.max_length - len(self.tokens) - 1

    def take_features(self, count: int) -> Tensor:
        """[count, F]: the target's features of the next tokens in order, each handed out once."""
        assert self.features is not None, "a drafter takes only the features that it needs"
        taken, self.features = self.features[:count], self.features[count:]
        return taken

    def add_features(self, features_nF: Tensor | None) -> None:
        """The target has read n more tokens."""
        if features_nF is not None:
            self.features = features_nF if self.features is None else torch.cat([self.features, features_nF])

    def commit(self, new: list[int]) -> list[int]:
        """Append `new` up to and including the first token that ends the text; return what was appended."""
        for count, token in enumerate(new, 1):
            self.tokens.append(token)
            self.stopped_by = self._stopped(token)
            if self.stopped_by is not None:
                return new[:count]
        return new

    def output(self, prompt: list[int], prefill_seconds: float) -> DecodeOutput:
        """Return the text, which has ended; `prompt`: the tokens that it was asked for with."""
        assert self.stopped_by is not None, "the text has not ended"
        new = self.tokens[self.prompt_length :]
        return DecodeOutput(prompt, new, self.rounds, prefill_seconds, self.stopped_by)

    def _stopped(self, token: int) -> Literal["eos", "length", "criteria"] | None:
        if token in self.stops.eos:
            return "eos"
        if self.stops.criteria:
            ids = token_ids([self.padding + self.tokens])
            if any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.stops.criteria):
                return "criteria"
        return "length" if len(self.tokens) >= self.max_length else None
