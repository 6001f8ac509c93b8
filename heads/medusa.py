"""Medusa heads, and the base classes of drafters with several heads on the target's final hidden state.

    target's state at t ──▶ lm_head        ──▶ token t+1   (the target's own)
                        ├─▶ head 0: h + SiLU(W h) ──▶ linear ──▶ token t+2   (d1)
                        ├─▶ head 1        ──▶ token t+3   (d2)
                        └─▶ head k        ──▶ token t+k+2

No head of Medusa reads draft tokens, so each q depends on the state alone. Cai et al. 2024, arXiv:2401.10774. Medusa-1
keeps the target frozen; Medusa-2 also trains adapters on it (the recipe's section `cotrain`).
"""

from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.base import (
    Context,
    DraftStates,
    Level,
    ModuleTypes,
    Needs,
    TeacherSignals,
    TrainableDrafter,
)
from draftsmith.heads.lm_head import DraftVocabulary, copy_lm_head, lm_head_weight
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.read_positions import ReadPositions

# Shapes: n nodes, B rows, T positions, H hidden size, V vocabulary, D draft vocabulary.


class LmHeads(nn.Module):
    """K lm_heads over the target's vocabulary or a draft vocabulary; with `shared` all use one matrix."""

    def __init__(
        self,
        count: int,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int | None,
        shared: bool,
    ) -> None:
        super().__init__()
        rows = draft_vocab_size or vocab_size
        self._matrices = 1 if shared else count
        for k in range(self._matrices):  # tensors are named lm_heads.0.weight, lm_heads.1.weight, …, as in engines
            self.add_module(str(k), nn.Linear(hidden_size, rows, bias=False))
        self.vocabulary = None if draft_vocab_size is None else DraftVocabulary(vocab_size, draft_vocab_size)

    def copy_from(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Copy the target's lm_head, or its rows of the draft vocabulary, if these heads read states of its size."""
        vocabulary = copy_lm_head(target, [self[k] for k in range(self._matrices)], draft_vocabulary)
        self.vocabulary = self.vocabulary if vocabulary is None else vocabulary

    def __getitem__(self, k: int) -> nn.Linear:
        """Return the lm_head of draft position k: states [n, H] to logits [n, D]."""
        head = self.get_submodule(str(min(k, self._matrices - 1)))
        assert isinstance(head, nn.Linear)
        return head

    def full(self, k: int, states_nH: Tensor) -> Tensor:
        """Return logits [n, V] over the target's vocabulary, for draft position k."""
        logits_nD = self[k](states_nH)
        return logits_nD if self.vocabulary is None else self.vocabulary.expand(logits_nD)


class HeadsDrafter(TrainableDrafter):
    """K heads on the target's final hidden state, with lm_heads of their own."""

    needs: Needs = Needs(hidden=True)
    lm_heads: LmHeads
    num_heads: int
    stored: ClassVar[tuple[str, ...]]
    """Arguments of the constructor that are attributes, too; `config` stores them."""

    @classmethod
    def from_target(cls, target: PreTrainedModel, *, draft_vocabulary: list[int] | None = None, **options: Any) -> Self:
        """Return new heads, whose lm_heads start as copies of the target's if they read states of the same size."""
        vocab_size, hidden_size = lm_head_weight(target).shape
        size = None if draft_vocabulary is None else len(draft_vocabulary)
        for key, limit in (("num_heads", context_limit(target.config)), ("num_layers", None)):
            value = options.get(key, 1)
            if value < 1 or (limit is not None and value >= limit):
                below = "" if limit is None else f" and below the target's context of {limit}"
                raise ConfigError.of(f"drafter.{key}", value, f">= 1{below}")
        drafter = cls(hidden_size=hidden_size, vocab_size=vocab_size, draft_vocab_size=size, **options)
        drafter.lm_heads.copy_from(target, draft_vocabulary)
        drafter.attach(target)
        return drafter

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.lm_heads.vocabulary

    def choose_tokens(self, target: PreTrainedModel, tokens: list[int]) -> None:
        self.lm_heads.copy_from(target, tokens)

    def own_lm_heads(self) -> list[nn.Linear]:
        return [self.lm_heads[k] for k in range(self.num_heads)]

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_heads[0].weight.dtype

    def start(self, context: Context) -> None:
        if context.hidden is None:
            raise ConfigError(f"target provides no hidden states; expected a transformers model for {self.type} heads")
        super().start(context)

    @abstractmethod
    def trained_states(self, states_NH: Tensor, read: ReadPositions) -> list[Tensor]:
        """Return the input [N, H] of each lm_head for the target's states [N, H] after the queries."""

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        read, vocabulary = ReadPositions(signals, self.num_heads), self.draft_vocabulary
        tokens_D = None if vocabulary is None else vocabulary.tokens_D
        states_NH = read.values(signals.hidden_BTH, read.queries_N)[0].to(self.dtype)
        return [
            DraftStates(state_NH, read.towards(k + 1), self.lm_heads[k], vocabulary_D=tokens_D)
            for k, state_NH in enumerate(self.trained_states(states_NH, read))
        ]

    def config(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in (*self.stored, "draft_vocab_size")}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W and b start at zero, so the block starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))


class Medusa(HeadsDrafter):
    """K heads of residual blocks and an lm_head each; with `shared_lm_head` one lm_head for all."""

    type: ClassVar[str] = "medusa"
    block_types: ClassVar[ModuleTypes] = (ResidualBlock,)
    stored: ClassVar[tuple[str, ...]] = ("hidden_size", "vocab_size", "num_heads", "num_layers", "shared_lm_head")

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 3,
        num_layers: int = 1,
        shared_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.shared_lm_head = num_heads, num_layers, shared_lm_head
        self.max_draft_length = num_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.lm_heads = LmHeads(num_heads, hidden_size, vocab_size, draft_vocab_size, shared_lm_head)

    def begin(self, rows: list[int]) -> Tensor:
        assert self.context.hidden is not None, "checked by `start`"
        self._hidden_B1H = self.context.hidden.to(self.dtype)[:, None]
        return self._logits_at(0)

    def extend(self, level: Level) -> Tensor:
        return self._logits_at(level.depth)[:, None].expand(-1, level.tokens_Bn.shape[1], -1)

    def _logits_at(self, depth: int) -> Tensor:
        """Return the logits [B, V] after any node of this depth."""
        return self.lm_heads.full(depth, self.blocks[depth](self._hidden_B1H))[:, 0]

    def trained_states(self, states_NH: Tensor, read: ReadPositions) -> list[Tensor]:
        return [block(states_NH) for block in self.blocks]
