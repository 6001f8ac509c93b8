"""Random draws and logits processing.

All randomness of the decoder comes from the two methods of `Rng`, so that tests can enumerate every outcome. The same
processors turn logits into the target's p and the drafter's q, at every node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from draftsmith.errors import ConfigError, DraftsmithError

LARGEST_SEED = 2**32 - 1
"""Largest seed of the command line: seeds of single texts are computed from it and must fit into 64 bits."""


def require_seed(key: str, seed: int, largest: int = LARGEST_SEED) -> None:
    """Raise ConfigError for a seed out of range."""
    if not 0 <= seed <= largest:
        raise ConfigError.of(key, seed, f">= 0 and at most {largest}")


class Rng(Protocol):
    """A source of random draws. `SeededRng` draws; the exact tests branch over every outcome instead."""

    def bernoulli(self, probability: float) -> bool:
        """Return True with `probability`; values of 1 and above are certain."""
        ...

    def categorical(self, weights_V: Tensor) -> int:
        """Return an index with probability proportional to `weights_V` [V] (non-negative, not all zero)."""
        ...


class SeededRng:
    """Draws from one CPU generator; the same seed gives the same text on the same machine."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def bernoulli(self, probability: float) -> bool:
        return self._uniform() < probability

    def categorical(self, weights_V: Tensor) -> int:
        # Inverse of the cumulative sum in fp64: an index of weight zero has an empty interval and is never drawn.
        cumulative_V = weights_V.double().cumsum(-1)
        threshold = cumulative_V[-1] * self._uniform()
        index = int(torch.searchsorted(cumulative_V, threshold, right=True))
        # Rounding can make the product equal to the total; then the last index of positive weight is drawn.
        return min(index, int(torch.searchsorted(cumulative_V, cumulative_V[-1])))


# Shapes: N rows of logits, V vocabulary.

HOTTEST, COLDEST = 1e30, 1e-6
"""The largest temperature, and the one below which logits divided by it may leave float32."""
Contexts = Callable[[], Sequence[list[int]]]
"""Returns the tokens before each row of logits; called only when a processor reads them."""

# transformers' processors that read the scores only.
_CONTEXT_FREE = (
    *(
        "TemperatureLogitsWarper",
        "_Cold",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
    ),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    *("SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
)
# Processors that treat the rows of a batch independently, so nodes of equal depth can share one call.
_BY_ROW = (
    *("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
    "ExponentialDecayLengthPenalty",
)
# Processors that keep state between calls or run models: their result depends on more than the text before a token.
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model itself and keeps its cache between calls",
    "SynthIDTextWatermarkLogitsProcessor": "keeps a history of its calls",
    "ClassifierFreeGuidanceLogitsProcessor": "expects conditional and unconditional rows in one batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "expects conditional and unconditional rows in one batch",
    "DiaEOSDelayPatternLogitsProcessor": "keeps a history of its calls",
    "BarkEosPrioritizerLogitsProcessor": "expects audio codebooks in place of text",
    "AlternatingCodebooksLogitsProcessor": "expects audio codebooks in place of text",
    "WhisperNoSpeechDetection": "runs the model itself",
}


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and top-p, applied in this order as in transformers' `generate`. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise ConfigError.of("temperature", self.temperature, f">= 0 (0 is greedy) and at most {HOTTEST:g}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError.of("top_k", self.top_k, ">= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError.of("top_p", self.top_p, "a number above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> LogitsProcessorList:
        """Return transformers' processors for these settings; none when greedy or at temperature 1 without cuts."""
        warpers = LogitsProcessorList()
        if self.greedy:
            return warpers
        if self.temperature != 1:
            warpers.append(_tempered(TemperatureLogitsWarper(float(self.temperature))))
        if self.top_k is not None:
            warpers.append(TopK(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopP(self.top_p))
        return warpers


class _Cold(LogitsProcessor):
    """Divides by a temperature so small that a quotient may overflow; exact in the limit of temperature 0.

    Subtracting the largest score first does not change the softmax: the largest score becomes 0, and others may
    overflow to -inf.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        below = scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        return torch.where(below == 0, below, below / self._temperature)


def _tempered(processor: LogitsProcessor) -> LogitsProcessor:
    """Return the processor, or for temperatures at which it would overflow a `_Cold` one."""
    if type(processor) is TemperatureLogitsWarper and processor.temperature < COLDEST:
        return _Cold(processor.temperature)
    return processor


class Processors:
    """All logits processors of a run: custom ones first, then those of `sampling`, in the order of transformers.

    A processor is called with the tokens before a node, including draft tokens, and must be a function of these and of
    the scores; processors of transformers that are not are refused by name.

    Args:
        texts: number of texts in the batch.
    """

    def __init__(self, sampling: Sampling, extra: Sequence[LogitsProcessor] = (), *, texts: int = 1) -> None:
        self.greedy = sampling.greedy
        for processor in extra:
            name = type(processor).__name__
            if name in _STATEFUL:
                raise ConfigError(
                    f"logits_processor={name} {_STATEFUL[name]}; expected one that depends on the text alone"
                )
        self._all = [*map(_tempered, extra), *sampling.warpers()]
        self.may_empty = bool(extra)
        """Whether processors may forbid every token of a row; temperature, top-k and top-p never do."""
        self.none = not self._all
        """Whether there is no processor, so scores equal the logits."""
        self.read_text = any(type(processor).__name__ not in _CONTEXT_FREE for processor in self._all)
        """Whether any processor reads the tokens before a node."""
        self._texts = texts

    def tokens(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> list[int]:
        """Return the argmax of every row; DraftsmithError where processors forbid every token."""
        scores_NV = self.scores(logits_NV, contexts, text)
        if self.may_empty and bool(scores_NV.isneginf().all(-1).any()):
            self._raise_empty(logits_NV, contexts, text)
        return scores_NV.argmax(-1).tolist()

    def probabilities(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> Tensor:
        """Return the distribution of every row, [N, V]; DraftsmithError where processors forbid every token."""
        scores_NV = self.scores(logits_NV, contexts, text)
        if self.may_empty and bool(scores_NV.isneginf().all(-1).any()):
            self._raise_empty(logits_NV, contexts, text)
        return scores_NV.softmax(-1)

    def scores(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> Tensor:
        """Return the processed logits [N, V] of nodes of one text, whose index in its batch is `text`.

        A row is -inf where the processors forbid every token.
        """
        # float16 and bfloat16 are too coarse for the ratio p/q; fp64 stays fp64 for the exact tests.
        scores_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        before: Sequence[list[int]] | None = None
        for processor in self._all:
            if type(processor).__name__ in _CONTEXT_FREE:
                scores_NV = processor(None, scores_NV)
                continue
            before = contexts() if before is None else before
            scores_NV = self._by_node(processor, scores_NV, before, text)
        return scores_NV

    def _raise_empty(self, logits_NV: Tensor, contexts: Contexts, text: int) -> None:
        """Raise DraftsmithError with the name of the first processor that forbids every token of a row."""
        before, scores_NV = contexts(), logits_NV.float()
        for processor in self._all:
            scores_NV = self._by_node(processor, scores_NV, before, text)
            empty_N = scores_NV.isneginf().all(-1).tolist()
            if any(empty_N):
                length = len(before[empty_N.index(True)])
                raise DraftsmithError(
                    f"logits_processor={type(processor).__name__} forbids every token after {length} tokens; "
                    "expected at least one allowed token"
                )
        raise DraftsmithError("the target's logits forbid every token; expected at least one finite logit")

    def _by_node(self, processor: LogitsProcessor, scores_NV: Tensor, before: Sequence[list[int]], text: int) -> Tensor:
        """Call `processor` with the tokens before each node and return its scores [N, V].

        Nodes of equal depth share a call if the processor treats rows independently. Any other processor is called for
        one node at a time, with the node in the row that its text has in the batch: some use the index of a row.
        """
        together = _treats_rows_independently(processor)
        groups: dict[int, list[int]] = {}
        for row, tokens in enumerate(before):
            groups.setdefault(len(tokens) if together else row, []).append(row)
        out_NV = torch.empty_like(scores_NV)
        for rows in groups.values():
            copies = 1 if together else self._texts
            ids = token_ids([before[row] for row in rows] * copies, scores_NV.device)
            processed = processor(ids, scores_NV[rows].repeat(copies, 1))  # a copy, for in-place processors
            out_NV[rows] = processed if copies == 1 else processed[text : text + 1]
        return out_NV


def token_ids(rows: Sequence[list[int]], device: torch.device | None = None) -> torch.LongTensor:
    """Return rows of equal length as [B, T], with the type that transformers' processors and criteria declare."""
    return cast(torch.LongTensor, torch.tensor(rows, device=device))  # int64, which no annotation of torch's says


def _treats_rows_independently(processor: LogitsProcessor) -> bool:
    """Return whether the result for a row depends only on the tokens and scores of that row."""
    name = type(processor).__name__
    # For a padded batch, the repetition penalty holds one number per row.
    numbered = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
    return (name in _BY_ROW or name in _CONTEXT_FREE) and not numbered
