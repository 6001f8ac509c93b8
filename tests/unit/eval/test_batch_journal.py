"""The journal of a served measurement: continued after a cut line, and refused in one line where it cannot be."""

import json
from pathlib import Path

import pytest

from draftsmith.errors import ConfigError
from draftsmith.eval.server.measure import BatchJournal, Numbers

PLACE = ["alone", 1.0, 2, 0, 0]
NUMBERS = Numbers(12, 0.5, 6.0, (5.0, 1.0))


def test_batches_are_read_again_without_a_cut_line(tmp_path: Path) -> None:
    file = tmp_path / "batches.jsonl"
    journal = BatchJournal(file, "key")
    journal.add(PLACE, NUMBERS)
    journal.add([*PLACE[:-1], 1], NUMBERS)
    file.write_text(file.read_text()[:-3])
    again = BatchJournal(file, "key")
    assert again.get(PLACE) == NUMBERS
    assert again.get([*PLACE[:-1], 1]) is None
    assert len(file.read_text().splitlines()) == 2
    again.add([*PLACE[:-1], 1], NUMBERS)
    assert BatchJournal(file, "key").get([*PLACE[:-1], 1]) == NUMBERS
    file.write_text(file.read_text()[:2])
    BatchJournal(file, "another key").add(PLACE, NUMBERS)
    assert BatchJournal(file, "another key").get(PLACE) == NUMBERS


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "[[1], 5]", '[["a"], [1, 2, 3]]', '[["a"], [1, 2, 3, 4]]', '[["a"], [Infinity, 1, 1, []]]', '"text"'],
)
def test_a_damaged_journal_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "batches.jsonl"
    file.write_text(json.dumps("key") + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"is damaged .*; expected another --out"):
        BatchJournal(file, "key")


def test_a_journal_of_other_options_is_refused(tmp_path: Path) -> None:
    """A measurement that ended before its first batch leaves no journal."""
    BatchJournal(tmp_path / "batches.jsonl", "no batch")
    assert not list(tmp_path.iterdir())
    BatchJournal(tmp_path / "batches.jsonl", "key").add(PLACE, NUMBERS)
    with pytest.raises(ConfigError, match="with other options"):
        BatchJournal(tmp_path / "batches.jsonl", "another key")
