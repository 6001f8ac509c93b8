"""Per-token disagreement of target and drafter, as functions of two rows of log-probabilities.

A drafter may know only a part of the vocabulary: `p_log_ND` is then the target's log-probability of those D tokens, as
it is, so that exp of it adds up to the mass M <= 1 that the drafter can reach at all.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Shapes: N tokens, D (draft) vocabulary.


def forward_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """M KL(p / M || q) in nats per token [N]; KL(p || q) where M = 1 (DistillSpec: arXiv:2310.08461)."""
    p_ND = p_log_ND.exp()
    mass_N = p_ND.sum(-1)
    return (p_ND * (p_log_ND - q_log_ND)).sum(-1) - torch.xlogy(mass_N, mass_N)


def reverse_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """KL(q || p) in nats per token [N]: q is to put nothing where p has nothing (GKD: arXiv:2306.13649)."""
    return (q_log_ND.exp() * (q_log_ND - p_log_ND)).sum(-1)


def jensen_shannon(p_log_ND: Tensor, q_log_ND: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, per token [N] (GKD: arXiv:2306.13649, eq. 4).

    What lies outside the drafter's vocabulary has q = 0, so m = beta p there.
    """
    p_ND, q_ND = p_log_ND.exp(), q_log_ND.exp()
    m_log_ND = (beta * p_ND + (1 - beta) * q_ND).clamp_min(torch.finfo(p_ND.dtype).tiny).log()
    outside_N = (1 - p_ND.sum(-1)).clamp_min(0) * -torch.log(torch.tensor(beta, dtype=p_ND.dtype))
    inside_N = (p_ND * (p_log_ND - m_log_ND)).sum(-1) + outside_N
    return beta * inside_N + (1 - beta) * (q_ND * (q_log_ND - m_log_ND)).sum(-1)


def overlap(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Probability that the target accepts a token drawn from the drafter, per token [N].

    alpha = sum_v min(p_v, q_v)   (Leviathan et al. 2023, arXiv:2211.17192, Corollary 3.6)
    """
    return torch.minimum(p_log_ND, q_log_ND).exp().sum(-1)


def total_variation(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """TV(p, q) = 1 - alpha per token [N], the chance of a rejection. Its gradient is tiny from a random start."""
    return 1 - overlap(p_log_ND, q_log_ND)


def lk_alpha(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """-log alpha per token [N] (LK losses: arXiv:2602.23881): TV's gradient, larger the worse the agreement is."""
    return -overlap(p_log_ND, q_log_ND).clamp_min(torch.finfo(p_log_ND.dtype).tiny).log()


def top_k_cross_entropy(p_log_ND: Tensor, q_log_ND: Tensor, k: int) -> Tensor:
    """-sum over the target's k likeliest tokens of p log q, per token [N] (HASS, arXiv:2408.15766, section 3.1)."""
    best = p_log_ND.topk(min(k, p_log_ND.shape[-1]))
    return -(best.values.exp() * q_log_ND.gather(-1, best.indices)).sum(-1)


def cross_entropy(rows_N: Tensor, q_log_ND: Tensor) -> Tensor:
    """-log q of one token, per token [N]: of the target's likeliest for greedy decoding, or of the text's own.

    `rows_N`: its row in the drafter's vocabulary, -1 where it has none: nothing to learn, no loss.
    """
    loss_N = -q_log_ND.gather(-1, rows_N.clamp_min(0)[:, None])[:, 0]
    return torch.where(rows_N >= 0, loss_N, 0.0)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "lk_alpha": lk_alpha,
}
"""Those that are a function of the two rows alone."""
