"""KL(p || q) of rows of logits, with its gradient and alpha, in few passes over the vocabulary.

On a GPU, reading and writing rows of 128k numbers takes longer than the matrix product that gives them. Differentiated
term by term, forward KL and alpha read or write [N, D] 29 times for each draft position. p is constant, so 13 times do:

    KL = c - sum_v p_v log q_v,  c = sum_v p_v log p_v - M log M      d KL / d logits_v = (M q_v - p_v) / temperature
    alpha = (1 + M - sum_v |q_v - p_v|) / 2

with M = sum_v p_v, which is less than 1 if the drafter knows only a part of the vocabulary; see `losses.forward_kl`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shapes: N tokens, D (draft) vocabulary.


class TargetRows(NamedTuple):
    """The target's probabilities and sums over them, which all draft positions share."""

    p_ND: Tensor
    mass_N: Tensor
    """M"""
    constant_N: Tensor
    """c"""
    whole: bool
    """Whether they are of the whole vocabulary, so that M = 1."""

    @classmethod
    def of(cls, p_log_ND: Tensor, *, whole: bool) -> "TargetRows":
        """Return the rows of log-probabilities, which are overwritten."""
        p_ND = p_log_ND.exp_()
        mass_N = p_ND.new_ones(len(p_ND)) if whole else p_ND.sum(-1)
        return cls(p_ND, mass_N, torch.xlogy(p_ND, p_ND).sum(-1) - torch.xlogy(mass_N, mass_N), whole)

    def at(self, rows_n: Tensor) -> "TargetRows":
        """Return some of the rows."""
        return TargetRows(self.p_ND[rows_n], self.mass_N[rows_n], self.constant_N[rows_n], self.whole)


class _ForwardKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_ND: Tensor, p: TargetRows, temperature: float) -> tuple[Tensor, Tensor]:
        tempered_ND = logits_ND if temperature == 1 else logits_ND / temperature
        q_log_ND = tempered_ND.log_softmax(-1, dtype=p.p_ND.dtype)
        with torch.autocast(logits_ND.device.type, enabled=False):  # which would round the product to half precision
            kl_N = p.constant_N - torch.bmm(p.p_ND[:, None], q_log_ND[:, :, None])[:, 0, 0]
        difference_ND = q_log_ND.exp_().sub_(p.p_ND)
        alpha_N = (1 + p.mass_N - torch.linalg.vector_norm(difference_ND, 1, dim=-1)) / 2
        ctx.mark_non_differentiable(alpha_N)
        if ctx.needs_input_grad[0]:
            if not p.whole:  # M q - p = M (q - p + (1 - 1 / M) p)
                least = torch.finfo(p.p_ND.dtype).tiny
                difference_ND.addcmul_(p.p_ND, (1 - 1 / p.mass_N.clamp_min(least))[:, None])
            ctx.dtype, ctx.difference_ND, ctx.scale_N = logits_ND.dtype, difference_ND, p.mass_N / temperature
        return kl_N, alpha_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient_ND = ctx.difference_ND.mul_((gradients[0] * ctx.scale_N)[:, None])
        ctx.difference_ND = None
        return gradient_ND.to(ctx.dtype), None, None


def forward_kl_and_alpha(logits_ND: Tensor, p: TargetRows, temperature: float) -> tuple[Tensor, Tensor]:
    """Return `losses.forward_kl` and `losses.overlap` [N] of the drafter's logits; alpha has no gradient.

    Args:
        logits_ND: of any floating dtype; sums are in that of `p`.
        temperature: that `p` has been computed at; the logits are divided by it.
    """
    return _ForwardKl.apply(logits_ND, p, temperature)
