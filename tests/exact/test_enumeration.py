"""The enumeration, on draws with known probabilities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact.enumeration import BranchingRng, Open, add, outcomes, spread, total_variation

DIE = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)


def coin_then_die(rng: BranchingRng) -> tuple[bool, int]:
    return (True, rng.categorical(DIE)) if rng.bernoulli(0.25) else (False, 0)


def test_every_outcome_comes_with_its_probability() -> None:
    expected = {(False, 0): 0.75, (True, 0): 0.0625, (True, 1): 0.125, (True, 3): 0.0625}
    assert {result: weight for weight, result in outcomes(coin_then_die)} == expected


def test_certain_choices_have_one_outcome() -> None:
    assert list(outcomes(lambda rng: (rng.bernoulli(1.0), rng.bernoulli(0.0)))) == [(1.0, (True, False))]


def test_outcomes_continue_given_choices() -> None:
    assert {result: weight for weight, result in outcomes(coin_then_die, start=(1, 1))} == {(True, 1): 0.125}


def test_a_token_that_is_not_read_represents_all_outcomes() -> None:
    ((weight, token),) = outcomes(lambda rng: rng.categorical(DIE), leave_open=True)
    assert isinstance(token, Open)
    assert (weight, spread(token)) == (1.0, [(0, 0.25), (1, 0.5), (3, 0.25)])


@pytest.mark.parametrize(
    "look",
    [
        lambda token, rng: (token == 1, token),
        lambda token, rng: (token in {1, 2}, token),
        lambda token, rng: (bool(token), token),
        lambda token, rng: ("abcd"[token], token),
        lambda token, rng: (int(token) + 1, token),
        lambda token, rng: (rng.bernoulli(0.5), token),
        lambda token, rng: (rng.categorical(DIE), token),
    ],
    ids=["==", "in", "bool", "index", "int", "flip", "draw"],
)
def test_the_outcomes_of_a_token_that_is_read_are_enumerated(look: Callable[[Any, BranchingRng], Any]) -> None:
    found: tuple[dict, dict] = ({}, {})
    for leave_open, distribution in zip((True, False), found, strict=True):
        for weight, (seen, token) in outcomes(lambda rng: look(rng.categorical(DIE), rng), leave_open=leave_open):
            for value, share in spread(token):
                for other, rest in spread(seen):
                    add(distribution, (other, value), weight * share * rest)
    assert sum(found[0].values()) == pytest.approx(1)
    assert total_variation(*found) < 1e-15


def test_weights_that_are_not_a_distribution_are_refused() -> None:
    for wrong in (DIE - 1, DIE * 0, DIE * torch.nan):
        with pytest.raises(AssertionError):
            list(outcomes(lambda rng, wrong=wrong: rng.categorical(wrong)))
    with pytest.raises(AssertionError):
        list(outcomes(lambda rng: rng.bernoulli(float("nan"))))
