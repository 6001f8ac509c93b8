"""The interface of every drafter, and what it is given. Implementations are one file a family beside this one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn

from draftsmith.heads.draft import Draft

# Shapes: B batch, T positions, H target hidden size, D drafter hidden size, K draft positions, V vocabulary.


class Context(Protocol):
    """What a drafter may see and do while decoding; the decoder implements it."""

    tokens: list[int]
    """Every committed token. The last one has not been through the target yet."""

    hidden: Tensor | None
    """[H]: the target's state that `tokens[-1]` was predicted from, i.e. its lm_head's input."""

    max_length: int
    """No committed or draft token will ever stand at this position or after it."""

    def new_cache(self, model: nn.Module) -> Any:
        """A preallocated transformers `Cache` of `max_length` positions whose `length` can be moved back."""

    def choose(self, logits_V: Tensor) -> tuple[int, Tensor | None]:
        """Draw one draft token as the run's processors say: (token, its q [V], or None under greedy decoding)."""

    def mask(self, start: int, count: int) -> Tensor | None:
        """Causal mask for `count` tokens fed behind `start` cached ones, in the form that transformers takes."""


@dataclass(frozen=True)
class Needs:
    """What of the target a drafter reads."""

    hidden: bool = False
    """The final hidden state, i.e. what the target's lm_head reads."""


@dataclass(frozen=True)
class TeacherSignals:
    """One batch of text as the target sees it."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    hidden_BTH: Tensor
    """The target's final hidden states: `lm_head(hidden[:, t])` are its logits for token t + 1."""
    mask_BT: Tensor
    """bool; True where the target's distribution *at* position t (for token t + 1) is to be learned."""


@dataclass(frozen=True)
class Unrolled:
    """A drafter's teacher-forced states for one draft position; logits are made from them chunk by chunk."""

    hidden_BTD: Tensor
    head: Callable[[Tensor], Tensor]
    """Maps [N, D] states to [N, V] logits."""
    offset: int
    """State t is to agree with the target's distribution at position t + offset."""


class Drafter(nn.Module, ABC):
    """Anything that proposes. Parameterless drafters implement only the decoding half."""

    type: ClassVar[str]
    needs: ClassVar[Needs]
    vocab_size: int
    draft_length_hint: int | None = None
    """The draft length that the checkpoint was trained and chosen for."""

    @classmethod
    @abstractmethod
    def from_target(cls, target: nn.Module, **options: Any) -> Self:
        """A new drafter whose shapes fit `target`, ready to be trained. `options` are the recipe's drafter keys."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain values from which `from_config` builds the same shapes again; stored in the checkpoint."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """An untrained drafter of the stored shapes; its weights are loaded afterwards."""

    @property
    @abstractmethod
    def max_draft_length(self) -> int | None:
        """The most tokens it can propose in a round; None when there is no limit."""

    @abstractmethod
    def start(self, context: Context) -> None:
        """Begin a new text: allocate caches, forget the last one."""

    @abstractmethod
    def propose(self, context: Context, draft_length: int) -> Draft:
        """At most `draft_length` >= 1 draft tokens that follow `context.tokens`."""

    @abstractmethod
    def observe(self, committed_length: int) -> None:
        """The round is over: positions from `committed_length` on were not committed; forget them."""

    @abstractmethod
    def unroll(self, signals: TeacherSignals) -> list[Unrolled]:
        """Teacher-forced states, one entry a draft position that has its own head."""
