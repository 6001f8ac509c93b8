"""Losses per token, as functions of the log-probabilities of target and drafter, and their sums over chunks of tokens.

A drafter may know only a part of the vocabulary: `p_log_ND` is then the target's log-probability of those D tokens, not
renormalised, so that exp of it adds up to the mass M <= 1 that the drafter can reach.

The logits of all tokens are never in memory at once: a part's gradient is computed with its loss. Recomputing parts in
the backward pass would save as much memory and cost another forward pass of both lm_heads.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Part(NamedTuple):
    """Some tokens of one draft position, and their loss."""

    source: int
    """Index of the states that they belong to."""
    place: slice
    loss: Callable[[Tensor], Tensor]
    """Maps the states [n, D] to the summed loss."""


# Shapes: N tokens, n tokens of a part, D hidden size of the drafter.


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Iterable[Part], count: int, *tensors: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[2:]
        summed = {index: torch.zeros_like(tensor) for index, tensor in enumerate(tensors) if needed[index]}
        total = tensors[0].new_zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))
        for part in parts:
            total = total + _differentiate(part, count, tensors, summed)
            del part  # its logits of the target, before the next ones are computed
        ctx.gradients = [summed.get(index) for index in range(len(tensors))]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is as large as the head, and this is its only reference.
        scaled = [None if gradient is None else gradient.mul_(gradients[0]) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def _differentiate(part: Part, count: int, tensors: Sequence[Tensor], summed: dict[int, Tensor]) -> Tensor:
    """Return a part's loss, and add its gradients to `summed`; the first `count` tensors are states."""
    wanted = [index for index in summed if index >= count or index == part.source]
    with torch.enable_grad():
        states_nD = tensors[part.source][part.place].detach().requires_grad_(part.source in summed)
        loss = part.loss(states_nD)
        inputs = [states_nD if index == part.source else tensors[index] for index in wanted]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
    for index, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None and index == part.source:
            summed[index][part.place] = gradient
        elif gradient is not None:
            summed[index] += gradient
    return loss.detach()


def summed_loss(parts: Iterable[Part], states: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of the parts' losses; each part is made, differentiated and freed before the next one.

    There is one gradient for each tensor, however many draft positions share it. All states and parameters get a
    gradient, also without any part, so that all processes build the same graph: ZeRO-2 reduces gradients in the order
    in which each process computes them.

    Args:
        parts: made one after the other, without a gradient, while their sum is computed.
        states: of each source, [N, D].
        parameters: parameters that the losses read besides the states; those that are not listed get no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and torch.is_grad_enabled()]
    return _SummedLoss.apply(parts, len(states), *states, *dict.fromkeys(trained))


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


class LossInputs(NamedTuple):
    """Inputs of a loss for N tokens of one draft position. Shapes: E events, D draft vocabulary."""

    p_log_NE: Tensor
    """The target's log-probabilities of the drafter's vocabulary, or of the known tokens and the tail."""
    q_log_NE: Tensor
    """The drafter's log-probabilities of the same events."""
    q_log_ND: Tensor
    """The drafter's log-probabilities of its vocabulary."""
    argmax_N: Tensor
    """The target's most likely token as a row of that vocabulary; -1 if it is not in there."""
    label_N: Tensor
    """The text's next token as such a row."""
    alpha: float
    """Mean overlap at this draft position in the last step."""
    beta: float = 0.5
    eta: float = 3.0


def lk_lambda(of: LossInputs) -> Tensor:
    """Return lambda KL + (1 - lambda) TV, lambda = exp(-eta alpha), per token [N] (LK losses: arXiv:2602.23881)."""
    share = math.exp(-of.eta * of.alpha)
    kl_N, tv_N = forward_kl(of.p_log_NE, of.q_log_NE), total_variation(of.p_log_NE, of.q_log_NE)
    return share * kl_N + (1 - share) * tv_N


def _by_draft(of: LossInputs) -> Tensor:
    """Return 0 per token [N]: `Objective` adds a term that is a product over a draft, see `draft_weights.py`."""
    return of.q_log_ND.new_zeros(of.q_log_ND.shape[0])


ACCEPTED_LENGTH = "accepted_length"
LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {
    "kl": lambda of: forward_kl(of.p_log_NE, of.q_log_NE),
    "reverse_kl": lambda of: reverse_kl(of.p_log_NE, of.q_log_NE),
    "js": lambda of: jensen_shannon(of.p_log_NE, of.q_log_NE, of.beta),
    "tv": lambda of: total_variation(of.p_log_NE, of.q_log_NE),
    "lk_alpha": lambda of: lk_alpha(of.p_log_NE, of.q_log_NE),
    "ce": lambda of: cross_entropy(of.argmax_N, of.q_log_ND),
    "label": lambda of: cross_entropy(of.label_N, of.q_log_ND),
    "lk_lambda": lk_lambda,
    ACCEPTED_LENGTH: _by_draft,
}
"""Losses per token by the names that `objective.kind` and `objective.mix` accept."""
