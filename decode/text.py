"""One text while it is decoded: its tokens, its randomness, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria

from draftsmith.decode.chance import Chance
from draftsmith.decode.output import Round

if TYPE_CHECKING:
    from draftsmith.decode.policies.policy import Policy


@dataclass(frozen=True)
class Stops:
    """What ends a text, beside its length."""

    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriteria] = ()
    """transformers' own, stop strings among them; asked after every committed token, as `generate` does."""


@dataclass
class Text:
    """A row of the decoder. To the drafter it is the `Text` of heads/drafter.py."""

    tokens: list[int]
    """Committed tokens; for an encoder-decoder target those of the decoder, the start token first."""
    max_length: int
    chance: Chance
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
    policy: "Policy | None" = None
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

    def _stopped(self, token: int) -> Literal["eos", "length", "criteria"] | None:
        if token in self.stops.eos:
            return "eos"
        if self.stops.criteria:
            ids = torch.tensor([self.padding + self.tokens])
            if any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.stops.criteria):
                return "criteria"
        return "length" if len(self.tokens) >= self.max_length else None
