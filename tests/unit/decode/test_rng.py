"""Seeded draws follow their weights."""

import torch

from draftsmith.decode.sampling import SeededRng


def test_frequencies_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    rng, counts = SeededRng(0), torch.zeros(6)
    draws = 20_000
    for _ in range(draws):
        counts[rng.categorical(weights)] += 1
    expected = weights / weights.sum()
    # Six standard deviations of a share of 1/2: a false failure has a probability below 1e-8.
    assert (counts / draws - expected).abs().max() < 6 * 0.5 / draws**0.5
    assert counts[[0, 3, 5]].sum() == 0


def test_certain_events_are_certain() -> None:
    rng = SeededRng(1)
    assert all(rng.bernoulli(1.0) for _ in range(100))
    assert not any(rng.bernoulli(0.0) for _ in range(100))


class _Extreme:
    """A `SeededRng` whose uniform number is the largest one below 1."""

    def _uniform(self) -> float:
        return 1 - 2**-53


def test_rounding_never_leaves_the_support() -> None:
    weights = torch.tensor([0.3, 0.3, 0.4, 0.0, 0.0])
    index = SeededRng.categorical(_Extreme(), weights)  # type: ignore[arg-type]
    assert index == 2
