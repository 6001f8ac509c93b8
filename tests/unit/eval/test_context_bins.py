"""Acceptance by context length: rounds counted by hand, and the note where tau falls."""

from dataclasses import replace

import pytest
from unit.eval.made import cell, output

from draftsmith.decode.sequence import Round
from draftsmith.eval.evaluation import fall
from draftsmith.eval.journal import TextRecord
from draftsmith.eval.results import by_context, row_of

ACCEPTED_TWO = Round(2, 2, 2, 3, (1.0, 1.0), 0, 0, 0)
REFUSED_SECOND = Round(2, 2, 1, 2, (1.0, 0.3), 0, 0, 0)
NO_DRAFT = Round(0, 0, 0, 1, (), 0, 0, 0)


def text(prompt_tokens: int, *rounds: Round) -> TextRecord:
    return TextRecord.of("a", replace(output(list(rounds)), prompt_tokens=[1] * prompt_tokens))


def test_bins_equal_a_count_by_hand() -> None:
    """The prefill's token precedes the first round: after 126 prompt tokens that begins at 127, the next at 130."""
    texts = [text(126, ACCEPTED_TWO, REFUSED_SECOND), text(255, NO_DRAFT, ACCEPTED_TWO, REFUSED_SECOND)]
    assert by_context(texts) == [
        {"start": 0, "end": 128, "rounds": 1, "tau": 3.0, "accepted": 1.0},
        {"start": 128, "end": 256, "rounds": 1, "tau": 2.0, "accepted": 0.5},
        {"start": 256, "end": 512, "rounds": 3, "tau": 2.0, "accepted": 0.75},
    ]
    assert by_context([text(0, ACCEPTED_TWO)]) == [], "its journal does not say how long the prompt was"


def test_a_row_has_the_bins_of_its_texts() -> None:
    found = row_of([cell(output([NO_DRAFT]), drafter="baseline")], [cell(output([ACCEPTED_TWO, NO_DRAFT]))])
    assert found["by_context"] == [{"start": 0, "end": 128, "rounds": 2, "tau": 2.0, "accepted": 1.0}]


def bins(*taus: float, rounds: int = 50) -> list:
    return [
        {"start": 64 << n if n else 0, "end": 128 << n, "rounds": rounds, "tau": tau, "accepted": 0.5}
        for n, tau in enumerate(taus)
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (bins(2.0, 2.1, 1.6), "tau falls from 2.00 in contexts below 128 tokens to 1.60 from 256 on"),
        (bins(2.0, 1.2, 1.8), None),
        (bins(2.0, 1.2, rounds=49), None),
        (bins(2.0), None),
        ([], None),
    ],
)
def test_a_fall_is_noted(given: list, said: str | None) -> None:
    found = fall(given)
    assert found == said or (found is not None and said is not None and found.startswith(said))
