"""Medusa heads: K small networks on the target's final hidden state, each predicting one token further ahead.

    target's state at t ──▶ lm_head        ──▶ token t+1   (the target's own)
                        ├─▶ head 0: h + SiLU(W h) ──▶ linear ──▶ token t+2   (d1)
                        ├─▶ head 1        ──▶ token t+3   (d2)
                        └─▶ head k        ──▶ token t+k+2

No head sees the tokens before its own, so each q depends on the state alone. Cai et al. 2024, arXiv:2401.10774.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import Context, Needs, TeacherSignals, TrainableDrafter, Tree, Unrolled


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first because W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))


class Medusa(TrainableDrafter):
    """Medusa-1: the heads are trained, the target stays frozen."""

    type: ClassVar[str] = "medusa"
    needs: ClassVar[Needs] = Needs(hidden=True)

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers
        self.max_draft_length = num_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    @classmethod
    def from_target(cls, target: nn.Module, *, num_heads: int = 3, num_layers: int = 1) -> Self:
        """Identity blocks and copies of the target's lm_head: at first every head predicts what the target does."""
        if num_heads < 1:
            raise ConfigError.of("drafter.num_heads", num_heads, ">= 1")
        if num_layers < 1:
            raise ConfigError.of("drafter.num_layers", num_layers, ">= 1")
        weight_VH = target.get_output_embeddings().weight
        drafter = cls(weight_VH.shape[1], weight_VH.shape[0], num_heads, num_layers)
        with torch.no_grad():
            for head in drafter.lm_heads:
                head.weight.copy_(weight_VH)
        return drafter

    def config(self) -> dict[str, Any]:
        keys = ("hidden_size", "vocab_size", "num_heads", "num_layers")
        return {key: getattr(self, key) for key in keys}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)

    def start(self, context: Context) -> None:
        super().start(context)
        if any(text.hidden is None for text in context.texts):
            raise ConfigError("target shows no hidden state; expected a transformers model for Medusa heads")

    def begin(self, rows: list[int]) -> Tensor:
        dtype = self.lm_heads[0].weight.dtype
        self._hidden_BH = torch.stack([text.hidden for text in self.context.texts]).to(dtype)
        return self._logits(0)

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        depths = {tree.depths[node] for tree, wanted in zip(trees, nodes, strict=True) for node in wanted}
        by_depth = {depth: self._logits(depth) for depth in depths}
        return [
            torch.stack([by_depth[tree.depths[node]][row] for node in wanted]) if wanted else self._hidden_BH[:0]
            for row, (tree, wanted) in enumerate(zip(trees, nodes, strict=True))
        ]

    def _logits(self, head: int) -> Tensor:
        """[B, V] of one head: what stands `head` tokens behind the first draft token."""
        return self.lm_heads[head](self.blocks[head](self._hidden_BH))

    def unroll(self, signals: TeacherSignals) -> list[Unrolled]:
        # A target in half precision may train heads that are kept in fp32.
        hidden_BTH = signals.hidden_BTH.to(self.lm_heads[0].weight.dtype)
        return [
            Unrolled(block(hidden_BTH), head, offset=k + 1)
            for k, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True))
        ]
