"""Fused forward KL has the value and gradient of the plain terms, in a fraction of the passes over the vocabulary."""

import pytest
import torch
from torch import Tensor

from draftsmith.distill.draft_probabilities import TargetRows, forward_kl_and_alpha
from draftsmith.distill.losses import forward_kl, overlap

N, V = 12, 40


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits of the target, some of which are impossible tokens, and of a drafter."""
    generator = torch.Generator().manual_seed(2)
    p_NV, q_NV = (3 * torch.randn(N, V, dtype=torch.float64, generator=generator) for _ in range(2))
    p_NV[:, 5] = -torch.inf
    return p_NV, q_NV.to(dtype).requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("known", [V, 25])
def test_value_and_gradient_are_those_of_the_terms(known: int, temperature: float) -> None:
    """With a part of the vocabulary, the target's probabilities do not add up to 1."""
    p_NV, q_NV = rows()
    q_ND = q_NV[:, :known].detach().requires_grad_()
    p_log_ND = (p_NV / temperature).log_softmax(-1)[:, :known]
    weights_N = torch.linspace(-1, 2, N, dtype=torch.float64)

    q_log_ND = (q_ND / temperature).log_softmax(-1)
    finite_ND = p_log_ND.clamp_min(-1e30)  # the plain terms multiply zero by minus infinity
    expected_N, alpha_N = forward_kl(finite_ND, q_log_ND), overlap(finite_ND, q_log_ND)
    (expected_ND,) = torch.autograd.grad((expected_N * weights_N).sum(), q_ND)

    kl_N, found_N = forward_kl_and_alpha(q_ND, TargetRows.of(p_log_ND.clone(), whole=known == V), temperature)
    (gradient_ND,) = torch.autograd.grad((kl_N * weights_N).sum(), q_ND)
    for ours, plain in ((kl_N, expected_N), (found_N, alpha_N), (gradient_ND, expected_ND)):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-13)
    assert not found_N.requires_grad


def test_half_precision_logits_are_summed_in_float32() -> None:
    p_NV, q_NV = rows(torch.bfloat16)
    p = TargetRows.of(p_NV.float().log_softmax(-1), whole=True)
    kl_N, alpha_N = forward_kl_and_alpha(q_NV, p, 1.0)
    (gradient_NV,) = torch.autograd.grad(kl_N.sum(), q_NV)
    assert (kl_N.dtype, alpha_N.dtype, gradient_NV.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    exact_N, exact_NV = _exact(p_NV, q_NV.detach().double())
    torch.testing.assert_close(kl_N.double(), exact_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient_NV.double(), exact_NV, rtol=2**-7, atol=1e-6)


def test_autocast_rounds_no_sum() -> None:
    p_NV, q_NV = rows(torch.float32)
    p = TargetRows.of(p_NV.float().log_softmax(-1), whole=True)
    expected = forward_kl_and_alpha(q_NV, p, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = forward_kl_and_alpha(q_NV, p, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _exact(p_NV: Tensor, q_NV: Tensor) -> tuple[Tensor, Tensor]:
    q_NV = q_NV.requires_grad_()
    kl_N = forward_kl(p_NV.log_softmax(-1).clamp_min(-1e30), q_NV.log_softmax(-1))
    return kl_N.detach(), torch.autograd.grad(kl_N.sum(), q_NV)[0]
