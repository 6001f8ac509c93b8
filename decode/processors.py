"""How logits become the distribution that is sampled: the same for the target's p and the drafter's q."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.errors import ConfigError

# Shapes: N rows, V vocabulary.


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, as transformers' `generate` orders them. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError.of("temperature", self.temperature, ">= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError.of("top_k", self.top_k, ">= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError.of("top_p", self.top_p, "a number above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> LogitsProcessorList:
        """transformers' own processors for these settings; empty at temperature 1 without cuts."""
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Probabilities:
    """Maps logits [N, V] to probabilities [N, V] under one run's settings; never used when greedy."""

    def __init__(self, sampling: Sampling) -> None:
        self._warpers = sampling.warpers()

    def __call__(self, logits_NV: Tensor) -> Tensor:
        # float16 and bfloat16 are too coarse for the ratio p/q; fp64 stays fp64 for the exact tests.
        scores_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        for warper in self._warpers:
            scores_NV = warper(None, scores_NV)
        return scores_NV.softmax(-1)
