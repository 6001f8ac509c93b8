"""Base classes of drafters with several heads on the target's final hidden state: Medusa, Hydra, MLP speculator.

`HeadsDrafter`: their states and lm_heads. `TokenHeads`: head k also reads the draft tokens before its own.
`PathIndependentDrafter`: the probabilities at a depth do not depend on the draft tokens before it, so one pass serves
the whole tree.
"""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.base import Context, DraftStates, Level, Needs, TeacherSignals, TrainableDrafter
from draftsmith.heads.lm_head import DraftVocabulary, scaled_weight, weight_of
from draftsmith.heads.read_positions import ReadPositions

# Shapes: B rows, H hidden size, V vocabulary, D draft vocabulary.


class LmHeads(nn.Module):
    """K lm_heads over the target's vocabulary or a draft vocabulary; with `shared` all use one matrix."""

    def __init__(
        self,
        count: int,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int | None,
        shared: bool,
        bias: bool = False,
    ) -> None:
        super().__init__()
        rows = draft_vocab_size or vocab_size
        self._matrices = 1 if shared else count
        for k in range(
            self._matrices
        ):  # tensors are named lm_heads.0.weight, lm_heads.1.weight, …, as in other engines
            self.add_module(str(k), nn.Linear(hidden_size, rows, bias=bias))
        self.vocabulary = None if draft_vocab_size is None else DraftVocabulary(vocab_size, draft_vocab_size)

    @torch.no_grad()
    def copy_from(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """Copy the target's lm_head, or its rows of the draft vocabulary, with the target's scale of logits."""
        weight_VH = scaled_weight(target)
        if draft_vocabulary is not None:
            tokens_D = self.choose(draft_vocabulary, weight_VH.shape[0]).tokens_D
            weight_VH = weight_VH[tokens_D.to(weight_VH.device)]
        for k in range(self._matrices):
            self[k].weight.copy_(weight_VH)
            if self[k].bias is not None:
                self[k].bias.zero_()

    def choose(self, draft_vocabulary: list[int], vocab_size: int) -> DraftVocabulary:
        """Set the tokens of the rows and return them as a vocabulary."""
        self.vocabulary = DraftVocabulary.of(draft_vocabulary, vocab_size).to(self[0].weight.device)
        return self.vocabulary

    def __getitem__(self, k: int) -> nn.Linear:
        """Return the lm_head of draft position k: states [n, H] to logits [n, D]."""
        head = self.get_submodule(str(min(k, self._matrices - 1)))
        assert isinstance(head, nn.Linear)
        return head

    def full(self, k: int, states_nH: Tensor) -> Tensor:
        """Return logits [n, V] over the target's vocabulary, for draft position k."""
        logits_nD = self[k](states_nH)
        return logits_nD if self.vocabulary is None else self.vocabulary.expand(logits_nD)

    @property
    def tokens_D(self) -> Tensor | None:
        """The token of each row [D]; None for the whole vocabulary."""
        return None if self.vocabulary is None else self.vocabulary.tokens_D


def check_heads(num_heads: int, num_layers: int = 1, context: int | None = None) -> None:
    """Raise ConfigError for counts below 1, or for as many heads as the context has tokens or more."""
    if num_heads < 1 or (context is not None and num_heads >= context):
        most = "" if context is None else f" and below the target's context of {context}"
        raise ConfigError.of("drafter.num_heads", num_heads, f">= 1{most}")
    if num_layers < 1:
        raise ConfigError.of("drafter.num_layers", num_layers, ">= 1")


# Shapes: n nodes, B rows, T positions, H hidden size, S size of the carried state of a head.


class HeadsDrafter(TrainableDrafter):
    """K heads on the target's final hidden state, with lm_heads of their own."""

    needs: Needs = Needs(hidden=True)
    lm_heads: LmHeads
    num_heads: int

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

    def committed_states(self, rows: list[int]) -> Tensor:
        """Return the states [B, H] after the second to last committed tokens; rows other than `rows` are undefined."""
        assert self.context.hidden is not None, "checked by `start`"
        return self.context.hidden.to(self.dtype)

    def teacher_states(self, signals: TeacherSignals, read: ReadPositions) -> Tensor:
        """Return the states [N, H] that `committed_states` returns in decoding, at the queries' places."""
        return read.values(signals.hidden_BTH, read.queries_N)[0].to(self.dtype)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)

    def sizes(self, *keys: str) -> dict[str, Any]:
        """Return these attributes and the size of the draft vocabulary, for `config`."""
        size = None if self.draft_vocabulary is None else len(self.draft_vocabulary)
        return {**{key: getattr(self, key) for key in keys}, "draft_vocab_size": size}


class TokenHeads(HeadsDrafter):
    """K heads; head k reads the carried state of head k - 1 and the token that was drafted after it."""

    @abstractmethod
    def first(self, hidden_nH: Tensor) -> Tensor:
        """Return the carried state [n, S] of the states [n, H] after committed tokens, which head 0 reads."""

    @abstractmethod
    def advance(self, k: int, carried_nS: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        """Run head k on a carried state and the token after it: (its state [n, H], its carried state [n, S'])."""

    def begin(self, rows: list[int]) -> Tensor:
        self._carried_BnS = self.first(self.committed_states(rows))[:, None]
        return self._logits(self.context.last_tokens_B1, 0)[:, 0]

    def extend(self, level: Level) -> Tensor:
        self._carried_BnS = level.of_parents(self._carried_BnS)
        return self._logits(level.tokens_Bn, level.depth)

    def _logits(self, tokens_Bn: Tensor, depth: int) -> Tensor:
        """Run the head of this depth on nodes and return the logits [B, n, V] after them."""
        state_BnH, self._carried_BnS = self.advance(depth, self._carried_BnS, tokens_Bn)
        return self.lm_heads.full(depth, state_BnH)

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        read = ReadPositions(signals, self.num_heads)
        carried_NS = self.first(self.teacher_states(signals, read))
        unrolled = []
        for k in range(self.num_heads):
            state_NH, carried_NS = self.advance(k, carried_NS, read.tokens(read.queries_N, k + 1)[0])
            head, tokens_D = self.lm_heads[k], self.lm_heads.tokens_D
            unrolled.append(DraftStates(state_NH, head, places_N=read.towards(k + 1), vocabulary_D=tokens_D))
        return unrolled


class PathIndependentDrafter(TrainableDrafter):
    """A drafter whose logits at a node depend on the depth of the node alone."""

    @abstractmethod
    def logits_at(self, depth: int) -> Tensor:
        """Return logits [B, V] for the token after a node at `depth`; depth 0 is the last committed token."""

    def extend(self, level: Level) -> Tensor:
        return self.logits_at(level.depth)[:, None].expand(-1, level.tokens_Bn.shape[1], -1)


def target_sizes(target: PreTrainedModel) -> tuple[int, int]:
    """Return (hidden size, vocabulary size) of the target's lm_head."""
    vocab_size, hidden_size = weight_of(target.get_output_embeddings()).shape
    return hidden_size, vocab_size
