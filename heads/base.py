"""The interface of every drafter, and what it is given. Implementations are one file a family beside this one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn

from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.draft_vocab import DraftVocabulary

# Shapes: B texts, T positions, H target hidden size, F features of the target a position, D drafter hidden size,
# K draft positions, V vocabulary, E tokens whose probability is known.

FINAL = -1
"""In `Needs.layers`: the state that the target's lm_head reads, behind the last norm."""


class SequenceState(Protocol):
    """One text while it is being decoded, as a drafter may see it."""

    source: list[int]
    """What an encoder reads; empty for decoder-only targets."""

    tokens: list[int]
    """Every committed token, the prompt's included. The last one has not been through the target yet."""

    hidden: Tensor | None
    """[H]: the target's state that `tokens[-1]` was predicted from, i.e. its lm_head's input."""

    def take_features(self, count: int) -> Tensor:
        """[count, F]: the target's features (`Needs.layers`) of the next tokens in order, each handed out once.

        Every committed token but the last has some.
        """


class Tree(Protocol):
    """One text's draft while it grows. `ROOT` stands for the last committed token."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


class ModelRunner(Protocol):
    """A model that reads the texts, one row each, into a cache of its own. The decoder implements it.

    The model is a transformers LM, or has its interface (`DraftNetwork`) and may then also read features of the target.
    """

    @property
    def lengths(self) -> list[int]:
        """Committed tokens that each row has read."""
        ...

    states: list[Tensor]
    """What the model's output held as `states` for the logits last returned: [n, D] for each row."""

    def append(self, tokens: list[list[int]], features: list[Tensor] | None = None) -> Tensor:
        """Read committed tokens; the logits [B, V] behind the last one of each row. An empty row stays as it is."""

    def branch(
        self, trees: Sequence[Tree], nodes: list[list[int]], features: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Read draft nodes, parents before children; for each row the logits [n, V] behind its nodes."""

    def commit(self, paths: list[list[int]]) -> None:
        """The round is over: keep what was read of each row's accepted path, forget all other draft nodes."""

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""


class Context(Protocol):
    """What a drafter is given when decoding begins."""

    @property
    def texts(self) -> Sequence[SequenceState]:
        """The texts that are still running; finished ones leave it, see `Drafter.drop`."""
        ...

    def runner(self, model: nn.Module, *, padded: bool = True) -> ModelRunner:
        """A reader for a model of the drafter's own; `padded`: its passes may be padded to a cheaper width."""


@dataclass(frozen=True)
class Needs:
    """What of the target a drafter reads."""

    hidden: bool = False
    """The final hidden state, i.e. what the target's lm_head reads, behind the last committed token but one."""
    layers: tuple[int, ...] = ()
    """Features of every committed position, side by side: k >= 1 is the output of the target's k-th layer, i.e.
    transformers' `hidden_states[k]` (before the last norm, also for the last layer), `FINAL` the final hidden state."""


@dataclass(frozen=True)
class TeacherSignals:
    """One batch of text as the target sees it."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    hidden_BTH: Tensor
    """The target's final hidden states: `lm_head(hidden[:, t])` are its logits for token t + 1."""
    mask_BT: Tensor
    """bool; True where the target's distribution *at* position t (for token t + 1) is to be learned."""
    features_BTF: Tensor | None = None
    """The features that the drafter needs (`Needs.layers`); None when it needs none."""
    source_BS: Tensor | None = None
    """What an encoder reads; None for decoder-only targets."""
    source_mask_BS: Tensor | None = None
    documents_BT: Tensor | None = None
    """Which document of its row each position belongs to, counted from 0; padding on the right is one more. None where
    every row is one document. Nothing may be seen across documents, and positions restart in each."""
    top_ids_BTE: Tensor | None = None
    """Where nobody has the hidden states (then [B, T, 0]): the tokens t + 1 whose probability is known, -1 for none."""
    top_log_BTE: Tensor | None = None
    """Their log-probabilities."""


@dataclass(frozen=True)
class DraftStates:
    """A drafter's teacher-forced states for one draft position; logits are made from them chunk by chunk."""

    hidden_BTD: Tensor
    head: Callable[[Tensor], Tensor]
    """Maps [N, D] states to [N, V] logits, or to those of the draft vocabulary."""
    offset: int = 0
    """State t is to agree with the target's distribution at position t + offset."""
    places_BT: Tensor | None = None
    """Where states do not stand at every position: the position that state t is to agree with, -1 for none."""
    vocabulary_D: Tensor | None = None
    """The token of each of the head's rows, where it has not the target's whole vocabulary."""
    regresses: bool = False
    """The state itself is a guess of the target's final hidden state at that position."""
    confidence: Callable[[Tensor], Tensor] | None = None
    """Maps [N, D] states to [N] logits of the chance that the draft token is accepted."""
    head_parameters: tuple[nn.Parameter, ...] = ()
    """What a head that is no module reads and trains."""

    def parameters(self) -> list[nn.Parameter]:
        """Everything that is trained between states and logits."""
        modules = [part for part in (self.head, self.confidence) if isinstance(part, nn.Module)]
        return [*self.head_parameters, *(parameter for module in modules for parameter in module.parameters())]


class Drafter(nn.Module):
    """Anything that proposes: the half of a drafter that decodes."""

    type: ClassVar[str]
    needs: ClassVar[Needs] = Needs()
    vocab_size: int | None = None
    """Rows of its logits; None when it has none of its own."""
    context_limit: int | None = None
    """The longest text that it can read, in tokens."""
    draft_length_hint: int | None = None
    """The draft length that the checkpoint was trained and chosen for."""
    target_quality: dict[str, float] | None = None
    """Where the target was trained with it: what that did to the target, see `measure_quality`."""
    shared_vocabulary: int | None = None
    """Tokens that drafter and target share, where their padded vocabularies differ in size."""
    max_draft_length: int | None = None
    """The deepest draft that its logits reach; None when there is no limit."""
    only_retrieves: ClassVar[bool] = False
    """It has no logits to grow a draft from, so that policies do not concern it."""

    def start(self, context: Context) -> None:
        """Begin: read the texts, allocate caches, forget the last decoding."""
        self.context = context

    def retrieve(self, row: int, room: int) -> Draft | None:
        """At most `room` levels of candidates that are known without any step; None asks for `begin` and `extend`."""
        return None

    def begin(self, rows: list[int]) -> Tensor:
        """Logits [B, V] for the first draft token of each text in `rows`; other rows hold anything."""
        raise NotImplementedError(f"{self.type} drafters only retrieve")

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        """For each text the logits [n, V] behind its `nodes`, whose parents were extended before."""
        raise NotImplementedError(f"{self.type} drafters only retrieve")

    def confidences(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[list[float]] | None:
        """For each text and node, how likely the drafter takes the next token behind it to be accepted, whichever it
        will be; None from drafters that make no such guess. Asked after the node's logits."""
        return None

    def rollback(self, paths: list[list[int]]) -> None:
        """The round is over: for each text the accepted nodes. Everything else of the drafts is to be forgotten."""

    def drop(self, rows: list[int]) -> None:
        """Some texts are finished: keep the state of these rows only."""


class TrainableDrafter(Drafter, ABC):
    """A drafter with weights of its own: it is made for a target, trained, saved and loaded."""

    vocab_size: int

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that its lm_head knows; None for the whole vocabulary, or where it is the target's lm_head."""
        return None

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

    @abstractmethod
    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Teacher-forced states, one entry for each draft position that is trained.

        The number of entries is the drafter's own, also where the texts are shorter than the draft: the entries past
        their end train nothing, but processes and parts of a batch add up sums by position.
        """

    def attach(self, target: nn.Module) -> None:
        """Take what the drafter shares with `target` (embeddings, lm_head) and never saves. Called before any use."""
