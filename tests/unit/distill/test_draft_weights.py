"""The expected accepted length, a loss whose weights depend on the other tokens of the draft, and its gradients."""

from collections.abc import Callable

import pytest
import torch
from plain_losses import B, D, H, T, V, overlap, random_signals, three_positions
from torch import Tensor, nn

from draftsmith.distill.objective import Objective
from draftsmith.heads.base import DraftStates, TeacherSignals


def _alpha_of(
    signals: TeacherSignals, lm_head: nn.Module, head: Callable[[Tensor], Tensor], state_D: Tensor, b: int, place: int
) -> Tensor:
    """Return alpha with its gradient; zero if the place is masked or missing."""
    if place >= T or not signals.mask_BT[b, place]:
        return torch.zeros((), dtype=torch.float64)
    return overlap(lm_head(signals.hidden_BTH[b, place]), head(state_D))


@pytest.mark.parametrize("chunk", [1, 2, 4, 1000])
def test_expected_accepted_length(chunk: int) -> None:
    """Value and gradient of E[tau] - 1 over every draft, against autograd through the plain products."""
    signals, lm_head, unrolled, states = three_positions(torch.Generator().manual_seed(11))
    ours = Objective("accepted_length", chunk_tokens=chunk)(unrolled, signals, lm_head).loss
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            survival = torch.ones((), dtype=torch.float64)
            for k, entry in enumerate(unrolled):
                survival = survival * _alpha_of(signals, lm_head, entry.head, states[k][b, t], b, t + k + 1)
                expected = expected - survival
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    leaves = [*states, *unrolled[0].head.parameters()]
    for mine, plain in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 4, 1000])
def test_expected_accepted_length_of_a_draft_model(chunk: int) -> None:
    """One state a position: the draft after t is tested at t, t + 1, ..."""
    generator = torch.Generator().manual_seed(12)
    signals, lm_head, (first, *_), (state, *_) = three_positions(generator)
    entry = DraftStates.everywhere(state, first.head)
    ours = Objective("accepted_length", draft_length=3, chunk_tokens=chunk)([entry], signals, lm_head).loss
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            survival = torch.ones((), dtype=torch.float64)
            for k in range(3):
                state_D = state[b, min(t + k, T - 1)]
                survival = survival * _alpha_of(signals, lm_head, entry.head, state_D, b, t + k)
                expected = expected - survival
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    for mine, plain in zip(torch.autograd.grad(ours, [state]), torch.autograd.grad(expected, [state]), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_weights_of_drafts_after_chosen_anchors(chunk: int) -> None:
    """Blocks after anchors in any order: value and gradient of the expected length, against the plain products."""
    generator = torch.Generator().manual_seed(21)
    signals = random_signals(generator)
    lm_head, head = (nn.Linear(size, V, bias=False).double() for size in (H, D))
    anchors = torch.stack([torch.randperm(T, generator=generator)[:5] for _ in range(B)])
    states = [torch.randn(B, 5, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    unrolled = [DraftStates.in_rows(state, anchors + k, T, head) for k, state in enumerate(states)]
    ours = Objective("accepted_length", chunk_tokens=chunk)(unrolled, signals, lm_head).loss
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for i, anchor in enumerate(anchors[b].tolist()):
            survival = torch.ones((), dtype=torch.float64)
            for k, state in enumerate(states):
                survival = survival * _alpha_of(signals, lm_head, head, state[b, i], b, anchor + k)
                expected = expected - survival
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    leaves = [*states, head.weight]
    for mine, plain in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-8, atol=1e-12)
