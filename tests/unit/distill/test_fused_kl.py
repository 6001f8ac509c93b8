"""Fused forward KL has the value and gradient of the plain terms, in a fraction of the passes over the vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.distill.fused_kl import TargetRows, forward_kl_and_alpha
from draftsmith.distill.losses import forward_kl, overlap
from draftsmith.distill.objective import Objective
from draftsmith.heads.base import DraftStates, TeacherSignals

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


class Passes(TorchDispatchMode):
    """Counts how often tensors as large as the logits are read or written."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += sum(isinstance(one, Tensor) and one.numel() == self.size for one in (*args, out))
        return out


def _signals(vocabulary: int, tokens: int, hidden: int) -> TeacherSignals:
    generator = torch.Generator().manual_seed(5)
    ids_1T = torch.randint(vocabulary, (1, tokens), generator=generator)
    states_1TH = torch.randn(1, tokens, hidden, dtype=torch.float64, generator=generator)
    mask_1T = torch.ones(1, tokens, dtype=torch.bool)
    mask_1T[0, :4] = False
    return TeacherSignals(ids_1T, torch.ones_like(ids_1T), states_1TH, mask_1T, None)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_draft_position_of_plain_kl_needs_half_of_the_passes(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, passes, found = _signals(V, 33, 8), [], []
    lm_head, head = (nn.Linear(8, V, bias=False).double() for _ in range(2))
    lm_head.requires_grad_(False)
    states_1TH = torch.randn(1, 33, 8, dtype=torch.float64, requires_grad=True)
    entry = DraftStates(states_1TH, head, offset=1)
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(Objective, "_is_plain_kl", False)
        objective, counts = Objective("kl", temperatures=(temperature,)), []
        for positions in (1, 2):
            with Passes(29 * V) as mode:
                sums = objective([entry] * positions, signals, lm_head)
            counts.append(mode.count)
        passes.append(counts[1] - counts[0])
        gradients = torch.autograd.grad(sums.loss, [states_1TH, head.weight])
        found.append([sums.loss, sums.alpha_K, sums.match_K, *gradients])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    others = 3 + 2 * (temperature != 1)  # matrix products, and the division by the temperature
    assert [count - others for count in passes] == [13, 29 + 2 * (temperature != 1)]
