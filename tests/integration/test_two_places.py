"""Every family decodes and learns where the host and the device of the models are told apart, as on a GPU."""

from collections.abc import Callable

import pytest
import torch
from conftest import mostly_slow
from gpu.families import FAMILIES, PROMPTS, make_drafter, target_model
from gpu.test_training import batch_on
from torch import Tensor, nn
from transformers import RepetitionPenaltyLogitsProcessor
from two_places import OtherPlace, two_places

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes.attention import tree
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.train.step import AgreementStep, Last

DEVICE = torch.device("cpu")
PENALTY = RepetitionPenaltyLogitsProcessor(1.3)
HOST = torch.tensor([[0, 1], [1, 1]])

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + HOST,
    "cat": lambda x: torch.cat([x, HOST.float()]),
    "in place": lambda x: torch.zeros(2, 2).add_(x),
    "a copy on the host": lambda x: x * x.cpu(),
}
ACCEPTED: dict[str, Callable[[Tensor], object]] = {
    "number": lambda x: x * torch.tensor(2.0),
    "index": lambda x: x[HOST[0]],
    "upload": lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
    "move": lambda x: x + HOST.to(x.device),
    "copy to the host": lambda x: torch.zeros(2, 2).copy_(x) + HOST,
    "generated": lambda x: x + torch.rand(2, 2, generator=torch.Generator()).to(x.device),
}


def weights() -> Tensor:
    return nn.Linear(2, 2).to(DEVICE).weight.detach()


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_two_places_are_refused(name: str) -> None:
    with two_places(), pytest.raises(OtherPlace, match="is on the host, at "):
        REFUSED[name](weights())


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_an_accelerator_takes_passes(name: str) -> None:
    with two_places():
        ACCEPTED[name](weights())


def test_masks_that_were_made_outside_are_made_again() -> None:
    tree((-1, 0, 0), DEVICE)
    with two_places():
        tree((-1, 0, 0), DEVICE)[0] & (weights()[:1, :1] > 0)


def texts_of(name: str) -> list[list[int]]:
    """Return greedy and sampled texts with drafts of each kind."""
    target, texts = target_model().to(DEVICE), []
    drafter = make_drafter(name, target)
    for policy in ("chain:draft_length=3", "sampled-tree:width=3,depth=2", "best-first:size=6,depth=2"):
        decoder = SpeculativeDecoder(target, drafter, policy=policy)
        for temperature in (0.0, 1.0):
            settings = {"max_new_tokens": 5, "eos_token_id": None, "top_p": 0.9, "logits_processor": [PENALTY]}
            outs = decoder.generate_batch(PROMPTS, temperature=temperature, **settings)
            assert sum(record.drafted for out in outs for record in out.rounds) > 0
            texts += [out.tokens for out in outs]
    return texts


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "eagle3"))
def test_families_decode(name: str) -> None:
    """With the same texts as where nothing is told apart."""
    with two_places():
        texts = texts_of(name)
    assert texts == texts_of(name)


def loss_and_gradients(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    target = target_model().to(DEVICE)
    drafter = make_drafter(name, target, noise=0.1).train()
    step = AgreementStep(drafter, Objective("accepted_length"), OnlineTeacher(target, drafter.needs.layers))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(batch_on(DEVICE), 0.5, Last([0.4] * 8))[0]
    loss.backward()
    return loss.detach(), {key: x.grad for key, x in drafter.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "eagle3", "dspark"))
def test_families_learn(name: str) -> None:
    """With the same loss and gradients, up to rounding in bf16."""
    with two_places():
        loss, gradients = loss_and_gradients(name)
    expected, own = loss_and_gradients(name)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert gradients.keys() == own.keys()
    assert max(gradient.norm() for gradient in gradients.values()) > 0
    for key, gradient in gradients.items():
        assert (gradient - own[key]).norm() <= 0.02 * own[key].norm(), key
