"""Hydra heads: like Medusa's, but each also reads the embeddings of the draft tokens before its own.

    final state of t ─┬─▶ head 0 ◀── embedding of t+1                       ──▶ token t+2   (d1)
                      ├─▶ head 1 ◀── embeddings of t+1, d1                  ──▶ token t+3   (d2)
                      └─▶ head k ◀── embeddings of t+1, d1 … dk             ──▶ token t+k+2

The probabilities of a draft token depend on its whole path. Ankner et al. 2024, arXiv:2402.05109.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.medusa import ResidualBlock
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.multi_head import LmHeads, TokenHeads, check_heads, target_sizes

# Shapes: n nodes, H hidden size, E size of the embeddings, S = H + kE size of the carried state of head k.


class HydraHead(nn.Module):
    """Linear on [state; embeddings], added to the state, then residual blocks."""

    def __init__(self, hidden_size: int, embedding_size: int, tokens: int, num_layers: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden_size + tokens * embedding_size, hidden_size)
        self.activation = nn.SiLU()
        self.blocks = nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers - 1)))
        self.hidden_size = hidden_size

    def forward(self, carried_nS: Tensor) -> Tensor:
        state_nH = carried_nS[..., : self.hidden_size]
        return self.blocks(state_nH + self.activation(self.mix(carried_nS)))


class Hydra(TokenHeads):
    """K sequentially dependent heads with the target's embeddings and their own lm_heads."""

    type: ClassVar[str] = "hydra"

    def __init__(
        self,
        hidden_size: int,
        embedding_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int,
        shared_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.embedding_size, self.vocab_size = hidden_size, embedding_size, vocab_size
        self.num_heads, self.num_layers, self.shared_lm_head = num_heads, num_layers, shared_lm_head
        self.max_draft_length = num_heads
        self.heads = nn.ModuleList(HydraHead(hidden_size, embedding_size, k + 1, num_layers) for k in range(num_heads))
        self.lm_heads = LmHeads(num_heads, hidden_size, vocab_size, draft_vocab_size, shared_lm_head)
        self._embeddings: tuple[nn.Module, ...] = ()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        shared_lm_head: bool = False,
        draft_vocabulary: list[int] | None = None,
    ) -> Self:
        """Return heads with copies of the target's lm_head; their addition to the state is small at first."""
        check_heads(num_heads, num_layers, context_limit(target.config))
        hidden_size, vocab_size = target_sizes(target)
        width = weight_of(target.get_input_embeddings()).shape[1]
        size = None if draft_vocabulary is None else len(draft_vocabulary)
        drafter = cls(hidden_size, width, vocab_size, num_heads, num_layers, shared_lm_head, size)
        drafter.lm_heads.copy_from(target, draft_vocabulary)
        drafter.attach(target)
        return drafter

    def attach(self, target: PreTrainedModel) -> None:
        # Modules in a tuple are not registered: the target's embeddings are neither trained nor saved.
        self._embeddings = (target.get_input_embeddings(),)

    def config(self) -> dict[str, Any]:
        return self._sizes("hidden_size", "embedding_size", "vocab_size", "num_heads", "num_layers", "shared_lm_head")

    def first(self, hidden_nH: Tensor) -> Tensor:
        return hidden_nH

    def advance(self, k: int, carried_nS: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        carried_nS = torch.cat([carried_nS, self._embeddings[0](tokens_n).to(carried_nS.dtype)], -1)
        return self.heads[k](carried_nS), carried_nS
