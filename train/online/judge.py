"""Whether a candidate accepts more than the drafter in use, on held-back rows, from their stored states."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.teacher import TargetHead
from draftsmith.eval.metrics import RESAMPLES, percentiles, ratio
from draftsmith.eval.teacher_forced import Measure, agreement_of, unrollable
from draftsmith.eval.teacher_forced import Rows as Logits
from draftsmith.heads.base import TrainableDrafter
from draftsmith.train.online.buffer import Row, signals_of

# Shapes: R rows of text, G blocks of rows, N positions, V vocabulary, K draft positions, S resamples.

Scores = NDArray[np.float64]
"""[R, 2]: tokens that the rounds of a row commit in expectation, one round after every token, and these rounds."""
TOGETHER = 8
"""Rows that are unrolled in one batch."""


def acceptance(sampling: Sampling) -> Measure:
    """Return a measure of the probability that a draft token is accepted, given that those before it were.

    sum_v min(p_v, q_v) after temperature, top-k and top-p; greedy: whether the draft is the text's token, which is the
    target's most likely one.
    """
    processors = Processors(sampling)

    def measure(rows: Logits) -> dict[str, Tensor]:
        if sampling.greedy:
            return {"acceptance": (rows.labels_N == rows.q_NV.argmax(-1)).double()}
        p_NV, q_NV = processors.scores(rows.p_NV, list), processors.scores(rows.q_NV, list)
        return {"acceptance": torch.minimum(p_NV.softmax(-1), q_NV.softmax(-1)).sum(-1)}

    return measure


@dataclass(frozen=True)
class _Unread:
    """An lm_head for measures that do not read p: its logits are zero and take no memory."""

    weight: Tensor

    def __call__(self, states_NH: Tensor, /) -> Tensor:
        return states_NH.new_zeros(()).expand(len(states_NH), len(self.weight))


@torch.no_grad()
def scores(drafter: TrainableDrafter, rows: Sequence[Row], lm_head: TargetHead, draft_length: int) -> Scores:
    """Return the expected committed tokens of each row, E[tau] = 1 + sum_k prod_{i<=k} alpha_i after every token."""
    device = next(drafter.parameters()).device
    positions = min(draft_length, drafter.max_draft_length or draft_length)
    found = np.zeros((len(rows), 2))
    for sampling in dict.fromkeys(row.sampling for row in rows):
        places = [place for place, row in enumerate(rows) if row.sampling == sampling]
        head = _Unread(lm_head.weight) if sampling.greedy else lm_head
        for start in range(0, len(places), TOGETHER):
            some = places[start : start + TOGETHER]
            batch = [rows[place] for place in some]
            texts = [row.text for row in batch]
            unrolled = unrollable(drafter, draft_length, texts)
            signals = signals_of(batch, device)
            tables = agreement_of(signals, head, unrolled, texts, positions, [acceptance(sampling)])
            for place, table in zip(some, tables, strict=True):
                alpha_AK = table["acceptance"]
                found[place] = len(alpha_AK) + alpha_AK.cumprod(1).sum(), len(alpha_AK)
    return found


class Verdict(NamedTuple):
    """A candidate beside the drafter in use, on the same rows."""

    served: float
    """Expected tau of the drafter in use."""
    candidate: float
    gain: float
    """candidate / served - 1"""
    interval: tuple[float, float]
    """Of the gain: 95 % bootstrap over blocks of rows, which are drawn for both together."""

    def diluted(self, share: float) -> "Verdict":
        """Return the gain of decoding in which this share of the rounds has a draft of the drafter."""
        low, high = self.interval
        return self._replace(gain=share * self.gain, interval=(share * low, share * high))


def judged(served: Scores, candidate: Scores, blocks: Sequence[Hashable], seed: int) -> Verdict:
    """Compare the scores of two drafters on the same rows, each of which belongs to a block."""
    numbers = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
    sums_G2 = np.zeros((len(numbers), 2))
    np.add.at(sums_G2, [numbers[block] for block in blocks], np.stack([served[:, 0], candidate[:, 0]], 1))
    drawn_SG = np.random.default_rng(seed).integers(0, len(sums_G2), (RESAMPLES, len(sums_G2)))
    served_S, candidate_S = sums_G2[drawn_SG].sum(1).T
    gains_S = ratio(candidate_S, served_S) - 1
    low, high = percentiles(gains_S)
    rounds = served[:, 1].sum()
    own, other = served[:, 0].sum() / rounds, candidate[:, 0].sum() / rounds
    return Verdict(own, other, other / own - 1, (low, high))
