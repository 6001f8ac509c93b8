"""Base classes of drafters with decoder layers: the network, its decoding on trees and the training-time test.

A network reads, for each token, its embedding and a state: of the target, or of the network itself one step earlier.
EAGLE, HASS, EAGLE-3 and MTP feed their own states back; each describes its network in a file of its own.

    target's features  f0   f1   f2                     drafter's states  s3    s4
                        │    │    │                                        │     │
    tokens         x1 ──┤x2 ─┤x3 ─┤ ──▶ s3 ──▶ d1 = x4?   d1 ─────────────┤ d2 ─┤ ──▶ s5 ──▶ d3
                        └────┴────┴── committed: with target features      └─────┴── drafted: with drafter states

Committed tokens are read again with the target's features, so errors of the states do not accumulate over rounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.errors import ConfigError
from draftsmith.heads.base import (
    FINAL,
    Context,
    DraftStates,
    Level,
    ModuleTypes,
    Needs,
    Runner,
    TeacherSignals,
    TrainableDrafter,
    unread,
)
from draftsmith.heads.hidden_states import require_layers
from draftsmith.heads.initial_weights import inputs_of, sampled
from draftsmith.heads.layers import Attend, LayerConfig, Rope, cached_attention, layer_config, ready, rotary, windows_of
from draftsmith.heads.lm_head import DraftVocabulary, copy_lm_head, draft_rows_of, logits_head, weight_of
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.heads.rows import Columns, Rows
from draftsmith.heads.unrolled_attention import UnrolledAttention

# Shapes: B rows, T tokens read, n tokens or nodes, F size of the target's features per position, H hidden size,
# V vocabulary, D draft vocabulary.


@dataclass(eq=False)
class NetworkOutput:
    """Output of a network in decoding."""

    logits: Tensor
    """[B, T, V]"""
    states: Tensor
    """[B, T, H]: input of the next step."""


class DraftNetwork(nn.Module, ABC):
    """A few decoder layers that read the embedding of a token and the state at the token before it."""

    def __init__(self, config: LlamaConfig, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.config = ready(config)
        windows_of(config)  # refuses other kinds of layers
        self.rotary = rotary(config)
        self.vocabulary = None if draft_vocab_size is None else DraftVocabulary(config.vocab_size, draft_vocab_size)
        self.lm_head: nn.Linear | None = None
        """An own lm_head; None: the target's is used, or its rows of the draft vocabulary."""
        self.returns_logits = True
        """Whether `forward` computes logits; otherwise it returns the states in their place."""
        self._shared: tuple[nn.Module, ...] = ()

    def attach(self, target: PreTrainedModel) -> None:
        """Share the target's embeddings and `logits_head`. In a tuple they are neither trained nor saved."""
        self._shared = (target.get_input_embeddings(), logits_head(target))
        self._share_rows()

    def _share_rows(self) -> None:
        """Copy the target's rows of the draft vocabulary, where the network has no lm_head of its own."""
        if self.lm_head is not None or self.vocabulary is None or not self._shared:
            return
        rows = draft_rows_of(self._shared[1], self.vocabulary.tokens_D)
        if rows is None:
            raise ConfigError(
                f"drafter.draft_vocab_size={len(self.vocabulary)} with a target whose lm_head is quantized; "
                "expected an lm_head with plain rows, or no draft vocabulary"
            )
        self._shared = (*self._shared[:2], rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._share_rows()  # the target may have moved, too
        return self

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the target's embeddings [B, T, H] in the network's dtype."""
        return self._shared[0](ids_BT).to(self.dtype)

    def target_head(self, states_nH: Tensor) -> Tensor:
        """Return logits [n, V] of the target's lm_head and the operations after it, [n, D] with a draft vocabulary."""
        head = self._shared[-1]
        return head(states_nH.to(weight_of(head).dtype))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def start_lm_head(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Set the draft vocabulary, and copy the target's lm_head, or its rows of these tokens, into the own one."""
        if self.lm_head is not None:
            chosen = copy_lm_head(target, [self.lm_head], draft_vocabulary)
            self.vocabulary = None if self.vocabulary is None else chosen
        elif draft_vocabulary is not None:
            weight_VH = weight_of(self._shared[1])
            self.vocabulary = DraftVocabulary.of(draft_vocabulary, len(weight_VH)).to(weight_VH.device)
            self._share_rows()

    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Initialise the weights that do not begin random; networks that pass their state through extend it."""
        self.start_lm_head(target, draft_vocabulary)

    def project(self, features_nF: Tensor) -> Tensor:
        """Return the target's features as a state [n, H]."""
        return features_nF

    @abstractmethod
    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        """Run the layers on tokens and the states before them, and return the states [B, T, H] after these tokens.

        `read_Q`: return those of some tokens only; the others are attended to.
        """

    def head(self, states_nH: Tensor) -> Tensor:
        """Return logits [n, V] of states that `step` returned, or [n, D] over the draft vocabulary."""
        return self.target_head(states_nH) if self.lm_head is None else self.lm_head(states_nH)

    def head_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters of `head`; none where it is the target's."""
        return () if self.lm_head is None else tuple(self.lm_head.parameters())

    def full_head(self, states_nH: Tensor) -> Tensor:
        """Return logits [n, V] over the target's vocabulary, with or without a draft vocabulary."""
        logits_nD = self.head(states_nH)
        return logits_nD if self.vocabulary is None else self.vocabulary.expand(logits_nD)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None,
        past_key_values: Any,
        use_cache: bool = True,
        columns: Columns | None = None,
    ) -> NetworkOutput:
        """Run like a transformers LM, on its cache; `features` are the states [B, T, H] before each token.

        `columns`: the only positions of each row whose output is needed.
        """
        embeds_BTH = self.embed(input_ids)
        rope = self.rotary(embeds_BTH, position_ids)
        attend = cached_attention(past_key_values, attention_mask, getattr(self.config, "layer_types", None) or ())
        states_BTH = self.step(embeds_BTH, features.to(self.dtype), rope, attend)
        if columns is not None:
            states_BTH = columns.of(states_BTH)
        return NetworkOutput(self.full_head(states_BTH) if self.returns_logits else states_BTH, states_BTH)


Network = TypeVar("Network", bound=DraftNetwork)


# Shapes: B rows, T positions, X positions of the first step, n nodes, H hidden size.


class NetworkDrafter(TrainableDrafter, Generic[Network]):
    """A drafter with a network, `body`, that reads features of the target's `layers`."""

    needs: Needs = Needs(layers=(FINAL,))
    block_types: ClassVar[ModuleTypes] = (LlamaMLP,)
    regresses: ClassVar[bool] = False
    """States predict the target's final hidden state."""
    _runner: Runner

    def __init__(self, body: Network, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.needs = Needs(layers=layers)
        self.vocab_size, self.context_limit = body.config.vocab_size, context_limit(body.config)

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_hidden_layers: int = 1,
        intermediate_size: int | None = None,
        window: int | None = None,
        layers: list[int] | None = None,
        draft_vocabulary: list[int] | None = None,
        **options: Any,
    ) -> Self:
        """Return layers of the target's width, initialised from the target, see `DraftNetwork.start_from_target`."""
        body = layer_config(target, num_hidden_layers, window=window, intermediate_size=intermediate_size)
        features = cls.default_layers(target) if layers is None else tuple(layers)
        return cls.on_target(target, body, draft_vocabulary, layers=features, **options)

    @classmethod
    def on_target(
        cls, target: PreTrainedModel, body: LlamaConfig, draft_vocabulary: list[int] | None = None, **options: Any
    ) -> Self:
        """Return a drafter with layers of the config `body`, attached to the target and initialised from it."""
        size = None if draft_vocabulary is None else len(draft_vocabulary)
        drafter = cls(body, draft_vocab_size=size, **options)  # pyright: ignore[reportCallIssue]  # of each subclass
        drafter.attach(target)
        drafter.body.start_from_target(target, draft_vocabulary)
        return drafter

    @classmethod
    def default_layers(cls, target: PreTrainedModel) -> tuple[int, ...]:
        """Return the target's layers whose features a new drafter reads."""
        return (FINAL,)

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of draft positions that are trained."""

    def attach(self, target: PreTrainedModel) -> None:
        require_layers(target, self.needs.layers)
        self.body.attach(target)

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.body.vocabulary

    def choose_tokens(self, target: PreTrainedModel, tokens: list[int]) -> None:
        self.body.start_lm_head(target, tokens)

    def own_lm_heads(self) -> list[nn.Linear]:
        return [] if self.body.lm_head is None else [self.body.lm_head] * self.steps

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)

    def feature_inputs(self, signals: TeacherSignals) -> Tensor:
        """Return the inputs [n, F] of the feature layer at trained positions, sampled."""
        layer = self.feature_layer()
        assert layer is not None, "`input_scales` asks drafters that have one"
        assert signals.features_BTF is not None, "the drafter's needs name layers"
        features_nF = sampled(signals.features_BTF[signals.mask_BT])
        return inputs_of(layer, lambda: self.body.project(features_nF.to(self.body.dtype)))

    def config(self) -> dict[str, Any]:
        return {"body": self.body.config.to_diff_dict(), "layers": list(self.needs.layers), **self.options()}

    def section(self) -> dict[str, Any]:
        body, own = self.body.config, self.config()
        own |= {key: getattr(body, key, None) for key in ("num_hidden_layers", "intermediate_size")}
        if body.model_type == "llama":  # the only one with the option
            windows = windows_of(body)
            own["window"] = windows[0] if len({*windows}) == 1 else windows
        return own

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_config` other than the network's config and the layers."""

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Return the states of the training-time test: step k reads those of step k - 1, as in decoding."""
        body, read = self.body, ReadPositions(signals, self.steps, signals.part)
        assert signals.features_BTF is not None, "the drafter's needs name layers"
        states_1XH = self._teacher_states(read.values(signals.features_BTF, read.first_X))
        tokens = None if body.vocabulary is None else body.vocabulary.tokens_D
        attend, unrolled = UnrolledAttention(read, windows_of(body.config)), []
        for k in range(self.steps):
            indices_X = read.queries_N if k else read.first_X
            embeds_1XH, states_1XH = self._inputs(k, read.tokens(indices_X, k + 1), states_1XH)
            rope = body.rotary(embeds_1XH, read.positions(indices_X) + k)
            states_1XH = body.step(embeds_1XH, states_1XH, rope, attend, None if k else read.among_N)
            unrolled.append(
                DraftStates(
                    states_1XH[0],
                    read.towards(k + 1),
                    body.head,
                    vocabulary_D=tokens,
                    regresses=self.regresses,
                    head_parameters=self._head_parameters(),
                )
            )
        return unrolled

    def _teacher_states(self, features_1XF: Tensor) -> Tensor:
        """Return the target's features as states [1, X, H], which the first step reads."""
        return self.body.project(features_1XF.to(self.body.dtype))

    def _inputs(self, k: int, tokens_1X: Tensor, states_1XH: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and states that step k reads, from the true tokens and the states of the step before."""
        return self.body.embed(tokens_1X), states_1XH

    def _head_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the trainable parameters between states and logits that belong to no module."""
        return self.body.head_parameters()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "body": LayerConfig(**config["body"]), "layers": tuple(config["layers"])})


class AutoregressiveDrafter(NetworkDrafter[Network]):
    """Runs its network step by step, on text and on draft trees."""

    training_options: ClassVar[tuple[str, ...]] = ("train_steps",)
    divides_texts: ClassVar[bool] = False
    """Processes may share each sequence in training."""

    def __init__(self, body: Network, layers: tuple[int, ...], train_steps: int) -> None:
        super().__init__(body, layers)
        if train_steps < 1:
            raise ConfigError.of("drafter.train_steps", train_steps, ">= 1")
        self.train_steps = train_steps

    @property
    def steps(self) -> int:
        return self.train_steps

    def start(self, context: Context) -> None:
        super().start(context)
        self._runner = self._new_runner(context)
        self._read([sequence.tokens[1:] for sequence in context.sequences])

    def _new_runner(self, context: Context) -> Runner:
        """Return the runner that reads the sequences and their drafts."""
        return context.runner(self.body)

    def begin(self, rows: list[int]) -> Tensor:
        tokens = unread(self.context, rows, self._runner, first=1)
        if any(tokens):  # not in the first round, whose logits follow from the pass over the prompt
            self._read(tokens)
        self._states_BnH = self._runner.states[:, None]
        return self._logits_BV

    def _read(self, tokens: list[list[int]]) -> None:
        """Read committed tokens, each with the features of the token before it."""
        rows = Rows(tokens, next(self.body.parameters()).device)
        features_BTF = self.context.take_features(rows.counts)
        self._logits_BV = self._runner.append(rows, self.body.project(features_BTF.to(self.body.dtype)))

    def extend(self, level: Level) -> Tensor:
        logits_BnV = self._runner.extend(level, level.of_parents(self._states_BnH))
        self._states_BnH = self._runner.states
        return logits_BnV

    def rollback(self, slots: Sequence[list[int]]) -> None:
        self._runner.commit([[] for _ in slots])

    def why_undivided(self) -> str | None:
        if not self.divides_texts:
            return super().why_undivided()
        windows = windows_of(self.body.config)
        return "a sliding window" if any(window is not None for window in windows) else None

    def options(self) -> dict[str, Any]:
        return {"train_steps": self.train_steps, "draft_vocab_size": self.draft_vocab_size}
