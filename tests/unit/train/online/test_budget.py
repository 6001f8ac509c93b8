"""When a step is due, and whether an update pays: arithmetic without a clock."""

import pytest

from draftsmith.train.online.budget import HORIZON, JUDGEMENT, RECENT, SPENT, START, Budget
from draftsmith.train.online.judge import Verdict


def test_a_step_by_tokens_reads_no_seconds() -> None:
    budget = Budget(0.1, every=10)
    budget.start(100)
    budget.decoded(1e6)
    assert [tokens for tokens in range(100, 131) if budget.owes(tokens)] == list(range(110, 131))
    budget.learned(1e9)
    assert not budget.owes(119)
    assert budget.owes(120)
    assert budget.cost() == 0.1


def exact(gain: float) -> Verdict:
    return Verdict(1.0, 1 + gain, gain, (gain, gain))


def test_learning_takes_a_small_share_until_an_update_is_adopted() -> None:
    budget = Budget(0.1, None)
    budget.expect(1.0)
    budget.decoded(48.9)
    assert not budget.owes(0), "the first step is bounded too"
    budget.decoded(0.2)
    assert budget.owes(0), f"1 s is {START:.1%} of 50.1 s"
    budget.learned(1.0)
    assert not budget.owes(0)
    budget.decoded(48.8)
    assert not budget.owes(0), "a second one as long as the last one: 2 s of 99.9 s"
    budget.decoded(0.2)
    assert budget.owes(0)


@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("gain", [0.0, 0.02, 0.2, 3.0, -0.5])
def test_a_part_of_what_updates_save_is_spent(gain: float, share: float) -> None:
    """Never slower than 1 - START of the speed without learning, and at the end as much is spent as may be."""
    budget, decoding, learning, saved, step = Budget(share, None), 0.0, 0.0, 0.0, 0.004
    budget.expect(step)
    for number in range(20_000):
        if number == 10_000:
            budget.adopted(exact(gain), number)
        budget.decoded(0.01)
        decoding += 0.01
        saved += 0.01 * max(gain, 0) * (number >= 10_000)
        if budget.owes(number):
            budget.learned(step)
            learning += step
        assert decoding + learning <= (decoding + saved) / (1 - START) + 1e-9
    total = decoding + learning
    assert learning == pytest.approx(min(share * total, START * total + SPENT * saved), abs=2 * step)


def test_a_new_account_has_no_credit_and_knows_how_long_a_step_takes() -> None:
    budget = Budget(0.1, None)
    budget.adopted(exact(0.5), 0)
    budget.decoded(1000.0)
    budget.learned(1.0)
    budget.start(50)
    assert budget.cost() == 0.1, "nothing was spent, so the share is assumed"
    assert not budget.owes(50)
    budget.decoded(8.9)
    assert not budget.owes(50), "a step of 1 s is more than a tenth of 9.9 s"
    budget.decoded(0.2)
    assert budget.owes(50), "the gain is known"


def test_a_step_that_was_interrupted_does_not_delay_the_next() -> None:
    budget = Budget(0.1, None)
    budget.expect(0.1)
    budget.decoded(100.0)
    budget.learned(1.9)
    assert budget.owes(0), "2 s of 102 s with a step of 0.1 s, 3.8 s with another of 1.9 s"
    for _ in range(RECENT):
        budget.decoded(400.0)
        budget.learned(10.0)
    assert not budget.owes(0), "every recent step took 10 s"


def test_a_comparison_is_bounded_as_a_step_is() -> None:
    budget = Budget(0.1, None)
    budget.decoded(100.0)
    budget.learned(0.5)
    assert not budget.owes(0, judgement=True), f"expected to take {JUDGEMENT} steps"
    assert budget.owes(0)
    budget.decoded(170.0)
    assert budget.owes(0, judgement=True), "5.5 s are less than 2 % of 275.5 s"
    budget.judged(0.1)
    budget.decoded(-235.5)
    assert budget.owes(0, judgement=True), "as long as the last one"
    by_tokens = Budget(0.1, every=10)
    assert by_tokens.owes(0, judgement=True), "it follows its step"


def test_gains_of_several_updates_are_bounded_together() -> None:
    """exp(2 log 1.1 - 1.96 sqrt(2) s) with s = log(1.1 / 1.02) / 1.96: more than 1.02 squared."""
    budget = Budget(0.5, None)
    for _ in range(2):
        budget.adopted(Verdict(1.0, 1.1, 0.1, (0.02, 0.2)), 0)
    assert budget.gained == pytest.approx(1.21 / (1.1 / 1.02) ** 2**0.5)
    budget.forget()
    assert budget.gained == 1


@pytest.mark.parametrize(("tokens", "served"), [(1000, HORIZON), (10 * HORIZON, 10 * HORIZON)])
def test_an_update_pays_if_it_saves_its_cost_over_the_tokens_that_it_is_expected_to_serve(
    tokens: int, served: int
) -> None:
    budget = Budget(0.1, None)
    budget.start(tokens - 200)
    budget.decoded(9.0)
    budget.learned(1.0)
    # A tenth of the time of 200 tokens.
    assert budget.pays(20.1 / served, tokens)
    assert not budget.pays(19.9 / served, tokens)
    budget.adopted(exact(0.1), tokens)
    budget.decoded(99.0)
    budget.learned(1.0)
    served = max(served, tokens + 200)
    assert budget.pays(2.01 / served, tokens + 200), "a hundredth of the time since then"
    assert not budget.pays(1.99 / served, tokens + 200)
