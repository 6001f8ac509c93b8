"""When a step is due, and whether an update pays: arithmetic without a clock."""

import pytest

from draftsmith.train.online.budget import FLOOR, HORIZON, JUDGEMENT, Budget
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


def test_learning_takes_three_per_cent_until_an_update_is_adopted() -> None:
    budget = Budget(0.1, None)
    budget.decoded(97.0)
    assert budget.owes(0)
    budget.learned(1.5)
    assert budget.owes(0), "another 1.5 s are 3 % of 100 s"
    budget.decoded(-0.1)
    assert not budget.owes(0)


@pytest.mark.parametrize(("gained", "allowed"), [(1.0, 1 - FLOOR), (1.02, 1 - FLOOR / 1.02), (2.0, 0.1), (0.5, 0.03)])
def test_the_adopted_gain_may_be_spent_up_to_the_share(gained: float, allowed: float) -> None:
    budget = Budget(0.1, None)
    budget.adopted(Verdict(1.0, gained, gained - 1, (gained - 1, gained - 1)))
    budget.decoded(1.0)
    steps = 0
    while budget.owes(0):
        budget.learned(1e-4)
        steps += 1
    assert steps * 1e-4 / (1 + steps * 1e-4) == pytest.approx(allowed, abs=2e-4)


def test_a_new_account_has_no_credit_and_knows_how_long_a_step_takes() -> None:
    budget = Budget(0.1, None)
    assert not budget.measured
    budget.decoded(1000.0)
    budget.learned(0.25, part=0.25)
    assert budget.measured
    budget.start(50)
    assert budget.cost() == 0.1, "nothing was spent, so the share is assumed"
    assert not budget.owes(50)
    budget.decoded(32.0)
    assert not budget.owes(50), "a step of 1 s is more than 3 % of 33 s"
    budget.decoded(0.4)
    assert budget.owes(50)


def test_a_comparison_is_bounded_as_a_step_is() -> None:
    budget = Budget(0.1, None)
    budget.decoded(97.0)
    budget.learned(0.55)
    assert not budget.owes(0, judgement=True), f"expected to take {JUDGEMENT} steps"
    assert budget.owes(0)
    budget.learned(0.25)
    assert budget.owes(0, judgement=True), "0.8 s and 1.25 s are less than 3 % of the time"
    budget.judged(0.1)
    budget.decoded(-60.0)
    assert budget.owes(0, judgement=True), "as long as the last one"
    by_tokens = Budget(0.1, every=10)
    assert by_tokens.owes(0, judgement=True), "it follows its step"


def test_gains_of_several_updates_are_bounded_together() -> None:
    """exp(2 log 1.1 - 1.96 sqrt(2) s) with s = log(1.1 / 1.02) / 1.96: more than 1.02 squared."""
    budget = Budget(0.5, None)
    for _ in range(2):
        budget.adopted(Verdict(1.0, 1.1, 0.1, (0.02, 0.2)))
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
