"""Rows from cells, worked out by hand."""

import pytest
from conftest import make_llama
from unit.decode.test_capability import make_gpt_neo
from unit.eval.made import cell, output

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import Round
from draftsmith.eval.journal import Cell
from draftsmith.eval.results import greedy_identity, repeated_4grams, row_of, series_of
from draftsmith.heads.draft_model import DraftModel


def test_a_row() -> None:
    alone = output([Round(0, 0, 0, 1, (), 0.0, 1.0, 1.0)] * 4)
    drafted = output([Round(2, 2, 2, 3, (0.9, 0.7), 0.25, 0.5, 1.0), Round(2, 2, 0, 1, (0.4,), 0.25, 0.5, 1.0)])
    row = row_of(*([cell(text, repeat=repeat) for repeat in range(2)] for text in (alone, drafted)))
    assert row["alpha"] == pytest.approx(2 / 3)
    assert row["tau"] == 2.0
    assert (row["acceptance_at"], row["tested_at"]) == ([0.5, 1.0], [4, 2])
    assert (row["baseline_tokens_per_second"], row["tokens_per_second"], row["speedup"]) == (1.0, 2.0, 2.0)
    assert (row["draft_share"], row["verify_share"], row["overhead_share"]) == (0.25, 0.5, 0.25)
    assert (row["prompts"], row["prefill_seconds"]) == (1, 0.5)
    assert row["speedup_interval"] is row["tau_interval"] is None, "one prompt says nothing of others"
    assert (row["drafter"], row["policy"], row["rule"]) == ("d", "chain:draft_length=2", "best lossless")


def test_the_speedup_is_the_median_ratio_over_repeats() -> None:
    def run(repeat: int, seconds: float) -> Cell:
        return cell(output([Round(1, 1, 1, 2, (1.0,), 0.0, seconds, seconds)]), repeat=repeat)

    # The machine is ten times slower in the last repeat, for both arms: the ratio does not notice.
    row = row_of([run(0, 2), run(1, 2), run(2, 20)], [run(0, 1), run(1, 1), run(2, 10)])
    assert row["speedup"] == 2.0
    assert row["speedup_repeats"] == [2.0, 2.0, 2.0]


def test_a_batch_takes_as_long_as_its_longest_text() -> None:
    step = Round(1, 1, 1, 2, (1.0,), 0.5, 1.0, 2.0)
    base = cell(output([Round(0, 0, 0, 1, (), 0.0, 2.0, 2.0)] * 6), output([Round(0, 0, 0, 1, (), 0.0, 2.0, 2.0)] * 2))
    spec = cell(output([step] * 3), output([step]))
    assert (spec.seconds, spec.draft_seconds, spec.verify_seconds) == (6.0, 1.5, 3.0)
    row = row_of([base], [spec])
    assert row["tokens_per_second"] == 8 / 6
    assert row["speedup"] == pytest.approx(2.0)
    assert (row["tau"], row["prompts"]) == (2.0, 2)


def test_texts_without_shared_passes_take_the_seconds_of_all() -> None:
    """GPT-Neo reads texts one after another, as the target and as the draft model."""
    llama, neo = make_llama(), make_gpt_neo()
    for target, drafter, shared in ((llama, None, True), (neo, None, False), (llama, DraftModel(neo), False)):
        decoder = SpeculativeDecoder(target, drafter)
        outputs = decoder.generate_batch([[3, 4, 5], [6, 7], [8]], max_new_tokens=8, eos_token_id=None)
        longest = [max(outputs, key=lambda output: len(output.rounds))] if shared else outputs
        for part in ("draft_seconds", "verify_seconds", "seconds"):
            expected = sum(getattr(record, part) for output in longest for record in output.rounds)
            assert getattr(cell(*outputs), part) == pytest.approx(expected)


def test_a_text_without_rounds_divides_by_nothing() -> None:
    row = row_of([cell(output([]))], [cell(output([]))])
    assert (row["tau"], row["alpha"], row["speedup"], row["acceptance_at"]) == (0.0, 0.0, 0.0, [])


def test_greedy_identity_names_the_first_divergence() -> None:
    own = [cell(output([], [1, 2, 3]), repeat=repeat) for repeat in range(2)]
    ours = [cell(output([], [1, 2, 3])), cell(output([], [1, 9, 3]), repeat=1)]
    assert greedy_identity(own, ours) == ([1, 2], {"prompt": "0.0", "position": 1})


def test_repetition() -> None:
    assert repeated_4grams([[1, 2, 3, 4, 5]]) == 0.0
    assert repeated_4grams([[7] * 7, [1, 2]]) == 0.75
    assert repeated_4grams([]) == 0.0


def test_series_sum_over_turns_and_texts() -> None:
    step = Round(1, 1, 1, 2, (0.5,), 0.0, 1.0, 1.0)
    series = series_of(
        [cell(output([step] * 2), output([step]), group=g, turn=turn) for g in (3, 1) for turn in (0, 1)]
    )
    assert series["units"] == [["1.0", "1.1"], ["3.0", "3.1"]]
    assert series["tokens"] == [[12.0], [12.0]]
    assert series["rounds"] == [[6.0], [6.0]]
    assert series["seconds"] == [[4.0], [4.0]]
    assert (series["overlap"], series["overlaps"]) == ([[3.0], [3.0]], [[6.0], [6.0]])
