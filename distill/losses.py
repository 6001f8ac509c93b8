"""Losses per token, as functions of the log-probabilities of target and drafter, and their sums over chunks of tokens.

A drafter may know only a part of the vocabulary: `p_log_ND` is then the target's log-probability of those D tokens, not
renormalised, so that exp of it adds up to the mass M <= 1 that the drafter can reach.

The logits of all tokens are never in memory at once: a chunk's gradient is computed with its loss. Recomputing chunks
in the backward pass would save as much memory and cost another forward pass of both lm_heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Chunk = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""Maps states [n, D] of the tokens in a slice to sums over them: the loss, then sums that carry no gradient."""

# Shapes: N tokens, D hidden size of the drafter.


class _ChunkedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Chunk, size: int, states_ND: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        totals: list[Tensor] = []
        sources = (states_ND, *parameters)
        summed = {index: torch.zeros_like(sources[index]) for index in wanted}
        for start in range(0, max(1, states_ND.shape[0]), size):
            chunk = slice(start, start + size)
            with torch.enable_grad():
                part = states_ND[chunk].detach().requires_grad_(0 in wanted)
                loss, *others = function(part, chunk)
                inputs = [part if index == 0 else sources[index] for index in wanted]
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
            for index, gradient in zip(wanted, gradients, strict=True):
                if gradient is None:
                    continue
                if index == 0:
                    summed[index][chunk] = gradient
                else:
                    summed[index] += gradient
            sums = [loss.detach(), *(other.detach() for other in others)]
            totals = sums if not totals else [total + value for total, value in zip(totals, sums, strict=True)]
        ctx.gradients = [summed.get(index) for index in range(len(sources))]
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        loss_grad = gradients[0]
        # In place: a head's gradient is as large as the head, and this is its only reference.
        scaled = [None if gradient is None else gradient.mul_(loss_grad) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def chunked_sums(
    function: Chunk, states_ND: Tensor, parameters: Sequence[nn.Parameter], size: int
) -> tuple[Tensor, ...]:
    """Return `function`'s sums over all tokens, computed for at most `size` tokens at a time.

    Without tokens `function` is called once with none, so that all processes build the same graph: ZeRO-2 reduces
    gradients in the order in which each process computes them.

    Args:
        parameters: parameters that `function` reads besides the states; those that are not listed get no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _ChunkedSums.apply(function, size, states_ND, *trained)


# Shapes: N tokens, D (draft) vocabulary.


def forward_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return M KL(p / M || q) in nats per token [N]; KL(p || q) if M = 1 (DistillSpec: arXiv:2310.08461)."""
    p_ND = p_log_ND.exp()
    mass_N = p_ND.sum(-1)
    return (p_ND * (p_log_ND - q_log_ND)).sum(-1) - torch.xlogy(mass_N, mass_N)


def reverse_kl(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return KL(q || p) in nats per token [N], which penalises q where p is small (GKD: arXiv:2306.13649)."""
    return (q_log_ND.exp() * (q_log_ND - p_log_ND)).sum(-1)


def jensen_shannon(p_log_ND: Tensor, q_log_ND: Tensor, beta: float = 0.5) -> Tensor:
    """Return beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, per token [N].

    GKD: arXiv:2306.13649, eq. 4. Outside the drafter's vocabulary q = 0, so that m = beta p.
    """
    p_ND, q_ND = p_log_ND.exp(), q_log_ND.exp()
    m_log_ND = (beta * p_ND + (1 - beta) * q_ND).clamp_min(torch.finfo(p_ND.dtype).tiny).log()
    outside_N = (1 - p_ND.sum(-1)).clamp_min(0) * -torch.log(torch.tensor(beta, dtype=p_ND.dtype))
    inside_N = (p_ND * (p_log_ND - m_log_ND)).sum(-1) + outside_N
    return beta * inside_N + (1 - beta) * (q_ND * (q_log_ND - m_log_ND)).sum(-1)


def overlap(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return the probability that the target accepts a token drawn from the drafter, per token [N].

    alpha = sum_v min(p_v, q_v)   (Leviathan et al. 2023, arXiv:2211.17192, Corollary 3.6)
    """
    return torch.minimum(p_log_ND, q_log_ND).exp().sum(-1)


def total_variation(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return TV(p, q) = 1 - alpha per token [N], the probability of a rejection; tiny gradients at initialisation."""
    return 1 - overlap(p_log_ND, q_log_ND)


def lk_alpha(p_log_ND: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return -log alpha per token [N] (LK losses: arXiv:2602.23881); its gradient is that of TV divided by alpha."""
    return -overlap(p_log_ND, q_log_ND).clamp_min(torch.finfo(p_log_ND.dtype).tiny).log()


def top_k_cross_entropy(p_log_ND: Tensor, q_log_ND: Tensor, k: int) -> Tensor:
    """Return -sum of p log q over the target's k most likely tokens, per token [N] (HASS, arXiv:2408.15766, 3.1)."""
    best = p_log_ND.topk(min(k, p_log_ND.shape[-1]))
    return -(best.values.exp() * q_log_ND.gather(-1, best.indices)).sum(-1)


def cross_entropy(rows_N: Tensor, q_log_ND: Tensor) -> Tensor:
    """Return -log q of one token, per token [N]: of the target's most likely token, or of the text's next one.

    `rows_N`: row of that token in the drafter's vocabulary; -1 if it has none, which gives a loss of 0.
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
"""Losses that are functions of the two rows of log-probabilities alone."""
