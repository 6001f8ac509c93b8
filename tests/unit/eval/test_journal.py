"""The journal of cells: what survives a kill, and what is refused."""

import json
from pathlib import Path

import pytest
from unit.eval.made import cell, output

from draftsmith.decode.sequence import Round
from draftsmith.errors import ConfigError
from draftsmith.eval.journal import BATCH, JOURNAL, Journal, Numbers, Place, ServedCell, TextRecord, begun, kept
from draftsmith.eval.report import check_report_folder
from draftsmith.eval.settings import Settings

SETTINGS = Settings(target="t", drafters={"d": "x"}, prompts="p", seed=1)
PRINTS = {"target": "t", "drafters": {"d": "w"}, "prompts": "p"}
ENVIRONMENT = {"cpu": "c", "accelerator": None}


def _journal(path: Path, cells: int) -> Journal:
    journal = Journal(path)
    journal.begin(SETTINGS, PRINTS, ENVIRONMENT)
    for repeat in range(cells):
        journal.add(cell(output([Round(1, 1, 1, 2, (1.0,), 0.1, 0.2, 0.4)]), repeat=repeat))
    return journal


def test_a_journal_continues_at_every_place_where_it_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    journal = written = _journal(path, 2)
    written.fact("threads", 1)
    data = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        journal = Journal(path)
        journal.begin(SETTINGS, PRINTS, ENVIRONMENT)
        whole = sum(end <= cut for end in ends)
        assert len(journal.cells) == max(0, min(2, whole - 2))
        assert all(written.cells[key] == found for key, found in journal.cells.items())
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert "run" in lines[0]
        assert "sitting" in lines[-1]
    assert len(journal.sittings) == 2
    path.write_bytes(data)
    journal = Journal(path)
    journal.begin(SETTINGS, PRINTS, ENVIRONMENT)
    assert journal.facts == {"threads": 1}


@pytest.mark.parametrize(
    ("settings", "prints", "message"),
    [
        ({}, {"drafters": {"d": "v"}}, "drafters.d='w' there, 'v' here"),
        ({"batch_sizes": (1, 2)}, {}, r"batch_sizes=\[1\] there, \[1, 2\] here"),
    ],
)
def test_another_run_is_refused_and_nothing_is_touched(
    tmp_path: Path, settings: dict, prints: dict, message: str
) -> None:
    path = tmp_path / "cells.jsonl"
    _journal(path, 1)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="holds another run: " + message):
        Journal(path).begin(SETTINGS.model_copy(update=settings), PRINTS | prints, ENVIRONMENT)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("stored", "now", "message"),
    [
        ({"compile": None}, {}, None),
        ({"compile": None}, {"compile": True}, "compile=False there, True here"),
        ({"learn": False}, {}, None),
        ({"learn": True}, {}, "learn=True there, None here"),
    ],
    ids=["an option that is new", "a new option that is used", "an old option that was off", "an old option"],
)
def test_options_of_another_version(stored: dict, now: dict, message: str | None, tmp_path: Path) -> None:
    """A folder continues where the options that one of the versions does not have are off. None: not stored."""
    path = tmp_path / "cells.jsonl"
    _journal(path, 2)
    first, *others = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["run"]["settings"] = {k: v for k, v in (line["run"]["settings"] | stored).items() if v is not None}
    path.write_text(json.dumps(line) + "\n" + "".join(others))
    journal = Journal(path)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            journal.begin(SETTINGS.model_copy(update=now), PRINTS, ENVIRONMENT)
        return
    journal.begin(SETTINGS.model_copy(update=now), PRINTS, ENVIRONMENT)
    assert len(journal.cells) == 2


def test_damage_before_the_last_line_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    _journal(path, 2)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:9], *lines[3:]]) + "\n")
    with pytest.raises(ConfigError, match=r"cells\.jsonl:3 is damaged"):
        Journal(path).begin(SETTINGS, PRINTS, ENVIRONMENT)


def test_a_journal_that_another_process_writes_is_read_without_a_change(tmp_path: Path) -> None:
    """As an interrupted command does, which has left the lock of the folder."""
    path = tmp_path / JOURNAL
    _journal(path, 2)
    data = path.read_bytes()[:-9]
    path.write_bytes(data)
    assert kept(tmp_path) == f"1 measurements are kept in {path}"
    assert begun(path) is None
    check_report_folder(tmp_path, SETTINGS)
    assert path.read_bytes() == data


def test_where_tokens_came_from() -> None:
    rounds = [
        Round(2, 2, 2, 3, (1.0, 1.0), 0, 0, 0),  # all accepted: a bonus
        Round(2, 2, 1, 2, (1.0, 0.3), 0, 0, 0),  # the second refused: a correction
        Round(0, 0, 0, 1, (), 0, 0, 0),  # no draft
        Round(3, 2, 1, 2, (1.0,), 0, 0, 0),  # a tree whose accepted leaf has no child, though another path is deeper
        Round(3, 3, 2, 2, (1.0, 1.0), 0, 0, 0),  # the second token is an EOS: nothing follows it
    ]
    text = TextRecord.of("a", output(rounds))
    assert text.rounds == ["t", "aab", "ac", "t", "ab", "aa"]
    assert len("".join(text.rounds)) == len(text.tokens)
    assert text.tested == [4, 3], "the fourth round's accepted path had no second token"
    assert text.accepted == [4, 2]
    assert (text.decode_tokens, text.decode_rounds) == (10, 5)


STORED = [f'{BATCH}["tiny", 1.0, 4, 2, 3]', [12, 0.5, 6.0, [5.0, 1.0], None, [["are cut", 2]]]]


def test_batches_of_a_server_are_read_again(tmp_path: Path) -> None:
    path, written = tmp_path / "batches.jsonl", Journal[ServedCell](tmp_path / "batches.jsonl")
    written.begin(SETTINGS, PRINTS, ENVIRONMENT)
    written.add(
        ServedCell(("tiny", ""), Place(2, 1.0, 4, 3, 0), Numbers(12, 0.5, 6.0, (5.0, 1.0), None, (("are cut", 2),)))
    )
    assert json.loads(path.read_text().splitlines()[-1]) == {"fact": STORED}
    journal = Journal[ServedCell](path)
    journal.begin(SETTINGS, PRINTS, ENVIRONMENT)
    assert journal.cells == written.cells


@pytest.mark.parametrize("damaged", [5, [1, 2, 3], [1, float("inf"), 1, []], None])
def test_damaged_batches_of_a_server_are_refused(damaged: object, tmp_path: Path) -> None:
    """None: the name of the batch is damaged."""
    path = tmp_path / "batches.jsonl"
    name, numbers = STORED
    _journal(path, 0).fact(name[:-3] if damaged is None else name, damaged or numbers)
    with pytest.raises(ConfigError, match=r"batches\.jsonl:3: .*expected what `draftsmith eval` wrote"):
        Journal(path).begin(SETTINGS, PRINTS, ENVIRONMENT)
