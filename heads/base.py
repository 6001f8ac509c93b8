"""The interface of every drafter and the types that it receives. Each drafter is implemented in a file of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.lm_head import DraftVocabulary
from draftsmith.heads.rows import Columns
from draftsmith.heads.sequence_part import SequencePart

# Shapes: B sequences, T positions, S source positions, H target hidden size, F size of the target's features per
# position, D drafter hidden size, n draft nodes, K draft positions, V vocabulary.

FINAL = -1
"""In `Needs.layers`: the final hidden state, which is the output of the last norm and the input of the lm_head."""


ModuleTypes = tuple[type[nn.Module], ...]


class SequenceState(Protocol):
    """The view that a drafter has of one sequence during decoding."""

    source: list[int]
    """Input tokens of the encoder; empty for decoder-only targets."""

    tokens: list[int]
    """All committed tokens, including the prompt. The target has not read the last one yet."""


@dataclass(frozen=True, eq=False)
class Level:
    """The next draft tokens of all sequences: n nodes of one depth for each.

    A sequence with fewer nodes is padded with the token 0.
    """

    tokens_Bn: Tensor
    parents_Bn: Tensor | None
    """For each node the index of its parent in the previous level, in which the root has index 0. None where every
    sequence has one node in each level so far."""
    depth: int
    """Number of draft tokens on the path to each node."""

    def of_parents(self, values_BmX: Tensor) -> Tensor:
        """Return the values [B, n, X] of each node's parent, from those of the previous level [B, m, X]."""
        if self.parents_Bn is None:
            return values_BmX
        rows_B1 = torch.arange(values_BmX.shape[0], device=values_BmX.device)[:, None]
        return values_BmX[rows_B1, self.parents_Bn]


class Runner(Protocol):
    """Runs a model of the drafter on the sequences, one row each, with a cache of its own. Implemented by the decoder.

    The model is a transformers LM or a `DraftNetwork`, which has the same interface and also reads target features.
    Draft tokens take slots of the cache in the order in which they are read, the same for every row.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Number of committed tokens that the model has read, for each row."""
        ...

    @property
    def states(self) -> Tensor:
        """The model output's `states` that belong to the logits last returned: [B, D] or [B, n, D]."""
        ...

    def append(self, tokens: Sequence[list[int]], features_BQF: Tensor | None = None, *, every: bool = False) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row. Empty rows are skipped.

        Args:
            features_BQF: padded on the right to the longest row.
            every: return the logits [B, Q, V] after every token instead.
        """
        ...

    def extend(self, level: Level, features_BnF: Tensor | None = None) -> Tensor:
        """Read the next level of draft tokens and return the logits [B, n, V] after them."""
        ...

    def line(self, tokens_BQ: Tensor, features_BQF: Tensor | None = None, columns: Columns | None = None) -> Tensor:
        """Read a line of tokens of every row as draft tokens and return the logits [B, Q, V] after them.

        `columns`: return those of some tokens only.
        """
        ...

    def block(self, tokens_Bb: Tensor, features_BCF: Tensor, counts: Sequence[int]) -> Tensor:
        """Read the features of the next `counts` committed tokens and a block of b tokens after them in one pass.

        Return the logits [B, n, V] that the model computes for the block, which is then discarded.

        `features_BCF`: padded on the right to the longest row.
        """
        ...

    def commit(self, slots: Sequence[list[int]]) -> None:
        """End the round: keep these draft slots of each row, in order, and discard all other draft tokens."""
        ...

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        ...


class Context(Protocol):
    """The state of a decoding run that a drafter receives in `start`."""

    @property
    def sequences(self) -> Sequence[SequenceState]:
        """The unfinished sequences; finished ones are removed, see `Drafter.drop`."""
        ...

    @property
    def hidden(self) -> Tensor | None:
        """[B, H]: the target's final hidden state from which the last token of each sequence was predicted.

        It is the input of the lm_head; None where the target provides none or `Needs.hidden` is False.
        """
        ...

    @property
    def last_tokens_B1(self) -> Tensor:
        """The last token of each sequence, on the device."""
        ...

    def take_features(self, counts: Sequence[int]) -> Tensor:
        """Return the target's features (`Needs.layers`) of the next `counts` tokens of each sequence, [B, most, F].

        They are returned in the order of the tokens, each once; every committed token except the last has features.
        Rows with fewer tokens are padded on the right, with finite values that have no meaning.
        """
        ...

    def runner(self, model: nn.Module, *, width: int = 0) -> Runner:
        """Return a runner for a model of the drafter, whose passes may be padded to a cheaper width.

        With `width`, the usual number of tokens of its passes, only compiled passes are padded: narrower ones to it.
        """
        ...


def unread(context: Context, rows: list[int], runner: Runner, first: int = 0) -> list[list[int]]:
    """Return the committed tokens of the sequences in `rows` that `runner` has not read; none for the others.

    `first`: index of the first token of a sequence that it reads.
    """
    tokens: list[list[int]] = [[] for _ in context.sequences]
    for row in rows:
        tokens[row] = context.sequences[row].tokens[runner.lengths[row] + first :]
    return tokens


@dataclass(frozen=True)
class Needs:
    """The hidden states of the target that a drafter reads."""

    hidden: bool = False
    """The final hidden state, i.e. the input of the lm_head, at the second to last committed token."""
    layers: tuple[int, ...] = ()
    """Features of every committed position, concatenated: k >= 1 is the output of the target's k-th layer, i.e.
    transformers' `hidden_states[k]` (before the last norm, also for the last layer), `FINAL` the final hidden state."""


@dataclass(frozen=True, eq=False)
class TeacherSignals:
    """One batch of text with the target's outputs."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    hidden_BTH: Tensor
    """The target's final hidden states: `lm_head(hidden[:, t])` are its logits for token t + 1."""
    mask_BT: Tensor
    """bool; True where the target's distribution at position t (for token t + 1) is a training signal."""
    features_BTF: Tensor | None = None
    """The features that the drafter needs (`Needs.layers`); None when it needs none."""
    source_BS: Tensor | None = None
    """Input tokens of the encoder; None for decoder-only targets."""
    source_mask_BS: Tensor | None = None
    documents_BT: Tensor | None = None
    """The document of its row that each position belongs to, counted from 0; padding on the right is one more
    document. None where every row is one document. Attention stays inside documents, and positions restart in each."""
    log_sum_BT: Tensor | None = None
    """Logarithm of the sum of the exponentials of all of the target's logits, where a cache stores it."""
    argmax_BT: Tensor | None = None
    """The target's most likely tokens, stored with `log_sum_BT`."""
    part: SequencePart | None = None
    """The positions at which this process computes states, where processes share each sequence; None: all."""


@dataclass(frozen=True, eq=False)
class DraftStates:
    """Teacher-forced states of a drafter for one draft position; logits are computed from them in chunks.

    In every draft position, the states with the same index belong to the same draft.
    """

    states_ND: Tensor
    places_N: Tensor
    """The index in the flattened batch [B * T] whose target distribution each state is trained towards, -1 for none."""
    head: Callable[[Tensor], Tensor]
    """Maps states [n, D] to logits [n, V], or to the logits of the draft vocabulary."""
    every_depth: bool = False
    """The states are those of `everywhere`, which are the only entry and predict every token of a draft."""
    vocabulary_D: Tensor | None = None
    """The token of each row of the head; None for the target's whole vocabulary."""
    drafting_head: Callable[[Tensor], Tensor] | None = None
    """Maps states to the logits of decoding, where these differ from the head's: it draws from candidates only."""
    base_head: Callable[[Tensor], Tensor] | None = None
    """Maps states to logits that are trained as well as those of the head; they give the candidates."""
    regresses: bool = False
    """The state itself predicts the target's final hidden state at that position."""
    confidence: Callable[[Tensor], Tensor] | None = None
    """Maps states [n, D] to logits [n] of the probability that the draft token is accepted."""
    head_parameters: tuple[nn.Parameter, ...] = ()
    """Trainable parameters of a head that is not a module."""

    @classmethod
    def everywhere(cls, states_BTD: Tensor, head: Callable[[Tensor], Tensor], **options: Any) -> Self:
        """Return the states at all positions of a drafter whose q depends on the text's tokens alone.

        Wherever a draft begins, each of them predicts the token after its position.
        """
        B, T = states_BTD.shape[:2]
        positions_BT = torch.arange(T, device=states_BTD.device).expand(B, T)
        return cls.in_rows(states_BTD, positions_BT, T, head, every_depth=True, **options)

    @classmethod
    def in_rows(
        cls, states_BAD: Tensor, positions_BA: Tensor, length: int, head: Callable[[Tensor], Tensor], **options: Any
    ) -> Self:
        """Return states that are trained towards positions of their row; positions outside of [0, length) are none."""
        starts_B1 = torch.arange(len(states_BAD), device=states_BAD.device)[:, None] * length
        inside_BA = (positions_BA >= 0) & (positions_BA < length)
        places_BA = (positions_BA + starts_B1).where(inside_BA, -1)
        return cls(states_BAD.flatten(0, 1), places_BA.flatten(), head, **options)

    def trained(self, mask_BT: Tensor) -> Tensor:
        """Return for each state [N] whether its target position is in the loss mask."""
        return mask_BT.flatten().index_select(0, self.places_N.clamp_min(0)) & (self.places_N >= 0)

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters that are trained between states and logits."""
        modules = [part for part in (self.head, self.confidence) if isinstance(part, nn.Module)]
        return [*self.head_parameters, *(parameter for module in modules for parameter in module.parameters())]


class Drafter(nn.Module):
    """A source of draft tokens; this interface is the part that decoding uses."""

    type: ClassVar[str]  # pyright: ignore[reportIncompatibleMethodOverride]  # nn.Module.type casts; nothing here uses it
    needs: Needs = Needs()
    vocab_size: int | None = None
    """Size of its logits; None when it computes none."""
    context_limit: int | None = None
    """Length of the longest sequence that it can read, in tokens."""
    draft_length_hint: int | None = None
    """The draft length that the checkpoint was trained and selected for."""
    target_quality: dict[str, float] | None = None
    """For a target that was trained with the drafter: the change of the target, see `measure_quality`."""
    shared_tensors: tuple[str, ...] = ()
    """The target's tensors in the speculators file that it was read from; an export in that layout has them, too."""
    unstated: tuple[str, ...] = ()
    """Keys that its config.json lacks and that engines replace by different values; see `Published.unstated`."""
    unread_keys: tuple[str, ...] = ()
    """The keys of another project's config.json, from which it was read, that its reader does not know."""
    shared_vocabulary: int | None = None
    """Number of tokens that it may draft: those of the tokenizer, where a vocabulary is padded to a larger size."""
    max_draft_length: int | None = None
    """Depth of the longest draft that it has logits for; None when there is no limit."""
    only_retrieves: bool = False
    """It retrieves whole drafts and computes no logits, so policies do not apply."""

    def limit_vocabulary(self, tokens: int) -> None:
        """Never draft ids from `tokens` on."""
        if self.vocab_size is None or tokens < self.vocab_size:
            self.shared_vocabulary = min(tokens, self.shared_vocabulary or tokens)

    @property
    def language_model(self) -> PreTrainedModel | None:
        """The model of a drafter that writes texts without its target; None of others."""
        return None

    def start(self, context: Context) -> None:
        """Begin decoding: read the sequences, allocate caches, discard the state of the last run.

        The context, and the runners that it returns, hold nothing once the sequences have ended.
        """
        self.context = context

    def retrieve(self, row: int, room: int) -> Draft | None:
        """Return a draft of at most `room` levels without a model pass; None: call `begin` and `extend` instead."""
        return None

    def begin(self, rows: list[int]) -> Tensor:
        """Return logits [B, V] for the first draft token of each sequence in `rows`; other rows are undefined."""
        raise NotImplementedError(f"{self.type} drafters only retrieve")

    def extend(self, level: Level) -> Tensor:
        """Return the logits [B, n, V] after the nodes of the next level, whose parents were in the one before it."""
        raise NotImplementedError(f"{self.type} drafters only retrieve")

    def chain_logits(self, length: int) -> Tensor | None:
        """Return logits [B, length, V] for the tokens of a chain, the first included; None: they depend on the tokens.

        Called after `begin`; no token of the chain is read then.
        """
        return None

    def confidences(self) -> Tensor | None:
        """Return [B, n]: for each node of the last level the predicted probability that the next token is accepted.

        None from drafters without such a prediction. After `begin`, the root is the only node.
        """
        return None

    def rollback(self, slots: Sequence[list[int]]) -> None:
        """End the round. `slots`: for each sequence the accepted nodes that `extend` was given, in order.

        Nodes are numbered in the order of the levels, padding included; all others are discarded.
        """

    def drop(self, rows: list[int]) -> None:
        """Keep only the state of these rows, in this order; the other sequences are finished."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the drafter; rotary frequencies keep their dtype, as in models that transformers loads.

        Rounded to bfloat16, they would rotate distant positions by wrong angles.
        """
        exact = {name: value for name, value in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            owner, _, key = name.rpartition(".")
            if self.get_buffer(name).dtype != value.dtype:
                setattr(self.get_submodule(owner), key, value.to(self.get_buffer(name).device))
        return self


class TrainableDrafter(Drafter, ABC):
    """A drafter with weights: it is created for a target, trained, saved and loaded."""

    vocab_size: int  # pyright: ignore[reportIncompatibleVariableOverride]  # set once, in every subclass's constructor
    training_options: ClassVar[tuple[str, ...]] = ()
    """Options of `from_target` that change how it is trained, not what it computes."""
    block_types: ClassVar[ModuleTypes] = ()
    """The classes of its blocks, see `trained_blocks`."""

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens of its lm_head; None for the whole vocabulary."""
        return None

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of the draft vocabulary; None without one."""
        return None if self.draft_vocabulary is None else len(self.draft_vocabulary)

    @classmethod
    @abstractmethod
    def from_target(cls, target: PreTrainedModel, *_: Any, **options: Any) -> Self:
        """Return a new drafter with shapes that fit `target`; `options` are the recipe's drafter keys."""

    @classmethod
    def like_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """Return a drafter of the shapes of `from_target` without reading its files, to count memory and time."""
        return cls.from_target(target, **options)

    @classmethod
    def require_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        """Raise ConfigError where the recipe's options name a checkpoint with other tokens than `tokenizer`."""

    def choose_tokens(self, target: PreTrainedModel, tokens: list[int]) -> None:
        """Set the draft vocabulary, and start the rows of the own lm_heads again; their number stays."""
        raise NotImplementedError(f"{self.type} drafters have no draft vocabulary")

    def section(self) -> dict[str, Any]:
        """Return the keys of the recipe's section `drafter` that describe it, with its values."""
        return self.config()

    def unfreeze(self) -> None:
        """Let gradients reach every weight that training changes, after the drafter was loaded."""
        self.requires_grad_(True)

    def train_further(self, **options: Any) -> None:
        """Apply the recipe's options to a drafter that was loaded, without changing what it computes."""
        for key in self.training_options:
            if key in options:
                setattr(self, key, options[key])

    def trained_blocks(self) -> list[nn.Module]:
        """Return the blocks whose activations may be recomputed, and which are compiled one by one: the outermost ones.

        Attention with its own cache is no block: recomputing it would append the keys of earlier steps twice.
        """
        blocks = {name: module for name, module in self.named_modules() if isinstance(module, self.block_types)}
        return [block for name, block in blocks.items() if not any(name.startswith(f"{other}.") for other in blocks)]

    def outside_layers(self) -> list[nn.Parameter]:
        """Return the weights that are no matrices of a layer: embeddings and lm_heads, which Muon does not optimize."""
        modules = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        named = [weight for name, weight in self.named_parameters() if "lm_head" in name or "embed" in name]
        return [*named, *(weight for module in modules for weight in module.parameters())]

    def why_undivided(self) -> str | None:
        """Return why processes cannot share a sequence in training, see `TeacherSignals.part`; None if they can."""
        return f"drafter.type={self.type!r}"

    def own_lm_heads(self) -> list[nn.Linear]:
        """Return the lm_head of each draft position that `unroll` reads; none where it is the target's."""
        return []

    def feature_layer(self) -> nn.Linear | None:
        """Return the layer that reads the outputs of the target's layers; None where there is none."""
        return None

    def feature_inputs(self, signals: TeacherSignals) -> Tensor:
        """Return the inputs [n, F] of the feature layer at trained positions, some of them."""
        raise NotImplementedError(f"{self.type} drafters have no feature layer")

    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Change the weights of an untrained drafter by a first batch, see heads/initial_weights.py.

        Where the lm_head is the target's, the drafter then predicts about as well as a constant distribution.
        `frequencies_D`: the probability in the responses of each token of the draft vocabulary; none is zero.
        """

    def start_on_next_states(self, batches: Iterable[TeacherSignals]) -> None:
        """Let an untrained drafter predict the target's next state by a regression on as many batches as it needs."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return plain values from which `from_config` builds the same shapes; stored in the checkpoint."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return an untrained drafter of the stored shapes; its weights are loaded afterwards."""

    @abstractmethod
    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Return teacher-forced states, one entry for each draft position that is trained.

        The number of entries does not depend on the length of the sequences: entries past their end train nothing, but
        sums by position are added over processes and parts of a batch.
        """

    def attach(self, target: PreTrainedModel) -> None:
        """Store references to the modules of `target` that the drafter shares and does not save; called before use."""
