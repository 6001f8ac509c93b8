"""Losses per token, as functions of the log-probabilities of target and drafter.

A drafter may know only a part of the vocabulary: `p_log_ND` is then the target's log-probability of those D tokens, not
renormalised, so that exp of it adds up to the mass M <= 1 that the drafter can reach.

Importing this module does not import torch: recipes are checked against the names in `LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: N tokens, D (draft) vocabulary.


def forward_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return M KL(p / M || q) in nats per token [N]; KL(p || q) if M = 1 (DistillSpec: arXiv:2310.08461)."""
    p_ND = p_log_ND.exp()
    mass_N = p_ND.sum(-1)
    return (p_ND * (p_log_ND - q_log_ND)).sum(-1) - mass_N.xlogy(mass_N)


def reverse_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return KL(q || p) in nats per token [N], which penalises q where p is small (GKD: arXiv:2306.13649)."""
    return (q_log_ND.exp() * (q_log_ND - p_log_ND)).sum(-1)


def jensen_shannon(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2, per token [N] (GKD: arXiv:2306.13649, eq. 4).

    Outside the drafter's vocabulary q = 0, so that m = p / 2.
    """
    p_ND, q_ND = p_log_ND.exp(), q_log_ND.exp()
    m_log_ND = (0.5 * p_ND + 0.5 * q_ND).clamp_min(_tiny(p_ND)).log()
    outside_N = (1 - p_ND.sum(-1)).clamp_min(0) * math.log(2)
    inside_N = (p_ND * (p_log_ND - m_log_ND)).sum(-1) + outside_N
    return 0.5 * inside_N + 0.5 * (q_ND * (q_log_ND - m_log_ND)).sum(-1)


def overlap(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return the probability that the target accepts a token drawn from the drafter, per token [N].

    alpha = sum_v min(p_v, q_v)   (Leviathan et al. 2023, arXiv:2211.17192, Corollary 3.6)
    """
    return p_log_ND.minimum(q_log_ND).exp().sum(-1)


def total_variation(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return TV(p, q) = 1 - alpha per token [N], the probability of a rejection; tiny gradients at initialisation."""
    return 1 - overlap(p_log_ND, q_log_ND)


def lk_alpha(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return -log alpha per token [N] (LK losses: arXiv:2602.23881); its gradient is that of TV divided by alpha."""
    return -overlap(p_log_ND, q_log_ND).clamp_min(_tiny(p_log_ND)).log()


def top_k_cross_entropy(p_log_ND: Tensor, q_log_ND: Tensor, k: int) -> Tensor:
    """Return -sum of p log q over the target's k most likely tokens, per token [N] (HASS, arXiv:2408.15766, 3.1)."""
    best = p_log_ND.topk(min(k, p_log_ND.shape[-1]))
    return -(best.values.exp() * q_log_ND.gather(-1, best.indices)).sum(-1)


def cross_entropy(rows_N: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return -log q of one token, per token [N]: of the target's most likely token, or of the text's next one.

    `rows_N`: row of that token in the drafter's vocabulary; -1 if it has none, which gives a loss of 0.
    """
    loss_N = -q_log_ND.gather(-1, rows_N.clamp_min(0)[:, None])[:, 0]
    return loss_N.masked_fill(rows_N < 0, 0.0)


class LossInputs(NamedTuple):
    """Inputs of a loss for N tokens of one draft position."""

    p_log_ND: Tensor
    """The target's log-probabilities of the drafter's vocabulary."""
    q_log_ND: Tensor
    """The drafter's."""
    argmax_N: Tensor
    """The target's most likely token as a row of that vocabulary; -1 if it is not in there."""
    label_N: Tensor
    """The text's next token as such a row."""
    alpha: float
    """Mean overlap at this draft position in the last step."""


ETA = 3.0
"""How fast the weight of `lk_lambda` moves from KL to total variation as alpha rises."""


def lk_lambda(of: LossInputs) -> Tensor:
    """Return lambda KL + (1 - lambda) TV, lambda = exp(-ETA alpha), per token [N] (LK losses: arXiv:2602.23881)."""
    share = math.exp(-ETA * of.alpha)
    kl_N, tv_N = forward_kl(of.p_log_ND, of.q_log_ND), total_variation(of.p_log_ND, of.q_log_ND)
    return share * kl_N + (1 - share) * tv_N


def _by_draft(of: LossInputs) -> Tensor:
    """Return 0 per token [N]: `Objective` adds a term that is a product over a draft, see `draft_weights.py`."""
    return of.q_log_ND.new_zeros(of.q_log_ND.shape[0])


def _tiny(values: Tensor) -> float:
    """Return the smallest normal number of the dtype of `values`."""
    from torch import finfo

    return finfo(values.dtype).tiny


ACCEPTED_LENGTH = "accepted_length"
LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {
    "kl": lambda of: forward_kl(of.p_log_ND, of.q_log_ND),
    "reverse_kl": lambda of: reverse_kl(of.p_log_ND, of.q_log_ND),
    "js": lambda of: jensen_shannon(of.p_log_ND, of.q_log_ND),
    "tv": lambda of: total_variation(of.p_log_ND, of.q_log_ND),
    "lk_alpha": lambda of: lk_alpha(of.p_log_ND, of.q_log_ND),
    "ce": lambda of: cross_entropy(of.argmax_N, of.q_log_ND),
    "label": lambda of: cross_entropy(of.label_N, of.q_log_ND),
    "lk_lambda": lk_lambda,
    ACCEPTED_LENGTH: _by_draft,
}
"""Losses per token by the names that `objective.kind` and `objective.mix` accept."""
