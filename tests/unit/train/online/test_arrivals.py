"""Files of a folder: each once, whole, in the order of their times; a later run continues."""

import os
from pathlib import Path

import pytest

from draftsmith.train.online.arrivals import Arrivals


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "states" / "deep").mkdir(parents=True)
    return tmp_path / "states"


def _put(file: Path, time: int, content: str = "x") -> Path:
    file.write_text(content)
    os.utime(file, (time, time))
    return file


def _new(files: Arrivals) -> list[Path]:
    """Look twice: a file is whole when it has not changed in between."""
    files.look()
    return files.look()


def test_a_file_is_offered_when_it_has_stopped_changing(folder: Path, tmp_path: Path) -> None:
    files = Arrivals(folder, tmp_path / "read")
    file = _put(folder / "a.safetensors", 5)
    assert files.look() == []
    _put(file, 5, "xy")
    assert files.look() == [], "it has grown"
    _put(file, 6, "xz")
    assert files.look() == [], "it was written again"
    assert files.look() == [file]
    assert files.look() == [file], "until it is done"
    files.done(file, delete=False)
    assert files.look() == []
    assert file.exists()


def test_the_oldest_come_first_and_others_are_left_alone(folder: Path, tmp_path: Path) -> None:
    new, old, deep = (_put(folder / name, time) for name, time in
                      (("a.safetensors", 9), ("b.safetensors", 3), ("deep/c.safetensors", 5)))  # fmt: skip
    _put(folder / "c.safetensors.lock", 1)
    assert _new(Arrivals(folder, tmp_path / "read")) == [old, deep, new]


def test_a_later_run_reads_what_is_new(folder: Path, tmp_path: Path) -> None:
    """Also after a kill in the middle of a line of the journal; names of deleted files are dropped from it."""
    journal = tmp_path / "read"
    names = ["a.safetensors", "line\nbreak.safetensors", "c.safetensors", "d.safetensors"]
    files = Arrivals(folder, journal)
    every = [_put(folder / name, time) for time, name in enumerate(names)]
    assert _new(files) == every
    for file in every[:3]:
        files.done(file, delete=False)
    every[0].unlink()
    journal.write_text(journal.read_text() + '[3]\n"d.safeten')
    again = Arrivals(folder, journal)
    assert len(journal.read_text().splitlines()) == 2
    assert _new(again) == every[3:]
    _put(every[0], 1)
    assert _new(again) == [every[0], every[3]], "the name is another file's now"


def test_a_name_is_read_again_once_its_file_was_deleted(folder: Path, tmp_path: Path) -> None:
    files = Arrivals(folder, tmp_path / "read")
    file = _put(folder / "a.safetensors", 1)
    assert _new(files) == [file]
    files.done(file, delete=False)
    file.unlink()
    assert files.look() == []
    _put(file, 1)
    assert _new(files) == [file]


def test_an_unreadable_file_is_left_until_it_changes(folder: Path, tmp_path: Path) -> None:
    files = Arrivals(folder, tmp_path / "read")
    file = _put(folder / "a.safetensors", 1)
    assert _new(files) == [file]
    files.refuse(file, "cut off")
    assert _new(files) == []
    assert [why for _, why in files.unreadable.values()] == ["cut off"]
    _put(file, 2)
    assert _new(files) == [file]
    assert files.unreadable == {}


def test_files_are_deleted_only_if_asked(folder: Path, tmp_path: Path) -> None:
    files = Arrivals(folder, tmp_path / "read")
    kept, deleted = (_put(folder / f"{name}.safetensors", 1) for name in "ab")
    lock = _put(folder / "b.safetensors.lock", 1)
    assert _new(files) == [kept, deleted]
    files.done(kept, delete=False)
    files.done(deleted, delete=True)
    assert kept.exists()
    assert not deleted.exists()
    assert not lock.exists()
    assert (tmp_path / "read").read_text() == '"a.safetensors"\n'
