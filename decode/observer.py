"""The interface of an object that reads what the target computes and may change the drafter between rounds.

The verification rules are exact for every q that is fixed before a draft is drawn from it. A drafter may therefore
change between two rounds, as a function of everything committed so far; inside a round it may not.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.heads.base import Drafter

# Shapes: n tokens, H hidden size, F size of the target's features per position.


class Observer(Protocol):
    """Reads the target's states of committed tokens; implemented by `draftsmith.train.online`."""

    def attach(self, target: PreTrainedModel, drafter: Drafter | None) -> Drafter | None:
        """Prepare for this pair and return the drafter to decode with, which may contain the given one.

        Called by each decoder, once; ConfigError for a drafter that cannot be observed.
        """
        ...

    def begin(self, texts: Sequence[DecodeSequence], sampling: Sampling) -> None:
        """Texts are about to be decoded with these settings."""
        ...

    def read(self, text: DecodeSequence, hidden_nH: Tensor, features_nF: Tensor | None) -> None:
        """The target has read committed tokens of `text`, for the first time its prompt.

        Args:
            hidden_nH: inputs of the lm_head at these tokens, of the prompt at its last token only. Compiled passes
                reuse the storage, so what is kept has to be copied.
            features_nF: the features that the drafter needs (`Needs.layers`) at these tokens; None if it needs none.
        """
        ...

    def between_rounds(self) -> None:
        """A round has ended and none has begun: the only place where the drafter's weights may change."""
        ...
