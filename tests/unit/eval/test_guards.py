"""Each guard fires where it should, and none where all is well."""

from typing import Any

import pytest
import torch
from conftest import make_llama
from unit.eval.made import PLAIN, cell, output, row

from draftsmith.decode.sequence import Round
from draftsmith.eval.evaluation import _repetition, dtype_of, guards
from draftsmith.eval.results import row_of
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel

SAME = {"target": torch.float32, "d": torch.float32, "suffix": None}


def test_none_fires_where_all_is_well() -> None:
    """A category of few prompts may be faster than its tau, and a baseline slower than `generate` on some prompts."""
    rows = [row(), row(alpha=1.0), row(alpha=0.0), row(alpha=1 + 1e-7), row(category="qa", speedup=1.03, tau=1.0)]
    assert guards(rows, PLAIN, SAME) == guards(rows, {**PLAIN, "ratio": 0.94, "best_ratio": 1.02}, SAME) == []


@pytest.mark.parametrize(
    ("rows", "plain", "dtypes", "guard", "says"),
    [
        ([row(speedup=2.5, tau=2.4)], PLAIN, SAME, "speedup-above-tau", "speedup 2.50 above tau 2.40"),
        ([row(), row(category="qa", alpha=1.01)], PLAIN, SAME, "alpha-range", "T=0, qa: alpha=1.0100 is no share"),
        ([row(alpha=-0.1)], PLAIN, SAME, "alpha-range", "alpha=-0.1000"),
        ([row()], {**PLAIN, "ratio": 0.8, "best_ratio": 0.97}, SAME, "slow-baseline", "slower here than with"),
        ([row()], PLAIN, {**SAME, "d": torch.float16}, "dtype", "d is in float16, the target in float32"),
    ],
)
def test_each_fires(rows: list, plain: dict[str, Any], dtypes: dict, guard: str, says: str) -> None:
    (found,) = guards(rows, plain, dtypes)
    assert found["guard"] == guard
    assert says in found["message"]


def test_a_batch_may_be_faster_than_its_tau() -> None:
    """Of two texts only the longer one is accepted: 95 rounds of the batch become 19."""
    plain, rejected = Round(0, 0, 0, 1, (), 0.0, 1.0, 1.0), Round(4, 4, 0, 1, (0.0,), 0.0, 1.0, 1.0)
    accepted = Round(4, 4, 4, 5, (1.0,) * 4, 0.0, 1.0, 1.0)
    found = row_of(
        [cell(output([plain] * 95), output([plain] * 19))], [cell(output([accepted] * 19), output([rejected] * 19))]
    )
    assert (found["speedup"], found["tau"], found["batch_size"]) == (5.0, 3.0, 2)
    assert guards([found], PLAIN, SAME) == []


def test_repetitive_text_is_noted_once_a_temperature() -> None:
    rows = [row(repeated_4grams=0.4), row(repeated_4grams=0.5), row(temperature=1.0, repeated_4grams=0.1)]
    (note,) = _repetition([*rows, row(category="qa", temperature=1.0, repeated_4grams=0.9)])
    assert note.startswith("At T=0 50% of the generated 4-grams")


def test_dtypes_are_those_of_the_weights() -> None:
    assert dtype_of(make_llama().half()) == torch.float16
    assert dtype_of(DraftModel(make_llama().to(torch.bfloat16))) == torch.bfloat16
    assert dtype_of(Drafter()) is None
