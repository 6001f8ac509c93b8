"""All randomness of the decoder, behind two methods, so that tests can enumerate every outcome.

How logits become the distribution that is sampled, for the target's p and the drafter's q alike, at every node.
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
"""That a user may give: seeds of single texts are made from it by multiplication, and must fit 64 bits."""


def require_seed(key: str, seed: int, largest: int = LARGEST_SEED) -> None:
    """ConfigError for a seed out of range."""
    if not 0 <= seed <= largest:
        raise ConfigError.of(key, seed, f">= 0 and at most {largest}")


class Rng(Protocol):
    """A source of randomness. `SeededRng` draws; the exact tests branch over every outcome instead."""

    def bernoulli(self, probability: float) -> bool:
        """True with `probability`; values at or above 1 are certain."""
        ...

    def categorical(self, weights_V: Tensor) -> int:
        """An index with probability proportional to `weights_V` [V] (non-negative, not all zero)."""
        ...


class SeededRng:
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


# Shapes: N rows of logits, V vocabulary.

HOTTEST, COLDEST = 1e30, 1e-6
"""The largest temperature, and the one below which logits divided by it may leave float32."""
Contexts = Callable[[], Sequence[list[int]]]
"""The tokens before each row of logits; made only when a processor asks for them."""

# transformers' processors that look at the scores alone.
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
# Those that treat every row of a batch by itself, so that nodes of equal depth can share one call.
_BY_ROW = (
    *("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
    "ExponentialDecayLengthPenalty",
)
# Those that remember earlier calls or run models: what they return depends on more than the text before a token.
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
    """Temperature, then top-k, then top-p, as transformers' `generate` orders them. Temperature 0 is greedy."""

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
        """transformers' own processors for these settings; empty when greedy or at temperature 1 without cuts."""
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
    """Divides by a temperature so small that a quotient may overflow: exact in the limit, where the largest share all.

    The softmax does not change when the largest score is subtracted first; it is 0 then, and others overflow to -inf.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        below = scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        return torch.where(below == 0, below, below / self._temperature)


def _tempered(processor: LogitsProcessor) -> LogitsProcessor:
    """Return the processor itself, or what computes the same for temperatures at which it would overflow."""
    if type(processor) is TemperatureLogitsWarper and processor.temperature < COLDEST:
        return _Cold(processor.temperature)
    return processor


class Processors:
    """Every logits processor of a run: the user's first, then the sampling's, as transformers orders them.

    A processor is called with the tokens before a node, the draft's among them, and has to be a function of those and
    the scores alone; transformers' own that are not are refused by name.
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
        """Whether a row may be left without any token; temperature, top-k and top-p always leave one."""
        self.none = not self._all
        """Whether scores are the logits as they are."""
        self.read_text = any(type(processor).__name__ not in _CONTEXT_FREE for processor in self._all)
        """Whether any of them looks at the tokens before a node."""
        self._texts = texts

    def tokens(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> list[int]:
        """The argmax of every row."""
        scores_NV = self.scores(logits_NV, contexts, text)
        if self.may_empty and bool(scores_NV.isneginf().all(-1).any()):
            self._name_the_culprit(logits_NV, contexts, text)
        return scores_NV.argmax(-1).tolist()

    def probabilities(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> Tensor:
        """The distribution of every row, [N, V]; DraftsmithError where a processor has left nothing."""
        scores_NV = self.scores(logits_NV, contexts, text)
        if self.may_empty and bool(scores_NV.isneginf().all(-1).any()):
            self._name_the_culprit(logits_NV, contexts, text)
        return scores_NV.softmax(-1)

    def scores(self, logits_NV: Tensor, contexts: Contexts, text: int = 0) -> Tensor:
        """Processed logits [N, V] of nodes of one text, the `text`-th of its batch; a row may have nothing left."""
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

    def _name_the_culprit(self, logits_NV: Tensor, contexts: Contexts, text: int) -> None:
        """DraftsmithError with the name of the first processor that leaves some row without any token."""
        before, scores_NV = contexts(), logits_NV.float()
        for processor in self._all:
            scores_NV = self._by_node(processor, scores_NV, before, text)
            empty_N = scores_NV.isneginf().all(-1).tolist()
            if any(empty_N):
                length = len(before[empty_N.index(True)])
                raise DraftsmithError(
                    f"logits_processor={type(processor).__name__} forbids every token behind {length} tokens; "
                    "expected at least one to be left"
                )
        raise DraftsmithError("the target's logits forbid every token; expected at least one finite logit")

    def _by_node(self, processor: LogitsProcessor, scores_NV: Tensor, before: Sequence[list[int]], text: int) -> Tensor:
        """Call `processor` with each node's own tokens: nodes of equal depth together where it treats rows alone.

        Any other is called for one node at a time, at the row that the text has in its batch: some know rows by number.
        """
        together = _treats_rows_alone(processor)
        groups: dict[int, list[int]] = {}
        for row, tokens in enumerate(before):
            groups.setdefault(len(tokens) if together else row, []).append(row)
        out_NV = torch.empty_like(scores_NV)
        for rows in groups.values():
            copies = 1 if together else self._texts
            ids = token_ids([before[row] for row in rows] * copies, scores_NV.device)
            processed = processor(ids, scores_NV[rows].repeat(copies, 1))  # a copy: a processor may work in place
            out_NV[rows] = processed if copies == 1 else processed[text : text + 1]
        return out_NV


def token_ids(rows: Sequence[list[int]], device: torch.device | None = None) -> torch.LongTensor:
    """[B, T] of rows of equal length, as transformers' processors and criteria are typed to take them."""
    return cast(torch.LongTensor, torch.tensor(rows, device=device))  # int64, which no annotation of torch's says


def _treats_rows_alone(processor: LogitsProcessor) -> bool:
    """Whether what it does to a row depends on nothing but that row's tokens and scores."""
    name = type(processor).__name__
    # A padded batch gives the repetition penalty one number a row.
    numbered = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
    return (name in _BY_ROW or name in _CONTEXT_FREE) and not numbered
