"""The formulas of the objectives in plain products, and random inputs for them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftStates, TeacherSignals

B, T, H, D, V = 3, 11, 8, 6, 13
LAST_ALPHA = [0.3, 0.6]


def random_signals(generator: torch.Generator) -> TeacherSignals:
    """Return states and tokens of B texts, of which about 60 % of the positions are trained."""
    mask = torch.rand(B, T, generator=generator) < 0.6
    hidden = torch.randn(B, T, H, dtype=torch.float64, generator=generator)
    ids = torch.randint(V, (B, T), generator=generator)
    return TeacherSignals(ids, torch.ones_like(ids), hidden, mask)


def plain_loss(kind: str, p_logits: Tensor, q_logits: Tensor, k: int = 0, label: int | None = None) -> Tensor:
    """Return the loss of one row by the formula of the paper."""
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    m = (p + q) / 2
    kl, tv = (p * (p.log() - q.log())).sum(), (p - q).abs().sum() / 2
    share = math.exp(-3 * LAST_ALPHA[k])
    return {
        "kl": kl,
        "reverse_kl": (q * (q.log() - p.log())).sum(),
        "js": (p * (p / m).log()).sum() / 2 + (q * (q / m).log()).sum() / 2,
        "tv": tv,
        "lk_alpha": -torch.minimum(p, q).sum().log(),
        "ce": -q.log()[p.argmax()],
        "label": 0 * q.sum() if label is None else -q.log()[label],
        "lk_lambda": share * kl + (1 - share) * tv,
    }[kind]


def overlap(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return alpha, the sum of min(p, q)."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


def three_positions(generator: torch.Generator) -> tuple[TeacherSignals, nn.Module, list[DraftStates], list[Tensor]]:
    """Return signals, the target's lm_head, three draft positions that share a head, and their states."""
    signals = random_signals(generator)
    lm_head = nn.Linear(H, V, bias=False).double().requires_grad_(False)
    head = nn.Linear(D, V).double()
    states = [torch.randn(B, T, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    return signals, lm_head, [shifted(state, head, k + 1) for k, state in enumerate(states)], states


def shifted(states_BTD: Tensor, head: nn.Module, by: int, **options: Any) -> DraftStates:
    """Return states at all positions t, each trained towards t + by."""
    count, length, _ = states_BTD.shape
    return DraftStates.in_rows(states_BTD, (torch.arange(length) + by).expand(count, -1), length, head, **options)


def require_equal(ours: Tensor, plain: Tensor, leaves: Sequence[Tensor]) -> None:
    """Compare a loss, which is summed in float32, and its gradients, which are in float64, with the plain formula's."""
    torch.testing.assert_close(ours.double(), plain, rtol=1e-6, atol=1e-6)
    for mine, own in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-8, atol=1e-12)
