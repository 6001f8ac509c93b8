"""What heads on the target's last final state have in common: Medusa, Hydra and the MLP speculator."""

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import Context
from draftsmith.heads.vocabulary import DraftVocabulary

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
