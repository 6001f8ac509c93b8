"""Medusa heads: K small networks on the target's final hidden state; head k predicts the token k + 2 positions ahead.

    target's state at t ──▶ lm_head        ──▶ token t+1   (the target's own)
                        ├─▶ head 0: h + SiLU(W h) ──▶ linear ──▶ token t+2   (d1)
                        ├─▶ head 1        ──▶ token t+3   (d2)
                        └─▶ head k        ──▶ token t+k+2

No head reads draft tokens, so each q depends on the state alone. Cai et al. 2024, arXiv:2401.10774. Medusa-1 keeps the
target frozen; Medusa-2 also trains adapters on it (the recipe's section `cotrain`).
"""

from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.base import DraftStates, ModuleTypes, TeacherSignals
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.multi_head import (
    HeadsDrafter,
    LmHeads,
    PathIndependentDrafter,
    check_heads,
    target_sizes,
)
from draftsmith.heads.read_positions import ReadPositions


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


class Medusa(HeadsDrafter, PathIndependentDrafter):
    """K heads of residual blocks and an lm_head each; with `shared_lm_head` one lm_head for all."""

    type: ClassVar[str] = "medusa"
    block_types: ClassVar[ModuleTypes] = (ResidualBlock,)

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int,
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

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_heads: int = 3,
        num_layers: int = 1,
        shared_lm_head: bool = False,
        draft_vocabulary: list[int] | None = None,
    ) -> Self:
        """Return identity blocks and copies of the target's lm_head: every head starts with the target's prediction."""
        check_heads(num_heads, num_layers, context_limit(target.config))
        hidden_size, vocab_size = target_sizes(target)
        size = None if draft_vocabulary is None else len(draft_vocabulary)
        drafter = cls(hidden_size, vocab_size, num_heads, num_layers, shared_lm_head, size)
        drafter.lm_heads.copy_from(target, draft_vocabulary)
        return drafter

    def config(self) -> dict[str, Any]:
        return self.sizes("hidden_size", "vocab_size", "num_heads", "num_layers", "shared_lm_head")

    def begin(self, rows: list[int]) -> Tensor:
        self._hidden_B1H = self.committed_states(rows)[:, None]
        return self.logits_at(0)

    def logits_at(self, depth: int) -> Tensor:
        return self.lm_heads.full(depth, self.blocks[depth](self._hidden_B1H))[:, 0]

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        read, tokens_D = ReadPositions(signals, self.num_heads), self.lm_heads.tokens_D
        hidden_NH = self.teacher_states(signals, read)  # the heads may be in fp32, and the target in half precision
        return [
            DraftStates(block(hidden_NH), self.lm_heads[k], places_N=read.towards(k + 1), vocabulary_D=tokens_D)
            for k, block in enumerate(self.blocks)
        ]
