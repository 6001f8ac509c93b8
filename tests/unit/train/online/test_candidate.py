"""The candidate is an average of trained weights, which is judged, adopted and rolled back as one."""

import pytest
import torch
from conftest import make_llama
from torch import Tensor

from draftsmith.heads import DraftModel, Mtp
from draftsmith.heads.base import TrainableDrafter
from draftsmith.train.online.candidate import AVERAGE, Candidate


def one_weight(drafter: TrainableDrafter) -> Tensor:
    return next(weight for name, weight in drafter.named_parameters() if "mlp" in name)


def step(candidate: Candidate, value: float) -> None:
    """Set a weight as a step would."""
    with torch.no_grad():
        one_weight(candidate.trained).fill_(value)
    candidate.average()


@pytest.fixture
def candidate() -> Candidate:
    target = make_llama().requires_grad_(False)
    return Candidate(Mtp.from_target(target, train_steps=3).requires_grad_(False), target)


def test_the_average_begins_as_a_mean_and_becomes_an_exponential_one(candidate: Candidate) -> None:
    before = one_weight(candidate.drafter).clone()
    step(candidate, 1.0)
    torch.testing.assert_close(one_weight(candidate.drafter), (before + 1.0) / 2)
    step(candidate, 4.0)
    torch.testing.assert_close(one_weight(candidate.drafter), (before + 5.0) / 3)
    for _ in range(100):
        candidate.average()
    with torch.no_grad():
        one_weight(candidate.drafter).fill_(0.0)
    step(candidate, 1.0)
    torch.testing.assert_close(one_weight(candidate.drafter), torch.full_like(before, 1 - AVERAGE))


@torch.no_grad()
def test_the_average_is_adopted_and_both_are_rolled_back(candidate: Candidate) -> None:
    step(candidate, 1.0)
    adopted = one_weight(candidate.drafter).clone()
    candidate.adopt()
    assert not torch.equal(adopted, one_weight(candidate.trained))
    served = {name: value.clone() for name, value in candidate.served.state_dict().items()}
    assert all(torch.equal(served[name], value) for name, value in candidate.drafter.state_dict().items())
    step(candidate, 9.0)
    candidate.roll_back()
    for drafter in (candidate.trained, candidate.drafter, candidate.served):
        assert all(torch.equal(served[name], value) for name, value in drafter.state_dict().items())
    step(candidate, 1.0)
    torch.testing.assert_close(one_weight(candidate.drafter), (adopted + 1.0) / 2)  # a new average


def test_two_steps_are_unrolled_in_training_and_the_served_drafter_keeps_its_own(candidate: Candidate) -> None:
    assert candidate.trained.train_steps == 2
    assert candidate.drafter.train_steps == candidate.served.train_steps == 3


def test_copies_begin_with_the_same_adapters() -> None:
    target = make_llama().requires_grad_(False)
    candidate = Candidate(DraftModel.from_target(target, init="target_layers", num_hidden_layers=2), target, 2, seed=4)
    pairs = zip(candidate.trained.named_parameters(), candidate.drafter.named_parameters(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
