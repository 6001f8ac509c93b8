"""A paused learner continues when acceptance falls, and not because texts differ from each other."""

import numpy as np
import pytest

from draftsmith.train.online.watch import TEXTS, Watch


def serve(watch: Watch, texts: int, rng: np.random.Generator, factor: float = 1.0, rounds: int = 16) -> int | None:
    """Add texts with an acceptance length of their own each; return after how many of them it has fallen."""
    for number in range(texts):
        own = factor * rng.uniform(1.0, 4.0)  # rounds of a text are alike
        watch.add(int(rng.poisson(own, rounds).sum()), rounds)
        if watch.fallen():
            return number + 1
    return None


def paused(seed: int) -> tuple[Watch, np.random.Generator]:
    watch, rng = Watch(), np.random.default_rng(seed)
    for _ in range(100):
        watch.add(int(rng.poisson(rng.uniform(1.0, 4.0), 16).sum()), 16)
    watch.pause()
    return watch, rng


def test_texts_that_differ_as_before_do_not_wake() -> None:
    """15 comparisons at 3.5 standard errors in each of 200 seeds, which are fixed: about one of them is false."""
    woken = 0
    for seed in range(200):
        watch, rng = paused(seed)
        woken += serve(watch, 15 * TEXTS, rng) is not None
    assert woken <= 6


def test_rounds_of_one_text_are_not_evidence_of_their_own() -> None:
    """Comparing 256 rounds, as alike as they are in long texts, would wake in nearly every one of these seeds."""
    woken = 0
    for seed in range(100):
        watch, rng = paused(seed)
        woken += serve(watch, 10 * TEXTS, rng, rounds=256) is not None
    assert woken <= 4


@pytest.mark.parametrize("seed", range(10))
def test_a_real_fall_wakes_within_a_hundred_texts(seed: int) -> None:
    watch, rng = paused(seed)
    after = serve(watch, 3 * TEXTS, rng, factor=0.6)
    assert after is not None
    assert after % TEXTS == 0


def test_a_small_fall_does_not_wake_however_certain() -> None:
    watch = Watch()
    for _ in range(TEXTS):
        watch.add(100, 40)
    watch.pause()
    assert not any(watch.add(92, 40) or watch.fallen() for _ in range(4 * TEXTS))
    assert any(watch.add(89, 40) or watch.fallen() for _ in range(TEXTS))


def test_a_few_texts_decide_nothing() -> None:
    for before, after in ((TEXTS - 1, TEXTS), (TEXTS, TEXTS - 1)):
        watch = Watch()
        for _ in range(before):
            watch.add(100, 20)
        watch.add(1, 0)  # a text of its prefill alone has no rounds
        watch.pause()
        for _ in range(after):
            watch.add(20, 20)
        assert not watch.fallen()
