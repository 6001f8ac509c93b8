"""Sampling at temperatures near 0: the limit of the softmax in fp32 and fp64, and the distribution of decoded texts."""

import pytest
import torch
from exact.enumeration import Tokens, string_distribution, total_variation, whole_runs
from exact.one_round import DRAFTER_SEEDS, EXACT
from exact.toys import VOCAB, ToyDrafter, ToyModel, ToyTarget
from torch import Tensor

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import BestFirst, Chain, Policy, SampledTree
from draftsmith.decode.rules import RULES
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence

COLD = (1e-7, 1e-30)
PROMPT = (0, 3)
COUNT = 3


class Tied(ToyModel):
    """A toy model with logits in coarse steps, so that several tokens are often the most likely ones."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        exact = self.logits
        self.logits = lambda text: (exact(text) / 3).round() * 3


def limit(logits_NV: Tensor) -> Tensor:
    """Return the limit of softmax(logits / T) for T to 0: equal probabilities of the largest logits."""
    best_NV = (logits_NV == logits_NV.amax(-1, keepdim=True)).double()
    return best_NV / best_NV.sum(-1, keepdim=True)


@pytest.mark.parametrize("temperature", COLD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_is_the_limit(temperature: float, dtype: torch.dtype) -> None:
    logits_NV = torch.stack([Tied(seed).logits(PROMPT) for seed in range(40)]).to(dtype)
    logits_NV[:5, 2] = -torch.inf
    expected_NV = limit(logits_NV)
    assert int((expected_NV > 0).sum(-1).max()) > 1, "some are tied"
    for cuts in ({}, {"top_k": VOCAB + 10**6}, {"top_p": 1 - 1e-16}):
        found_NV = Processors(Sampling(temperature, **cuts)).scores(logits_NV).softmax(-1)
        assert (found_NV - expected_NV).abs().max() < (1e-6 if dtype == torch.float32 else EXACT)
    one_NV = Processors(Sampling(temperature, top_p=5e-324)).scores(logits_NV).softmax(-1)
    assert ((one_NV > 0).sum(-1) == 1).all(), "top-p keeps one token at least"
    assert (one_NV <= (expected_NV > 0)).all(), "and that is among the likeliest"
    nothing_1V = torch.full((1, VOCAB), -torch.inf, dtype=dtype)
    assert Processors(Sampling(temperature)).scores(nothing_1V).isneginf().all()


@pytest.mark.parametrize(
    ("policy", "rule"),
    [(Chain(2), "token"), (Chain(2), "block"), (SampledTree(2, 1), "token"), (BestFirst(3, 2), "point-mass")],
    ids=str,
)
def test_texts_follow_the_limit(policy: Policy, rule: str) -> None:
    """Compare every outcome of the decoder with the target's limit, which has several texts where tokens are tied."""
    several = 0
    for seed in range(2):
        target, drafter = Tied(seed), ToyDrafter(Tied(DRAFTER_SEEDS + seed))

        def make(target: Tied = target, drafter: ToyDrafter = drafter) -> DecodeLoop:
            text = DecodeSequence(list(PROMPT), len(PROMPT) + COUNT)
            return DecodeLoop(ToyTarget(target), drafter, policy, [text], Processors(Sampling(1e-30)), RULES[rule])

        def p(new: Tokens, target: Tied = target) -> list[float]:
            return limit(target.logits(PROMPT + new)[None])[0].tolist()

        expected = {(PROMPT + new,): weight for new, weight in string_distribution(p, COUNT, frozenset())}
        assert total_variation(whole_runs(make), expected) < EXACT
        several += len(expected) > 1
    assert several > 0
