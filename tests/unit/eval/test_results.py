"""Rows from cells and their bins by context, worked out by hand; each guard fires where it should."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_llama
from unit.decode.test_capability import make_gpt_neo
from unit.eval.made import PLAIN, cell, output, row

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import Round
from draftsmith.eval.evaluation import _repetition, dtype_of, fall, guards
from draftsmith.eval.journal import TextRecord
from draftsmith.eval.results import by_context, greedy_identity, repeated_4grams, row_of, series_of
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel


def bins(*numbers: tuple[int, int, int, float, float]) -> list[dict[str, Any]]:
    return [dict(zip(("start", "end", "rounds", "tau", "accepted"), values, strict=True)) for values in numbers]


def test_a_row() -> None:
    alone = output([Round(0, 0, 0, 1, (), 0.0, 1.0, 1.0)] * 4)
    drafted = output([Round(2, 2, 2, 3, (0.9, 0.7), 0.25, 0.5, 1.0), Round(2, 2, 0, 1, (0.4,), 0.25, 0.5, 1.0)])
    found = row_of(*([cell(text, repeat=repeat) for repeat in range(2)] for text in (alone, drafted)))
    assert found["by_context"] == bins((0, 128, 4, 2.0, 2 / 3))
    assert found["alpha"] == pytest.approx(2 / 3)
    assert found["tau"] == 2.0
    assert (found["acceptance_at"], found["tested_at"]) == ([0.5, 1.0], [4, 2])
    assert (found["baseline_tokens_per_second"], found["tokens_per_second"], found["speedup"]) == (1.0, 2.0, 2.0)
    assert (found["draft_share"], found["verify_share"], found["overhead_share"]) == (0.25, 0.5, 0.25)
    assert (found["prompts"], found["prefill_seconds"]) == (1, 0.5)
    assert found["speedup_interval"] is found["tau_interval"] is None, "one prompt says nothing of others"
    assert (found["drafter"], found["policy"], found["rule"]) == ("d", "chain:draft_length=2", "best lossless")


def test_a_batch_takes_as_long_as_its_longest_text() -> None:
    step = Round(1, 1, 1, 2, (1.0,), 0.5, 1.0, 2.0)
    base = cell(output([Round(0, 0, 0, 1, (), 0.0, 2.0, 2.0)] * 6), output([Round(0, 0, 0, 1, (), 0.0, 2.0, 2.0)] * 2))
    spec = cell(output([step] * 3), output([step]))
    assert (spec.seconds, spec.draft_seconds, spec.verify_seconds) == (6.0, 1.5, 3.0)
    found = row_of([base], [spec])
    assert found["tokens_per_second"] == 8 / 6
    assert found["speedup"] == pytest.approx(2.0)
    assert (found["tau"], found["prompts"]) == (2.0, 2)


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


def test_greedy_identity_names_the_first_divergence() -> None:
    own = [cell(output([], [1, 2, 3]), repeat=repeat) for repeat in range(2)]
    ours = [cell(output([], [1, 2, 3])), cell(output([], [1, 9, 3]), repeat=1)]
    assert greedy_identity(own, ours) == ([1, 2], {"prompt": "0.0", "position": 1})


def test_repetition() -> None:
    assert repeated_4grams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]) == 0.0, "each text for itself"
    assert repeated_4grams([[7] * 7, [1, 2]]) == 0.75
    assert repeated_4grams([[1, 2, 3, 4, 5, 1, 2, 3, 4], [1, 2] * 4]) == 4 / 11
    assert repeated_4grams([]) == 0.0
    rows = [row(repeated_4grams=0.4), row(repeated_4grams=0.5), row(temperature=1.0, repeated_4grams=0.1)]
    (note,) = _repetition([*rows, row(category="qa", temperature=1.0, repeated_4grams=0.9)])
    assert note.startswith("At T=0 50% of the generated 4-grams")


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


ACCEPTED_TWO = Round(2, 2, 2, 3, (1.0, 1.0), 0, 0, 0)
REFUSED_SECOND = Round(2, 2, 1, 2, (1.0, 0.3), 0, 0, 0)
NO_DRAFT = Round(0, 0, 0, 1, (), 0, 0, 0)


def text(prompt_tokens: int, *rounds: Round) -> TextRecord:
    return TextRecord.of("a", replace(output(list(rounds)), prompt_tokens=[1] * prompt_tokens))


def test_bins_by_context_equal_a_count_by_hand() -> None:
    """The prefill's token precedes the first round: after 126 prompt tokens that begins at 127, the next at 130."""
    texts = [text(126, ACCEPTED_TWO, REFUSED_SECOND), text(255, NO_DRAFT, ACCEPTED_TWO, REFUSED_SECOND)]
    assert by_context(texts) == bins((0, 128, 1, 3.0, 1.0), (128, 256, 1, 2.0, 0.5), (256, 512, 3, 2.0, 0.75))
    assert by_context([text(0, ACCEPTED_TWO)]) == [], "its journal does not say how long the prompt was"


@pytest.mark.parametrize(
    ("taus", "rounds", "said"),
    [
        ((2.0, 2.1, 1.6), 50, "tau falls from 2.00 in contexts below 128 tokens to 1.60 from 256 on"),
        ((2.0, 1.2, 1.8), 50, ""),
        ((2.0, 1.2), 49, ""),
        ((2.0,), 50, ""),
    ],
)
def test_a_fall_of_tau_with_the_context_is_noted(taus: tuple[float, ...], rounds: int, said: str) -> None:
    found = fall(bins(*((64 << n if n else 0, 128 << n, rounds, value, 0.5) for n, value in enumerate(taus))))
    assert (found is not None, (found or "").startswith(said)) == (said != "", True)


SAME = {"target": torch.float32, "d": torch.float32, "suffix": None}


@pytest.mark.parametrize(
    ("rows", "plain", "dtypes", "guard", "says"),
    [
        ([row(speedup=2.5, tau=2.4)], PLAIN, SAME, "speedup-above-tau", "speedup 2.50 above tau 2.40"),
        ([row(), row(category="qa", alpha=1.01)], PLAIN, SAME, "alpha-range", "T=0, qa: alpha=1.0100 is no share"),
        ([row(alpha=-0.1)], PLAIN, SAME, "alpha-range", "alpha=-0.1000"),
        ([row()], {**PLAIN, "ratio_interval": [0.7, 0.94]}, SAME, "slow-baseline", "slower here than with"),
        ([row()], PLAIN, {**SAME, "d": torch.float16}, "dtype", "d is in float16, the target in float32"),
    ],
)
def test_each_guard_fires(rows: list, plain: dict[str, Any], dtypes: dict, guard: str, says: str) -> None:
    """And none where all is well: a category of few prompts may be faster than its tau."""
    (found,) = guards(rows, plain, dtypes)
    assert found["guard"] == guard
    assert says in found["message"]
    well = [row(), row(alpha=1.0), row(alpha=0.0), row(alpha=1 + 1e-7), row(category="qa", speedup=1.03, tau=1.0)]
    for bounds in ([0.7, 0.96], None):  # of a noisy machine, and of too few texts
        assert guards(well, {**PLAIN, "ratio": 0.8, "ratio_interval": bounds}, SAME) == []
    earlier = {**PLAIN, "ratio": 0.8, "best_ratio": 0.9}
    del earlier["ratio_interval"]
    assert guards(well, PLAIN, SAME) == guards(well, earlier, SAME) == []


def test_a_batch_may_be_faster_than_its_tau() -> None:
    """Of two texts only the longer one is accepted: 95 rounds of the batch become 19."""
    plain, rejected = Round(0, 0, 0, 1, (), 0.0, 1.0, 1.0), Round(4, 4, 0, 1, (0.0,), 0.0, 1.0, 1.0)
    accepted = Round(4, 4, 4, 5, (1.0,) * 4, 0.0, 1.0, 1.0)
    both = cell(output([plain] * 95), output([plain] * 19)), cell(output([accepted] * 19), output([rejected] * 19))
    found = row_of(*([each] for each in both))
    assert (found["speedup"], found["tau"], found["batch_size"]) == (5.0, 3.0, 2)
    assert guards([found], PLAIN, SAME) == []


def test_dtypes_are_those_of_the_weights() -> None:
    assert dtype_of(DraftModel(make_llama().to(torch.bfloat16))) == torch.bfloat16
    assert dtype_of(Drafter()) is None
