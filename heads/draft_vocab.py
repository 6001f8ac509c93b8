"""Draft vocabulary: the D tokens of a drafter's lm_head, a subset of the target's V tokens.

Tokens outside it have a draft probability of exactly zero, so they are never drafted and decoding stays lossless.
"""

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint


class DraftVocabulary(nn.Module):
    """Map between rows of the lm_head and tokens of the target; stored with the weights."""

    d2t: Tensor
    """[D] int64: token = row + d2t[row]."""
    t2d: Tensor
    """[V] bool: the tokens that have a row."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    @classmethod
    def of(cls, tokens: list[int], vocab_size: int) -> "DraftVocabulary":
        """Return the vocabulary of these distinct tokens."""
        if not tokens or len(set(tokens)) < len(tokens) or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ConfigError(f"draft vocabulary of {len(tokens)} tokens; expected distinct ids below {vocab_size}")
        vocabulary = cls(vocab_size, len(tokens))
        ids_D = torch.tensor(sorted(tokens))
        vocabulary.d2t.copy_(ids_D - torch.arange(len(tokens)))
        vocabulary.t2d[ids_D] = True
        return vocabulary

    def __len__(self) -> int:
        return self.d2t.shape[0]

    @property
    def tokens_D(self) -> Tensor:
        """The token of each row, [D]."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def expand(self, logits_nD: Tensor) -> Tensor:
        """Return logits [..., V] over the target's vocabulary: -inf for tokens without a row."""
        logits_nV = logits_nD.new_full((*logits_nD.shape[:-1], self.t2d.shape[0]), -torch.inf)
        logits_nV[..., self.tokens_D] = logits_nD
        return logits_nV

    def fingerprint(self) -> str:
        """Return a hash of the tokens."""
        return fingerprint(self.tokens_D.tolist())

    def require_consistent(self, name: object) -> None:
        """Raise ConfigError unless `d2t` and `t2d` describe the same tokens."""
        tokens_D, named = self.tokens_D, self.t2d.nonzero()[:, 0]
        if not torch.equal(named, tokens_D) and torch.equal(named, self.d2t):
            raise ConfigError(f"drafter={name}: d2t holds the tokens themselves; expected offsets (token - row)")
        if tokens_D.min() < 0 or tokens_D.max() >= self.t2d.shape[0]:
            raise ConfigError(
                f"drafter={name}: d2t leads outside the vocabulary of {self.t2d.shape[0]}; expected offsets"
            )
        if not torch.equal(named, tokens_D):
            raise ConfigError(f"drafter={name}: d2t and t2d name different tokens; expected one draft vocabulary")


def most_frequent(counts_V: Tensor, size: int, always: tuple[int, ...] = ()) -> list[int]:
    """Return the `size` most frequent tokens, including those in `always`; ties go to the lower id."""
    counts_V = counts_V.clone().double()
    counts_V[list(always)] = torch.inf
    order = sorted(range(len(counts_V)), key=lambda token: (-float(counts_V[token]), token))
    return sorted(order[:size])


def checked_size(size: int | None, vocab_size: int) -> int | None:
    """Return `size`, or None for the whole vocabulary; raise ConfigError when it is larger than that."""
    if size is not None and not 1 <= size <= vocab_size:
        raise ConfigError.of("drafter.draft_vocab_size", size, f"1 to {vocab_size}, the target's vocabulary")
    return None if size == vocab_size else size
