"""Versions are whole at any moment, and `latest` is the newest."""

from pathlib import Path

import pytest

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.train.online.versions import Versions


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _writes(text: str):
    def write(folder: Path) -> None:
        (folder / "a").write_text(text)

    return write


def test_the_newest_versions_are_kept_and_linked(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 2)
    assert versions.newest() is None
    for number in range(1, 5):
        assert versions.add(_writes(str(number))) == tmp_path / f"v{number:04d}" == versions.newest()
        assert (tmp_path / "latest" / "a").read_text() == str(number)
    assert _names(tmp_path) == {"v0003", "v0004", "latest"}
    assert not (tmp_path / "latest").readlink().is_absolute(), "the folder can be moved"


def test_numbers_go_on_beyond_four_digits(tmp_path: Path) -> None:
    (tmp_path / "v9999").mkdir()
    versions = Versions(tmp_path, 2)
    assert versions.add(_writes("x")).name == "v10000"
    assert versions.add(_writes("x")).name == "v10001"
    assert _names(tmp_path) == {"v10000", "v10001", "latest"}


def test_a_write_that_fails_leaves_the_version_before(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 2)
    versions.add(_writes("1"))

    def fails(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DraftsmithError, match=r"v0002 cannot be written \(No space left on device\)"):
        versions.add(fails)
    assert _names(tmp_path) == {"v0001", "latest"}
    assert (tmp_path / "latest" / "a").read_text() == "1"


def test_what_a_kill_leaves_is_mended(tmp_path: Path) -> None:
    """A kill between the version and its link, in the middle of a version, and while an old one is deleted."""
    versions = Versions(tmp_path, 2)
    for number in range(3):
        versions.add(_writes(str(number)))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("v0002")
    for half in (".v0004.tmp-1", ".v0001.tmp-1"):
        (tmp_path / half).mkdir()
        (tmp_path / half / "a").write_text("half")
    (tmp_path / "v0001").mkdir()
    again = Versions(tmp_path, 2)
    again.mend()
    assert _names(tmp_path) == {"v0002", "v0003", "latest"}
    assert (tmp_path / "latest").readlink() == Path("v0003")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "out", 2)
    versions.require_own(set())
    versions.folder.mkdir()
    versions.add(_writes("1"))
    (versions.folder / "mine.txt").touch()
    versions.require_own({"mine.txt"})
    with pytest.raises(ConfigError, match=r"out=.*out holds mine\.txt; expected a new folder"):
        versions.require_own(set())
