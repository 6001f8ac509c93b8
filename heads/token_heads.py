"""Heads that read the draft tokens before their own: the walk along a tree that Hydra and the MLP speculator share."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.heads.draft import ROOT
from draftsmith.heads.drafter import Context, Needs, TeacherSignals, TrainableDrafter, Tree, Unrolled
from draftsmith.heads.recurrent import shifted
from draftsmith.heads.state_heads import LmHeads, last_states, require_states
from draftsmith.heads.vocabulary import DraftVocabulary

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

    def unroll(self, signals: TeacherSignals) -> list[Unrolled]:
        carried_BTS = self.first(signals.hidden_BTH.to(self.dtype))
        unrolled = []
        for k in range(self.num_heads):
            state_BTH, carried_BTS = self.advance(k, carried_BTS, shifted(signals.input_ids_BT, k + 1))
            head, tokens_D = self.lm_heads[k], self.lm_heads.tokens_D
            unrolled.append(Unrolled(state_BTH, head, offset=k + 1, vocabulary_D=tokens_D))
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
