"""Logits processing, and tokens by their share of the probability.

The same processors turn logits into the target's p and the drafter's q, at every node.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from draftsmith.config import COLDEST, HOTTEST, LARGEST_SEED, TEMPERATURES
from draftsmith.decode.cache.committed import Contexts
from draftsmith.errors import ConfigError, DraftsmithError


def require_seed(key: str, seed: int, largest: int = LARGEST_SEED) -> None:
    """Raise ConfigError for a seed out of range."""
    if not 0 <= seed <= largest:
        raise ConfigError.of(key, seed, f">= 0 and at most {largest}")


BLOCK_WIDTH, LARGE = 1024, 2**16
"""Weights of a block, at most, and the size of a vocabulary from which blocks are summed first, on a CPU."""


def index_at(weights_xV: Tensor, uniform_x1: Tensor) -> Tensor:
    """Return the index [..., 1] at which the cumulative sum of the weights exceeds this share of their total.

    Where all weights are zero, that is the index after the last one.
    """
    if weights_xV.shape[-1] >= LARGE and weights_xV.device.type == "cpu":
        return _index_in_blocks(weights_xV, uniform_x1)
    # In fp64, an index of weight zero has an empty interval and is never drawn. The product is below the total: the
    # largest uniform number is 1 - 2^-53, and total * (1 - 2^-53) is never rounded up to the total.
    cumulative_xV = weights_xV.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative_xV, cumulative_xV[..., -1:] * uniform_x1, right=True)


def _index_in_blocks(weights_xV: Tensor, uniform_x1: Tensor) -> Tensor:
    """Return `index_at` with cumulative sums of blocks, and of the weights in the block that is drawn.

    Cumulative sums of all weights take longer than their softmax; sums of blocks take a third of that.
    """
    V = weights_xV.shape[-1]
    width = math.gcd(V, BLOCK_WIDTH)
    width = width if width >= BLOCK_WIDTH // 8 else BLOCK_WIDTH
    whole = weights_xV if V % width == 0 else nn.functional.pad(weights_xV, (0, -V % width))
    blocks_xKW = whole.unflatten(-1, (-1, width))
    ends_xK = blocks_xKW.sum(-1).double().cumsum(-1)  # a sum in fp64 copies all weights
    wanted_x1 = ends_xK[..., -1:] * uniform_x1
    block_x1 = torch.searchsorted(ends_xK, wanted_x1, right=True).clamp_(max=ends_xK.shape[-1] - 1)
    start_x1 = nn.functional.pad(ends_xK, (1, 0)).gather(-1, block_x1)
    size_x1 = (ends_xK.gather(-1, block_x1) - start_x1).clamp_min_(torch.finfo(torch.float64).tiny)
    share_x1 = ((wanted_x1 - start_x1) / size_x1).clamp_(max=1 - 2**-53)  # rounding may make it 1
    drawn_xW = blocks_xKW.gather(-2, block_x1[..., None].expand(*block_x1.shape, width))[..., 0, :]
    return (block_x1 * width + index_at(drawn_xW, share_x1)).clamp_(max=V)


# Shapes: N rows of logits, V vocabulary.

MakeContexts = Callable[[], Contexts]
"""Returns the tokens before each row of logits; called only when a processor reads them."""

# transformers' processors that read the scores only.
_CONTEXT_FREE = (
    *(
        "TemperatureLogitsWarper",
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
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ConfigError.of("temperature", self.temperature, TEMPERATURES)
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
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopK(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopP(self.top_p))
        return warpers


class Processors:
    """All logits processors of a run: custom ones first, then those of `sampling`, in the order of transformers.

    A processor is called with the tokens before a node, including draft tokens, and must be a function of these and of
    the scores; processors of transformers that are not are refused by name.

    Args:
        sequences: number of sequences in the batch.
    """

    def __init__(self, sampling: Sampling, extra: Sequence[LogitsProcessor] = (), *, sequences: int = 1) -> None:
        self.sampling, self.greedy = sampling, sampling.greedy
        for processor in extra:
            name = type(processor).__name__
            if name in _STATEFUL:
                raise ConfigError(
                    f"logits_processor={name} {_STATEFUL[name]}; expected one that depends on the text alone"
                )
        self._all = [*extra, *sampling.warpers()]
        self.may_empty = bool(extra)
        """Whether processors may forbid every token of a row; temperature, top-k and top-p never do."""
        self.none = not self._all
        """Whether there is no processor, so scores equal the logits."""
        self.only_temperature = not extra and all(type(one) is TemperatureLogitsWarper for one in self._all)
        """Whether the scores are the logits divided by the temperature; the logits where decoding is greedy."""
        self.read_text = any(type(processor).__name__ not in _CONTEXT_FREE for processor in self._all)
        """Whether any processor reads the tokens before a node."""
        self._sequences = sequences

    def scores(self, logits_NV: Tensor, contexts: MakeContexts | None = None) -> Tensor:
        """Return the processed logits [N, V] of nodes; a row is -inf where the processors forbid every token.

        `contexts` may be None where no processor reads the text.
        """
        scores_NV = precise(logits_NV)
        before: Contexts | None = None
        for processor in self._all:
            if type(processor).__name__ in _CONTEXT_FREE:
                scores_NV = processor(cast(torch.LongTensor, None), cast(torch.FloatTensor, scores_NV))
                continue
            assert contexts is not None
            before = contexts() if before is None else before
            scores_NV = self._by_node(processor, scores_NV, before)
        return scores_NV

    def raise_empty(self, logits_NV: Tensor, before: Contexts) -> NoReturn:
        """Raise DraftsmithError with the name of the first processor that forbids every token of a row."""
        scores_NV = logits_NV.float()
        for processor in self._all:
            scores_NV = self._by_node(processor, scores_NV, before)
            empty_N = scores_NV.isneginf().all(-1).tolist()
            if any(empty_N):
                length = before.lengths[empty_N.index(True)]
                raise DraftsmithError(
                    f"logits_processor={type(processor).__name__} forbids every token after {length} tokens; "
                    "expected at least one allowed token"
                )
        raise DraftsmithError("the target's logits forbid every token; expected at least one finite logit")

    def _by_node(self, processor: LogitsProcessor, scores_NV: Tensor, before: Contexts) -> Tensor:
        """Call `processor` with the tokens before each node and return its scores [N, V].

        Nodes of equal depth share a call if the processor treats rows independently, and all nodes if it reads only
        which tokens occur. Any other processor is called for one node at a time, with the node in the row that its
        sequence has in the batch: some use the index of a row.
        """
        if type(processor) is PrefixConstrainedLogitsProcessor:
            return _allowed(processor, scores_NV, before)
        together = _treats_rows_independently(processor)
        if _reads_occurrence(processor):
            return processor(before.repeated(), cast(torch.FloatTensor, scores_NV.clone()))
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(before.lengths):
            groups.setdefault(length if together else row, []).append(row)
        if together and len(groups) == 1:
            return processor(before.ids(range(len(before.lengths))), cast(torch.FloatTensor, scores_NV.clone()))
        out_NV = torch.empty_like(scores_NV)
        for rows in groups.values():
            repeats, sequence = (1, 0) if together else (self._sequences, before.sequences[rows[0]])
            ids = cast(torch.LongTensor, before.ids(rows).repeat(repeats, 1))
            scores = scores_NV[rows].repeat(repeats, 1)  # a copy, for in-place processors
            processed = processor(ids, cast(torch.FloatTensor, scores))
            out_NV[rows] = processed if together else processed[sequence : sequence + 1]
        return out_NV


def _allowed(processor: PrefixConstrainedLogitsProcessor, scores_NV: Tensor, before: Contexts) -> Tensor:
    """Return the scores [N, V] of the tokens that `prefix_allowed_tokens_fn` allows after each node.

    It is called with the tokens before the node only: it may have other rules for each sequence of a batch. No token is
    allowed where it returns none, which is an error in transformers.
    """
    out_NV = torch.full_like(scores_NV, -torch.inf)
    for row, sequence in enumerate(before.sequences):
        ids_1T = before.ids([row])
        tokens = processor._prefix_allowed_tokens_fn(sequence // processor._num_beams, ids_1T[0])
        if len(tokens) > 0:
            alone = PrefixConstrainedLogitsProcessor(lambda *_, tokens=tokens: tokens, num_beams=1)
            out_NV[row] = alone(ids_1T, cast(torch.FloatTensor, scores_NV[row : row + 1]))[0]
    return out_NV


def precise(logits: Tensor) -> Tensor:
    """Return logits in at least fp32: float16 and bfloat16 are too coarse for the ratio p/q."""
    return logits if logits.dtype == torch.float64 else logits.float()  # the exact tests use fp64


def _treats_rows_independently(processor: LogitsProcessor) -> bool:
    """Return whether the result for a row depends only on the tokens and scores of that row."""
    name = type(processor).__name__
    # For a padded batch, the repetition penalty holds one number per row.
    numbered = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
    return (name in _BY_ROW or name in _CONTEXT_FREE) and not numbered


def _reads_occurrence(processor: LogitsProcessor) -> bool:
    """Return whether the processor reads only which tokens occur in the text."""
    return type(processor).__name__ == "RepetitionPenaltyLogitsProcessor" and (
        getattr(processor, "prompt_ignore_length", None) is None
    )
