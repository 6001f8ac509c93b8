"""MLP speculator: a small recurrent state, initially the target's, updated with one draft token per step.

    final state of t ──▶ norm ──▶ z0 ─▶ [ z ← GELU(norm(a·P z + b·E x)) ] ─▶ … one step per draft token
                                            ▲                  │
                              embedding of t+1, d1, d2 …       └──▶ lm_head ──▶ token t+2, t+3, …

With tied weights all positions share one step. IBM's published speculators (`fms`, for foundation-model-stack) have
norms that do not subtract the mean and, with tied weights, a projection of the target's state that is not shared.
Wertheimer et al. 2024, arXiv:2404.19124.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from draftsmith.heads.base import ModuleTypes
from draftsmith.heads.medusa import LmHeads, TokenHeads

STATE_SHARE = 0.5
"""Share of the last state's variance that comes from the initial state (section 3)."""

# Shapes: n nodes, H hidden size of the target, S size of the speculator's state.


class UncentredNorm(nn.LayerNorm):
    """LayerNorm that does not subtract the mean, as in foundation-model-stack."""

    def __init__(self, size: int, *, elementwise_affine: bool = True) -> None:
        super().__init__(size, eps=1e-6, elementwise_affine=elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:
        scaled = nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return scaled if self.bias is None else scaled + self.bias


class SpeculatorStep(nn.Module):
    """z ← GELU(norm(a·P z + b·E x)), with a² + b²·2/size = 1, since embeddings are smaller than states.

    With `fms` the sum is divided by a, which matters to the norm's epsilon only.
    """

    def __init__(self, input_size: int, size: int, vocab_size: int, state_weight: float, fms: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, size)
        self.projection = nn.Linear(input_size, size, bias=False)
        self.norm = UncentredNorm(size) if fms else nn.LayerNorm(size)
        token_weight = math.sqrt((1 - state_weight**2) * size / 2)  # embeddings are small: std 1/sqrt(size)
        self.state_weight, self.token_weight = (
            (1.0, token_weight / state_weight) if fms else (state_weight, token_weight)
        )
        nn.init.normal_(self.embedding.weight, std=size**-0.5)
        nn.init.normal_(self.projection.weight, std=size**-0.5)

    def forward(self, state_nS: Tensor, tokens_n: Tensor, projection: nn.Linear | None = None) -> Tensor:
        """Return the next state [n, S]; `projection` replaces the step's own."""
        projected_nS = (self.projection if projection is None else projection)(state_nS)
        mixed_nS = self.state_weight * projected_nS + self.token_weight * self.embedding(tokens_n)
        return nn.functional.gelu(self.norm(mixed_nS))


class MlpSpeculator(TokenHeads):
    """Recurrent steps with their own embeddings; with `tie_weights` steps of equal input size are one module."""

    type: ClassVar[str] = "mlp_speculator"
    block_types: ClassVar[ModuleTypes] = (SpeculatorStep,)
    stored: ClassVar[tuple[str, ...]] = ("hidden_size", "inner_size", "vocab_size", "num_heads", "tie_weights")
    stored += ("fms", "scale_input")

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 3,
        inner_size: int | None = None,
        tie_weights: bool = True,
        draft_vocab_size: int | None = None,
        *,
        fms: bool = False,
        scale_input: bool = True,
    ) -> None:
        super().__init__()
        inner_size = inner_size or hidden_size
        self.hidden_size, self.inner_size, self.vocab_size = hidden_size, inner_size, vocab_size
        self.num_heads, self.tie_weights, self.fms, self.scale_input = num_heads, tie_weights, fms, scale_input
        self.max_draft_length = num_heads
        weight = STATE_SHARE ** (0.5 / num_heads)
        self.scale = (UncentredNorm if fms else nn.LayerNorm)(hidden_size, elementwise_affine=False)
        # With tied weights the first step is separate only where the target's state has another size.
        apart = hidden_size != inner_size and not fms
        count = num_heads if not tie_weights else min(num_heads, 1 + apart)
        first = inner_size if fms and tie_weights else hidden_size
        self.steps = nn.ModuleList(
            SpeculatorStep(first if k == 0 else inner_size, inner_size, vocab_size, weight, fms) for k in range(count)
        )
        self.first_projection = nn.Linear(hidden_size, inner_size, bias=False) if fms and tie_weights else None
        self.lm_heads = LmHeads(num_heads, inner_size, vocab_size, draft_vocab_size, tie_weights)

    def first(self, hidden_nH: Tensor) -> Tensor:
        return self.scale(hidden_nH) / math.sqrt(2) if self.scale_input else hidden_nH

    def advance(self, k: int, carried_nS: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        projection = self.first_projection if k == 0 else None
        state_nS = self.steps[min(k, len(self.steps) - 1)](carried_nS, tokens_n, projection)
        return state_nS, state_nS
