"""All randomness of the decoder, behind two methods, so that tests can enumerate every outcome."""

from typing import Protocol

import torch
from torch import Tensor

from draftsmith.errors import ConfigError

LARGEST_SEED = 2**32 - 1
"""That a user may give: seeds of single texts are made from it by multiplication, and must fit 64 bits."""


def require_seed(key: str, seed: int, largest: int = LARGEST_SEED) -> None:
    """ConfigError for a seed out of range."""
    if not 0 <= seed <= largest:
        raise ConfigError.of(key, seed, f">= 0 and at most {largest}")


class Chance(Protocol):
    """A source of randomness. `SeededChance` draws; the exact tests branch over every outcome instead."""

    def bernoulli(self, probability: float) -> bool:
        """True with `probability`; values at or above 1 are certain."""

    def categorical(self, weights_V: Tensor) -> int:
        """An index with probability proportional to `weights_V` [V] (non-negative, not all zero)."""


class SeededChance:
    """Draws from one CPU generator: the same seed gives the same text on the same machine."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def bernoulli(self, probability: float) -> bool:
        return self._uniform() < probability

    def categorical(self, weights_V: Tensor) -> int:
        # Inverse of the cumulative sum in fp64: an index of weight zero has an empty interval and is never chosen.
        cumulative_V = weights_V.double().cumsum(-1)
        threshold = cumulative_V[-1] * self._uniform()
        index = int(torch.searchsorted(cumulative_V, threshold, right=True))
        # Rounding can put the product on the total itself; the last index of positive weight is then the answer.
        return min(index, int(torch.searchsorted(cumulative_V, cumulative_V[-1])))
