"""Hydra heads: like Medusa's, but each also reads the embeddings of the draft tokens before its own.

    final state of t ─┬─▶ head 0 ◀── embedding of t+1                       ──▶ token t+2   (d1)
                      ├─▶ head 1 ◀── embeddings of t+1, d1                  ──▶ token t+3   (d2)
                      └─▶ head k ◀── embeddings of t+1, d1 … dk             ──▶ token t+k+2

The probabilities of a draft token depend on its whole path. With `prefix_layer` (Hydra++) the heads read the output of
a decoder layer over the final states of all committed tokens. Ankner et al. 2024, arXiv:2402.05109.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.heads.autoregressive import DraftNetwork
from draftsmith.heads.base import FINAL, Context, ModuleTypes, Needs, TeacherSignals, unread
from draftsmith.heads.initial_weights import silence
from draftsmith.heads.layers import Attend, DecoderLayer, LayerConfig, Rope, layer_config, norm
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.medusa import SIZES, LmHeads, ResidualBlock, TokenHeads
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.heads.rows import Rows
from draftsmith.heads.unrolled_attention import UnrolledAttention

# Shapes: n nodes, B rows, T positions, H hidden size, E size of the embeddings, S = H + kE size of the carried state of
# head k.


class HydraHead(nn.Module):
    """Linear on [state; embeddings], added to the state, then residual blocks.

    With `original` it is added to a linear map of [state; embeddings], and one block is applied repeatedly.
    """

    def __init__(self, hidden_size: int, embedding_size: int, tokens: int, num_layers: int, original: bool) -> None:
        super().__init__()
        size, blocks = hidden_size + tokens * embedding_size, num_layers - 1
        self.mix = nn.Linear(size, hidden_size)
        self.residual = nn.Linear(size, hidden_size) if original else None
        if self.residual is not None:  # starts as the state
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)
        self.activation = nn.SiLU()
        self.repeats = blocks if original else 1
        self.blocks = nn.Sequential(
            *(ResidualBlock(hidden_size) for _ in range(min(blocks, 1) if original else blocks))
        )
        self.hidden_size = hidden_size

    def forward(self, carried_nS: Tensor) -> Tensor:
        state_nH = carried_nS[..., : self.hidden_size] if self.residual is None else self.residual(carried_nS)
        state_nH = state_nH + self.activation(self.mix(carried_nS))
        for _ in range(self.repeats):
            state_nH = self.blocks(state_nH)
        return state_nH


class PrefixNetwork(DraftNetwork):
    """A decoder layer and a norm on the target's final states; tokens are not read."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layer, self.norm = DecoderLayer(config, 0), norm(config)

    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        return self.norm(self.layer(states_BTH, rope, attend, read_Q))

    def head(self, states_nH: Tensor) -> Tensor:
        """Return the states: they are the output."""
        return states_nH


class Hydra(TokenHeads):
    """K sequentially dependent heads with the target's embeddings and their own lm_heads."""

    type: ClassVar[str] = "hydra"
    block_types: ClassVar[ModuleTypes] = (HydraHead, LlamaMLP)
    stored: ClassVar[tuple[str, ...]] = (*SIZES, "embedding_size", "original")

    def __init__(
        self,
        hidden_size: int,
        embedding_size: int,
        vocab_size: int,
        num_heads: int = 4,
        num_layers: int = 1,
        shared_lm_head: bool = False,
        draft_vocab_size: int | None = None,
        *,
        original: bool = False,
        prefix: LlamaConfig | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.embedding_size, self.vocab_size = hidden_size, embedding_size, vocab_size
        self.num_heads, self.num_layers, self.shared_lm_head = num_heads, num_layers, shared_lm_head
        self.original = original
        self.max_draft_length = num_heads
        self.heads = nn.ModuleList(
            HydraHead(hidden_size, embedding_size, k + 1, num_layers, original) for k in range(num_heads)
        )
        self.lm_heads = LmHeads(num_heads, hidden_size, vocab_size, draft_vocab_size, shared_lm_head, bias=original)
        self.prefix = None if prefix is None else PrefixNetwork(prefix)
        if prefix is not None:
            self.needs = Needs(hidden=True, layers=(FINAL,))
            self.context_limit = context_limit(prefix)
        self._embeddings: tuple[nn.Module, ...] = ()

    @classmethod
    def from_target(cls, target: PreTrainedModel, *, prefix_layer: bool = False, **options: Any) -> Self:
        """Return heads with copies of the target's lm_head; their addition to the state is small at first."""
        width = weight_of(target.get_input_embeddings()).shape[1]
        prefix = layer_config(target, 1) if prefix_layer else None
        return super().from_target(target, embedding_size=width, prefix=prefix, **options)

    def attach(self, target: PreTrainedModel) -> None:
        # Modules in a tuple are not registered: the target's embeddings are neither trained nor saved.
        self._embeddings = (target.get_input_embeddings(),)
        if self.prefix is not None:
            self.prefix.attach(target)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "prefix": None if self.prefix is None else self.prefix.config.to_diff_dict()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        prefix = config.get("prefix")
        return cls(**{**config, "prefix": None if prefix is None else LayerConfig(**prefix)})

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Begin as Medusa's heads do: what is added to the target's state starts at zero."""
        for head in self.heads:
            assert isinstance(head, HydraHead)
            nn.init.zeros_(head.mix.weight)
            nn.init.zeros_(head.mix.bias)
        if self.prefix is not None:
            silence(self.prefix)

    def start(self, context: Context) -> None:
        super().start(context)
        if self.prefix is not None:
            self._runner = context.runner(self.prefix)
            self._read([text.tokens[:-1] for text in context.texts])

    def committed_states(self, rows: list[int]) -> Tensor:
        if self.prefix is None:
            return super().committed_states(rows)
        tokens = [row[:-1] for row in unread(self.context, rows, self._runner)]
        if any(tokens):  # not in the first round
            self._read(tokens)
        return self._states_BH

    def _read(self, tokens: list[list[int]]) -> None:
        """Read the final states of committed tokens, and keep the prefix layer's states after the last ones."""
        rows = Rows(tokens, next(self.parameters()).device)
        features_BTH = self.context.take_features(rows.counts)
        self._states_BH = self._runner.append(rows, features_BTH.to(self.dtype))

    def drop(self, rows: list[int]) -> None:
        if self.prefix is not None:
            self._runner.drop(rows)

    def teacher_states(self, signals: TeacherSignals, read: ReadPositions) -> Tensor:
        if self.prefix is None:
            return super().teacher_states(signals, read)
        states_1XH = read.values(signals.hidden_BTH, read.first_X).to(self.dtype)
        rope = self.prefix.rotary(states_1XH, read.positions(read.first_X))
        return self.prefix.step(states_1XH, states_1XH, rope, UnrolledAttention(read, [None]), read.among_N)[0]

    def advance(self, k: int, carried_nS: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        carried_nS = torch.cat([carried_nS, self._embeddings[0](tokens_n).to(carried_nS.dtype)], -1)
        return self.heads[k](carried_nS), carried_nS
