"""When a step is due, and whether an update pays: arithmetic without a clock."""

import pytest

from draftsmith.train.online.budget import FLOOR, Budget


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
    budget.gained = gained
    budget.decoded(1.0)
    steps = 0
    while budget.owes(0):
        budget.learned(1e-4)
        steps += 1
    assert steps * 1e-4 / (1 + steps * 1e-4) == pytest.approx(allowed, abs=2e-4)


def test_a_new_account_has_no_credit() -> None:
    budget = Budget(0.1, None)
    budget.decoded(1000.0)
    budget.learned(1.0)
    budget.start(50)
    assert budget.cost() == 0.1, "nothing was spent, so the share is assumed"
    budget.learned(1.0)
    assert not budget.owes(50)


def test_an_update_pays_if_it_saves_its_cost_over_as_many_tokens_as_were_decoded() -> None:
    budget = Budget(0.1, None)
    budget.start(800)
    budget.decoded(9.0)
    budget.learned(1.0)
    # A tenth of the time of 200 tokens, against the gain on 1,000.
    assert budget.pays(0.0201, 1000)
    assert not budget.pays(0.0199, 1000)
