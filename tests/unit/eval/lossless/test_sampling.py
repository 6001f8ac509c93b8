"""The sampling check on real tiny models: right rules pass it, each wrong one fails it.

A sample of a right rule is rejected once in a thousand seeds; the seeds here are fixed.
"""

from functools import cache, partial

import pytest
import torch
from conftest import make_llama, make_t5, noisy_llama
from exact import wrong_rules
from exact.enumeration import Verify

from draftsmith import SpeculativeDecoder
from draftsmith.decode.rules import RULES, VerifyBatch
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.verification import verify
from draftsmith.eval.lossless.greedy import read
from draftsmith.eval.lossless.hypotheses import ALL_TOKENS, RuleSample
from draftsmith.eval.lossless.sampled_texts import SamplingJob, check_sampling, sample
from draftsmith.eval.prompts import Prompt
from draftsmith.heads.draft_model import DraftModel

LEVEL = 1e-3
PROMPTS = [Prompt("one", "x", [5, 9, 33, 2]), Prompt("two", "x", [7, 7, 7, 7, 7]), Prompt("three", "x", [40, 41, 42])]


@cache
def decoder(
    policy: str = "chain:draft_length=3", rule: str | None = None
) -> tuple[torch.nn.Module, SpeculativeDecoder]:
    """A target and a drafter that is right often and wrong often."""
    target = make_llama()
    return target, SpeculativeDecoder(target, DraftModel(noisy_llama()), policy=policy, rule=rule)


def drawn(
    change: VerifyBatch | None = None, tokens: int = 1000, seed: int = 0, policy: str = "chain:draft_length=3"
) -> RuleSample:
    target, speculative = decoder(policy)
    plan = SamplingJob(PROMPTS, Sampling(1.0), tokens, seed)
    result = sample(target, speculative, plan, LEVEL, lambda _: None, change)
    assert speculative.rule is None, "the decoder is left as it was"
    return result


TREE = "sampled-tree:width=3,depth=2"


@pytest.mark.parametrize(
    ("rule", "policy"),
    [("block", "chain:draft_length=3"), ("token", TREE), (None, "best-first:size=6,depth=2")],
)
def test_right_rules_pass(rule: str | None, policy: str) -> None:
    """Each fails here with probability 0.1 %, if the seed were not fixed."""
    result = drawn(None if rule is None else partial(verify, RULES[rule]), policy=policy)
    assert result.drafted > 200
    assert not result.rejects(LEVEL)
    assert max(test.adjusted for test in result.tests) == 1.0


SLOWER = [
    pytest.param(wrong, marks=pytest.mark.slow)
    for wrong in (
        wrong_rules.inverted_ratio,
        wrong_rules.off_by_one_p,
        wrong_rules.dropped_bonus,
        wrong_rules.accepts_what_p_finds_likely,
    )
]


@pytest.mark.parametrize(
    "wrong",
    [
        wrong_rules.residual_of_p,
        wrong_rules.reused_uniform,
        partial(wrong_rules.block, stop_at_failure=True),
        *SLOWER,
    ],
    ids=lambda wrong: getattr(wrong, "__name__", "block, first failure"),
)
def test_wrong_rules_fail(wrong: Verify) -> None:
    assert drawn(wrong_rules.batched(wrong), tokens=2000).rejects(LEVEL)


def test_an_error_at_the_bonus_is_found_at_its_place() -> None:
    bonus = wrong_rules.batched(wrong_rules.bonus_from_the_position_before)
    found = {test.name for test in drawn(bonus, tokens=2000).rejects(LEVEL)}
    assert "  after 3 accepted" in found
    assert not {"  after 0 accepted", "  after 1 accepted", "  after 2 accepted"} & found


def test_a_wrong_rule_for_trees_fails() -> None:
    assert drawn(wrong_rules.batched(wrong_rules.point_mass_drawn_again), policy="best-first:size=6,depth=2").rejects(
        LEVEL
    )


def test_another_target_is_found_though_the_rule_is_right() -> None:
    """The decoder reads a p that is not the target's: only the transform under plain forward passes can see it."""
    _, speculative = decoder()
    other = make_llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.3)
    result = sample(other, speculative, SamplingJob(PROMPTS, Sampling(1.0), 1000, 0), LEVEL, lambda _: None)
    found = {test.name for test in result.rejects(LEVEL)}
    assert ALL_TOKENS in found
    assert not any("q/p" in name or "accepted" in name for name in found)


def test_tokens_that_a_cut_forbids_are_found() -> None:
    target, speculative = decoder()
    cut = SamplingJob(PROMPTS, Sampling(1.0, top_k=3), 600, 0)
    assert not sample(target, speculative, cut, LEVEL, lambda _: None).rejects(LEVEL)

    class Uncut(SamplingJob):
        def settings(self, tokens: int) -> dict[str, object]:
            return {**super().settings(tokens), "top_k": None}

    result = sample(target, speculative, Uncut(PROMPTS, Sampling(1.0, top_k=3), 600, 0), LEVEL, lambda _: None)
    assert "impossible tokens" in {test.name for test in result.rejects(LEVEL)}


def test_verdicts_follow_from_rule_and_control() -> None:
    target, speculative = decoder()
    plan = SamplingJob(PROMPTS, Sampling(0.8, top_p=0.95), 600, 1)
    checked = check_sampling(target, speculative, plan, LEVEL, lambda _: None)
    assert checked.verdict == "lossless"
    assert checked.control.rejects(LEVEL)
    assert not checked.rule.rejects(LEVEL)
    typical = check_sampling(*decoder(rule="typical"), plan, LEVEL, lambda _: None)
    assert typical.verdict == "lossy"


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_readings_in_any_order_are_one(kind: str) -> None:
    """In fp64: T5 scales no scores, so that in fp32 sums in another order differ by 4e-4 on some CPUs."""
    model = (make_llama() if kind == "llama" else make_t5(2, initializer_factor=3.0)).double()
    texts = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3]])
    prompt = Prompt("p", "c", [5, 6, 7])
    whole = read(model, prompt, texts)
    assert whole.shape == (2, 7, 64)
    for width in (1, 3, 5):
        torch.testing.assert_close(read(model, prompt, texts, width=width), whole, rtol=0, atol=1e-10)
    assert not torch.allclose(whole[0, 0], whole[0, 1])
    torch.testing.assert_close(whole[0, 0], whole[1, 0], rtol=0, atol=1e-10)
