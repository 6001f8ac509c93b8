"""The expected accepted length, a loss whose weights depend on the other tokens of the draft, and its gradients."""

from collections.abc import Callable

import pytest
import torch
from plain_losses import B, D, H, T, V, overlap, random_signals, require_equal, three_positions
from torch import Tensor, nn

from draftsmith.distill.objective import Objective
from draftsmith.heads.base import DraftStates, TeacherSignals

Place = tuple[Callable[[Tensor], Tensor], Tensor, int]
"""The head, the state and the position of a draft token."""


def _alpha_of(
    signals: TeacherSignals, lm_head: nn.Module, head: Callable[[Tensor], Tensor], state_D: Tensor, b: int, place: int
) -> Tensor:
    """Return alpha with its gradient; zero if the place is masked or missing."""
    if place >= T or not signals.mask_BT[b, place]:
        return torch.zeros((), dtype=torch.float64)
    return overlap(lm_head(signals.hidden_BTH[b, place]), head(state_D))


def _require_expected_length(
    ours: Tensor,
    signals: TeacherSignals,
    lm_head: nn.Module,
    drafts: list[tuple[int, list[Place]]],
    leaves: list[Tensor],
) -> None:
    """Compare value and gradient of E[tau] - 1 over every draft with autograd through the plain products."""
    expected = torch.zeros((), dtype=torch.float64)
    for b, places in drafts:
        survival = torch.ones((), dtype=torch.float64)
        for head, state_D, place in places:
            survival = survival * _alpha_of(signals, lm_head, head, state_D, b, place)
            expected = expected - survival
    require_equal(ours, expected, leaves)


@pytest.mark.parametrize("chunk", [1, 2, 4, 1000])
def test_expected_accepted_length(chunk: int) -> None:
    signals, lm_head, unrolled, states = three_positions(torch.Generator().manual_seed(11))
    ours = Objective("accepted_length", chunk_tokens=chunk)(unrolled, signals, lm_head).loss
    drafts = [
        (b, [(entry.head, states[k][b, t], t + k + 1) for k, entry in enumerate(unrolled)])
        for b in range(B)
        for t in range(T)
    ]
    _require_expected_length(ours, signals, lm_head, drafts, [*states, *unrolled[0].head.parameters()])


@pytest.mark.parametrize("chunk", [1, 2, 4, 1000])
def test_expected_accepted_length_of_a_draft_model(chunk: int) -> None:
    """One state a position: the draft after t is tested at t, t + 1, ..."""
    signals, lm_head, (first, *_), (state, *_) = three_positions(torch.Generator().manual_seed(12))
    entry = DraftStates.everywhere(state, first.head)
    ours = Objective("accepted_length", draft_length=3, chunk_tokens=chunk)([entry], signals, lm_head).loss
    drafts = [
        (b, [(entry.head, state[b, min(t + k, T - 1)], t + k) for k in range(3)]) for b in range(B) for t in range(T)
    ]
    _require_expected_length(ours, signals, lm_head, drafts, [state])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_weights_of_drafts_after_chosen_anchors(chunk: int) -> None:
    """Blocks after anchors in any order."""
    generator = torch.Generator().manual_seed(21)
    signals = random_signals(generator)
    lm_head, head = (nn.Linear(size, V, bias=False).double() for size in (H, D))
    anchors = torch.stack([torch.randperm(T, generator=generator)[:5] for _ in range(B)])
    states = [torch.randn(B, 5, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    unrolled = [DraftStates.in_rows(state, anchors + k, T, head) for k, state in enumerate(states)]
    ours = Objective("accepted_length", chunk_tokens=chunk)(unrolled, signals, lm_head).loss
    drafts = [
        (b, [(head, state[b, i], anchor + k) for k, state in enumerate(states)])
        for b in range(B)
        for i, anchor in enumerate(anchors[b].tolist())
    ]
    _require_expected_length(ours, signals, lm_head, drafts, [*states, head.weight])
