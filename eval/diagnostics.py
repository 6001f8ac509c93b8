"""Statistics of how target and drafter differ, by draft position."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.alignment import at_least_float32
from draftsmith.errors import ConfigError
from draftsmith.eval.results import Diagnostics, PositionDiagnostics
from draftsmith.eval.teacher_forced import Done, Measure, PositionStats, Rows, agreement, target_text
from draftsmith.heads.base import Drafter

# Shapes: N tokens, V vocabulary, A anchors, K draft positions.

LEAST_Q = 1e-10
"""Lower bound of q in the divergences: zeros of a truncated draft vocabulary would make them infinite."""
BINS = 10


def diagnose(
    target: PreTrainedModel,
    drafter: Drafter,
    texts: Mapping[str, Sequence[tuple[list[int], int]]],
    *,
    temperature: float,
    draft_length: int,
    done: Done = lambda _: None,
) -> dict[str, Diagnostics]:
    """Compare target and drafter on each group of `texts`, each (token ids, length of its prompt).

    The target should have generated the texts at this temperature. A text that is in several groups is read once, and
    groups without a text of two new tokens are left out. `done`: see `agreement`; it counts texts, each once.

    Position k is the k-th draft token after every token of a text, given that the draft so far equals the text; numbers
    are means over these tokens. p and q are those of `temperature`, without top-k or top-p; of temperature 1 for 0.

        forward_kl       sum_v p log(p / q), nats; log q is at least log 1e-10
        reverse_kl       sum_v q log(q / p), nats; log p likewise
        tv               sum_v |p - q| / 2; 1 - tv = sum_v min(p, q) is the token rule's acceptance (alpha)
        top1_agreement   share of tokens at which both have the same most likely token
        entropy_overlap  1 - |H(p) - H(q)| / (H(p) + H(q)), H in nats; 1 if both entropies are 0
        ece              expected calibration error of the drafter's confidence: over ten equal bins of max_v q,
                         sum_b n_b / n |mean of max q - mean of p(argmax q)|
        cosine           similarity of the drafter's state and the target's final state at the same token; null if the
                         drafter reads no states of the target, or has states of another width

    `cosine_correlation` is Pearson's correlation of cosine and alpha over all tokens and positions; null without
    cosines, or if one of them does not vary.

    Raises:
        ConfigError: for a drafter without logits, no text with two new tokens, or settings out of range.
    """
    if draft_length < 1:
        raise ConfigError.of("draft_length", draft_length, ">= 1")
    if not temperature >= 0:
        raise ConfigError.of("temperature", temperature, ">= 0 (0 is greedy)")
    keys = {name: [(tuple(ids), length) for ids, length in group] for name, group in texts.items()}
    distinct = dict.fromkeys(key for group in keys.values() for key in group)
    known = {
        (ids, length): target_text(target, list(ids[:length]), list(ids[length:]), len(ids) - length)
        for ids, length in distinct
    }
    known = {key: text for key, text in known.items() if text.anchors > 0}
    if not known:
        raise ConfigError(f"texts={len(distinct)} without two new tokens in any; expected longer ones")
    measures = [difference_measure(drafter, temperature)]
    tables = dict(zip(known, agreement(target, drafter, [*known.values()], draft_length, measures, done), strict=True))
    done(len(distinct) - len(known))
    groups = {name: [tables[key] for key in group if key in tables] for name, group in keys.items()}
    return {name: summary(group) for name, group in groups.items() if group}


def difference_measure(drafter: Drafter, temperature: float) -> Measure:
    """Return a measure of the numbers of each token from which `summary` computes statistics."""
    divisor = temperature or 1.0

    def measure(rows: Rows) -> dict[str, Tensor]:
        logits = (at_least_float32(rows.p_NV), at_least_float32(rows.q_NV))
        p_log_NV, q_log_NV = (x_NV.div(divisor).log_softmax(-1) for x_NV in logits)
        p_NV, q_NV = p_log_NV.exp(), q_log_NV.exp()
        floor = float(np.log(LEAST_Q))
        high_p_NV, high_q_NV = p_log_NV.clamp_min(floor), q_log_NV.clamp_min(floor)
        best_N1 = q_NV.argmax(-1, keepdim=True)
        return {
            "forward_kl": (p_NV * (high_p_NV - high_q_NV)).sum(-1),
            "reverse_kl": (q_NV * (high_q_NV - high_p_NV)).sum(-1),
            "tv": (p_NV - q_NV).abs().sum(-1) / 2,
            "same_top": (p_NV.argmax(-1) == best_N1[:, 0]).double(),
            "entropy_p": -(p_NV * high_p_NV).sum(-1),
            "entropy_q": -(q_NV * high_q_NV).sum(-1),
            "confidence": q_NV.gather(1, best_N1)[:, 0],
            "p_of_best": p_NV.gather(1, best_N1)[:, 0],
            "cosine": _cosine(drafter, rows),
        }

    return measure


def _cosine(drafter: Drafter, rows: Rows) -> Tensor:
    """Return cosine similarities [N]; NaN if the two states are not comparable."""
    states_ND, target_NH = rows.states_ND, rows.target_NH
    if not drafter.needs.hidden or states_ND.shape != target_NH.shape:
        return torch.full((len(rows.labels_N),), torch.nan)
    return torch.nn.functional.cosine_similarity(states_ND.double(), target_NH.double(), dim=-1)


def summary(tables: Sequence[PositionStats]) -> Diagnostics:
    """Return the result of `diagnose` from the numbers of each text."""
    positions = tables[0]["tv"].shape[1]
    rows: list[PositionDiagnostics] = []
    all_cosine, all_alpha = [], []
    for column in range(positions):
        known = {
            name: np.concatenate([table[name][: max(len(table[name]) - column, 0), column] for table in tables])
            for name in tables[0]
        }
        if not len(known["tv"]):
            break
        rows.append(_statistics(column + 1, known))
        all_cosine.append(known["cosine"])
        all_alpha.append(1 - known["tv"])
    return {
        "positions": rows,
        "cosine_correlation": _pearson(np.concatenate(all_cosine), np.concatenate(all_alpha)),
    }


def _statistics(position: int, known: dict[str, NDArray[np.float64]]) -> PositionDiagnostics:
    both = known["entropy_p"] + known["entropy_q"]
    apart = np.abs(known["entropy_p"] - known["entropy_q"])
    overlap = 1 - np.divide(apart, both, out=np.zeros_like(both), where=both > 0)
    cosine = float(known["cosine"].mean())
    return {
        "position": position,
        "tokens": len(known["tv"]),
        "forward_kl": float(known["forward_kl"].mean()),
        "reverse_kl": float(known["reverse_kl"].mean()),
        "tv": float(known["tv"].mean()),
        "top1_agreement": float(known["same_top"].mean()),
        "entropy_overlap": float(overlap.mean()),
        "ece": calibration_error(known["confidence"], known["p_of_best"]),
        "cosine": None if np.isnan(cosine) else cosine,
    }


def calibration_error(confidence_N: NDArray[np.float64], outcome_N: NDArray[np.float64]) -> float:
    """Return the expected calibration error, with probabilities of the outcome in place of single outcomes.

    Guo et al. 2017, arXiv:1706.04599, eq. 3
    """
    bins_N = np.minimum((confidence_N * BINS).astype(int), BINS - 1)
    gaps = [abs((confidence_N - outcome_N)[bins_N == place].sum()) for place in range(BINS)]
    return float(sum(gaps) / len(confidence_N))


def _pearson(x_N: NDArray[np.float64], y_N: NDArray[np.float64]) -> float | None:
    if len(x_N) < 2 or np.isnan(x_N).any() or x_N.std() == 0 or y_N.std() == 0:
        return None
    return float(np.corrcoef(x_N, y_N)[0, 1])
