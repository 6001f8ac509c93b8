"""The numbers of a row, worked out by hand."""

import pytest

from draftsmith.decode.output import DecodeOutput, Round
from draftsmith.eval.metrics import Measured, greedy_identity, repeated_4grams, row_numbers
from draftsmith.eval.prompts import Prompt

PROMPT = Prompt("a", "all", [1])


def _output(rounds: list[Round], tokens: list[int] | None = None) -> DecodeOutput:
    count = 1 + sum(record.committed for record in rounds)
    return DecodeOutput([1], tokens or list(range(count)), rounds, 0.5, "length")


def test_row_numbers() -> None:
    alone = [Round(0, 0, 0, 1, (), 0.0, 1.0, 1.0)] * 4
    drafted = [Round(2, 2, 2, 3, (0.9, 0.7), 0.25, 0.5, 1.0), Round(2, 2, 0, 1, (0.4,), 0.25, 0.5, 1.0)]
    baseline = [Measured(PROMPT, repeat, _output(alone)) for repeat in range(2)]
    row = row_numbers(baseline, [Measured(PROMPT, repeat, _output(drafted)) for repeat in range(2)])
    assert row["alpha"] == pytest.approx(2 / 3)
    assert row["tau"] == 2.0
    assert row["acceptance_at"] == [0.5, 1.0]
    assert (row["baseline_tokens_per_second"], row["tokens_per_second"], row["speedup"]) == (1.0, 2.0, 2.0)
    assert (row["draft_share"], row["verify_share"], row["overhead_share"]) == (0.25, 0.5, 0.25)
    assert row["prompts"] == 1


def test_the_speedup_is_the_median_ratio_over_repeats() -> None:
    def run(repeat: int, seconds: float) -> Measured:
        return Measured(PROMPT, repeat, _output([Round(1, 1, 1, 2, (1.0,), 0.0, seconds, seconds)]))

    # The machine is ten times slower in the last repeat, for both arms: the ratio does not notice.
    row = row_numbers([run(0, 2), run(1, 2), run(2, 20)], [run(0, 1), run(1, 1), run(2, 10)])
    assert row["speedup"] == 2.0
    assert row["speedup_repeats"] == [2.0, 2.0, 2.0]


def test_a_text_without_rounds_divides_by_nothing() -> None:
    row = row_numbers([Measured(PROMPT, 0, _output([]))], [Measured(PROMPT, 0, _output([]))])
    assert (row["tau"], row["alpha"], row["speedup"], row["acceptance_at"]) == (0.0, 0.0, 0.0, [])


def test_greedy_identity_names_the_first_divergence() -> None:
    own = [Measured(PROMPT, 0, _output([], [1, 2, 3])), Measured(PROMPT, 1, _output([], [1, 2, 3]))]
    ours = [Measured(PROMPT, 0, _output([], [1, 2, 3])), Measured(PROMPT, 1, _output([], [1, 9, 3]))]
    found = greedy_identity(own, ours)
    assert found == {"greedy_identical": [1, 2], "first_divergence": {"prompt": "a", "position": 1}}


def test_repetition() -> None:
    assert repeated_4grams([[1, 2, 3, 4, 5]]) == 0.0
    assert repeated_4grams([[7] * 7, [1, 2]]) == 0.75
    assert repeated_4grams([]) == 0.0
