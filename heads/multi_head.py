"""What heads on the target's last final state have in common: Medusa, Hydra and the MLP speculator.

Drafters whose q at a depth does not depend on the tokens before it in the draft: one pass serves the whole tree.

Heads that read the draft tokens before their own: the walk along a tree that Hydra and the MLP speculator share.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import shifted
from draftsmith.heads.base import Context, DraftStates, Needs, TeacherSignals, TrainableDrafter, Tree
from draftsmith.heads.draft_tree import ROOT
from draftsmith.heads.draft_vocab import DraftVocabulary


class PathIndependentDrafter(TrainableDrafter):
    """Answers every node with the logits of its depth."""

    @abstractmethod
    def logits_at(self, depth: int) -> Tensor:
        """[B, V] for the token behind a node at `depth`; `begin` has answered for depth 0."""

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        depths = {tree.depths[node] for tree, wanted in zip(trees, nodes, strict=True) for node in wanted}
        by_depth = {depth: self.logits_at(depth) for depth in depths}
        some = next(iter(by_depth.values()))
        return [
            torch.stack([by_depth[tree.depths[node]][row] for node in wanted]) if wanted else some[:0]
            for row, (tree, wanted) in enumerate(zip(trees, nodes, strict=True))
        ]


# Shapes: B rows, H hidden size, V vocabulary, D draft vocabulary.


def require_states(context: Context, kind: str) -> None:
    """ConfigError where the target shows no final state."""
    if any(text.hidden is None for text in context.texts):
        raise ConfigError(f"target shows no hidden state; expected a transformers model for {kind}")


def last_states(context: Context, dtype: torch.dtype) -> Tensor:
    """[B, H]: the target's final state that each text's last token was predicted from."""
    return torch.stack([text.hidden for text in context.texts]).to(dtype)


class LmHeads(nn.Module):
    """K lm_heads over one vocabulary, the target's or a part of it; `shared`: one matrix serves all."""

    def __init__(
        self, count: int, hidden_size: int, vocab_size: int, draft_vocab_size: int | None, shared: bool
    ) -> None:
        super().__init__()
        rows = draft_vocab_size or vocab_size
        self._matrices = 1 if shared else count
        for k in range(self._matrices):  # so their tensors are lm_heads.0.weight and so on, as other engines have them
            self.add_module(str(k), nn.Linear(hidden_size, rows, bias=False))
        self.vocabulary = None if draft_vocab_size is None else DraftVocabulary(vocab_size, draft_vocab_size)

    @torch.no_grad()
    def copy_from(self, target: nn.Module, draft_vocabulary: list[int] | None) -> None:
        """Begin with the target's lm_head, in the rows of the draft vocabulary."""
        weight_VH = target.get_output_embeddings().weight
        if draft_vocabulary is not None:
            self.choose(draft_vocabulary, weight_VH.shape[0])
            weight_VH = weight_VH[self.vocabulary.tokens_D]
        for k in range(self._matrices):
            self[k].weight.copy_(weight_VH)

    def choose(self, draft_vocabulary: list[int], vocab_size: int) -> None:
        """Rows stand for these tokens."""
        self.vocabulary = DraftVocabulary.of(draft_vocabulary, vocab_size)

    def __getitem__(self, k: int) -> nn.Module:
        """States [n, H] to logits [n, D], for draft position k."""
        return self.get_submodule(str(min(k, self._matrices - 1)))

    def full(self, k: int, states_nH: Tensor) -> Tensor:
        """Logits [n, V], whatever the draft vocabulary."""
        logits_nD = self[k](states_nH)
        return logits_nD if self.vocabulary is None else self.vocabulary.expand(logits_nD)

    @property
    def tokens_D(self) -> Tensor | None:
        """The token of each row; None for the whole vocabulary."""
        return None if self.vocabulary is None else self.vocabulary.tokens_D


def check_heads(num_heads: int, num_layers: int = 1, context: int | None = None) -> None:
    """ConfigError for counts that make no drafter; heads that reach further than the context never learn."""
    if num_heads < 1 or (context is not None and num_heads >= context):
        most = "" if context is None else f" and below the target's context of {context}"
        raise ConfigError.of("drafter.num_heads", num_heads, f">= 1{most}")
    if num_layers < 1:
        raise ConfigError.of("drafter.num_layers", num_layers, ">= 1")


# Shapes: n nodes, B rows, T positions, H hidden size, S size of what a head hands to the next.


class TokenHeads(TrainableDrafter):
    """K heads; head k reads what head k-1 handed on, and the token that was chosen behind it."""

    needs: ClassVar[Needs] = Needs(hidden=True)
    lm_heads: LmHeads
    num_heads: int

    @abstractmethod
    def first(self, hidden_nH: Tensor) -> Tensor:
        """What head 0 reads of the target's final state: [n, S]."""

    @abstractmethod
    def advance(self, k: int, carried_nS: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
        """Head k on what was handed to it and the token behind it: (its state [n, H], what it hands on [n, S'])."""

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.lm_heads.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_heads[0].weight.dtype

    def start(self, context: Context) -> None:
        super().start(context)
        require_states(context, f"{self.type} heads")

    def begin(self, rows: list[int]) -> Tensor:
        tokens_B = [text.tokens[-1] for text in self.context.texts]
        hidden_BH = last_states(self.context, self.dtype)
        state_BH, carried_BS = self.advance(0, self.first(hidden_BH), torch.tensor(tokens_B, device=hidden_BH.device))
        self._carried = [{ROOT: carried_S} for carried_S in carried_BS]
        return self.lm_heads.full(0, state_BH)

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        """Nodes of one depth, over all rows, go through their head together."""
        places = [(row, node) for row, wanted in enumerate(nodes) for node in wanted]
        logits: dict[tuple[int, int], Tensor] = {}
        for depth in sorted({trees[row].depths[node] for row, node in places}):
            some = [(row, node) for row, node in places if trees[row].depths[node] == depth]
            carried_nS = torch.stack([self._carried[row][trees[row].parents[node]] for row, node in some])
            tokens_n = torch.tensor([trees[row].tokens[node] for row, node in some], device=carried_nS.device)
            state_nH, carried_nS = self.advance(depth, carried_nS, tokens_n)
            for (row, node), carried_S in zip(some, carried_nS, strict=True):
                self._carried[row][node] = carried_S
            logits |= dict(zip(some, self.lm_heads.full(depth, state_nH), strict=True))
        none = next(iter(logits.values()))[None][:0]
        return [
            torch.stack([logits[row, node] for node in wanted]) if wanted else none for row, wanted in enumerate(nodes)
        ]

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        carried_BTS = self.first(signals.hidden_BTH.to(self.dtype))
        unrolled = []
        for k in range(self.num_heads):
            state_BTH, carried_BTS = self.advance(k, carried_BTS, shifted(signals.input_ids_BT, k + 1))
            head, tokens_D = self.lm_heads[k], self.lm_heads.tokens_D
            unrolled.append(DraftStates(state_BTH, head, offset=k + 1, vocabulary_D=tokens_D))
        return unrolled

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)

    def _sizes(self, *keys: str) -> dict[str, Any]:
        size = None if self.draft_vocabulary is None else len(self.draft_vocabulary)
        return {**{key: getattr(self, key) for key in keys}, "draft_vocab_size": size}


def target_sizes(target: nn.Module) -> tuple[int, int]:
    """(hidden size, vocabulary) of the target's lm_head."""
    vocab_size, hidden_size = target.get_output_embeddings().weight.shape
    return hidden_size, vocab_size
