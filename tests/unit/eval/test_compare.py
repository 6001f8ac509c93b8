"""Comparisons of measurements whose truth is known."""

import pytest
from unit.eval.made import measured

from draftsmith.errors import ConfigError
from draftsmith.eval.compare import compare_evaluations, comparison_table


def test_a_real_difference_is_seen_through_prompts_that_differ_far_more() -> None:
    """10 % apart, prompts from 0.6 to 1.4: only pairing by prompt shows it. At 30 prompts, 3 repeats and 5 % noise the
    ratio's standard error is about 0.012, so that 1 lies eight of them away."""
    (comparison,) = compare_evaluations(measured("old", 1.5), measured("new", 1.65, seed=1))
    assert comparison.speedup.real
    assert comparison.tau.real
    assert comparison.speedup.low < 1.1 < comparison.speedup.high
    assert comparison.sentence.startswith("T=0: B's new (γ=4) is ")
    assert "faster than A's old (γ=4)" in comparison.sentence
    (other,) = compare_evaluations(measured("new", 1.65, seed=1), measured("old", 1.5))
    assert "A's new (γ=4) is " in other.sentence
    assert other.speedup.ratio == pytest.approx(1 / comparison.speedup.ratio)
    assert comparison_table([comparison, other]).row_count == 2


def test_speedups_of_two_engines_are_no_speeds() -> None:
    """Each is relative to the target alone in its own engine, whose speeds differ."""
    local, served = measured("d", 2.4), measured("d", 1.0, seed=1)
    served["server"] = [{"temperature": 1.0, "concurrency": 1}]
    (comparison,) = compare_evaluations(local, served)
    assert "faster" not in comparison.sentence
    assert comparison.sentence.startswith("T=0: the speedup of A's d (γ=4) is 2.")
    assert "times that of B's d (γ=4), each over the target alone in its own engine" in comparison.sentence


def test_equal_drafters_are_told_apart_at_the_stated_rate_only() -> None:
    """40 pairs without a difference: each is called real with probability 0.05, slightly more at 30 prompts. More than
    8 have probability 1e-4 at 0.05 and 0.002 at 0.07; the seeds are fixed."""
    found = sum(
        compare_evaluations(measured("a", 1.5, seed=seed), measured("a", 1.5, seed=1000 + seed))[0].speedup.real
        for seed in range(40)
    )
    assert found <= 8


def test_equal_measurements_without_noise_are_no_difference() -> None:
    """Their intervals are [1, 1]: greedy decoding gives the same number of rounds in every repeat."""
    (comparison,) = compare_evaluations(measured("a", 1.5, noise=0.0), measured("a", 1.5, noise=0.0))
    for contrast in (comparison.speedup, comparison.tau):
        assert (contrast.low, contrast.high) == (1.0, 1.0)
        assert not contrast.real
    assert "no difference in speed" in comparison.sentence
    assert "tau does not differ measurably" in comparison.sentence
    assert "*" not in str(list(comparison_table([comparison]).columns[5].cells))


def test_which_arms_meet() -> None:
    a, b = measured("x", 1.5), measured("x", 1.5, seed=1)
    a["measurements"] += (
        measured("y", 2.0)["measurements"][1:] + measured("x", 1.8, policy="adaptive")["measurements"][1:]
    )
    met = [(v.a, v.b) for v in compare_evaluations(a, b)]
    assert met == [("A's x (γ=4)", "B's x (γ=4)")], "one name and one policy on both sides"
    met = [(v.a, v.b) for v in compare_evaluations(a, measured("z", 1.5))]
    assert met == [("A's x (γ=4)", "B's z (γ=4)"), ("A's y (γ=4)", "B's z (γ=4)")]
    met = [(v.a, v.b) for v in compare_evaluations(a, measured("x", 1.5, policy="sampled-tree:size=4"))]
    assert len(met) == 3, "no policy in common: all meet all"
    met = [(v.a, v.b) for v in compare_evaluations(a, None)]
    assert met == [("x (γ=4)", "y (γ=4)"), ("x (γ=4)", "x (adaptive)"), ("y (γ=4)", "x (adaptive)")]


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("settings", "max_new_tokens", 7, "max_new_tokens=96 in A, 7 in B"),
        ("identity", "prompts", "p1", r"prompts='p.jsonl \(p0\)' in A, 'p.jsonl \(p1\)' in B"),
        ("environment", "torch_threads", 99, "torch_threads=.* in A, 99 in B"),
    ],
)
def test_what_says_nothing_is_refused(part: str, key: str, value: object, message: str) -> None:
    other = measured("b", 1.5)
    other[part][key] = value
    with pytest.raises(ConfigError, match=message):
        compare_evaluations(measured("a", 1.5), other)


def test_cards_and_other_temperatures_are_refused() -> None:
    with pytest.raises(ConfigError, match="without measurements"):
        compare_evaluations({**measured("a", 1.5), "measurements": []}, measured("b", 1.5))
    other = measured("b", 1.5)
    for entry in other["measurements"]:
        entry["temperature"] = 1.0
    with pytest.raises(ConfigError, match="no drafters to compare at any common temperature"):
        compare_evaluations(measured("a", 1.5), other)
    with pytest.raises(ConfigError, match="prompts=1; expected at least 2"):
        compare_evaluations(measured("a", 1.5, prompts=1), measured("b", 1.5, prompts=1))
