"""Writes are atomic; fingerprints change with the data that they identify."""

from pathlib import Path

import pytest
from conftest import make_llama

from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint, model_fingerprint
from draftsmith.storage import atomic_folder, cache_dir, require_writable, write_text


def _fill(folder: Path, text: str, fail: bool = False) -> None:
    with atomic_folder(folder) as temporary:
        (temporary / "a.txt").write_text(text)
        if fail:
            raise OSError("no space left on device")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kept"
    with pytest.raises(OSError, match="no space"):
        _fill(folder, "half", fail=True)
    assert not folder.exists()
    _fill(folder, "old")
    with pytest.raises(OSError, match="no space"):
        _fill(folder, "half", fail=True)
    assert (folder / "a.txt").read_text() == "old"
    _fill(folder, "new")
    assert (folder / "a.txt").read_text() == "new"
    assert [entry.name for entry in folder.parent.iterdir()] == ["kept"], "nothing temporary is left"


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path / "kept", "old")
    rename = Path.rename

    def refused(place: Path, to: Path) -> Path:
        if to == tmp_path / "kept" and ".tmp-" in place.name:
            raise OSError("input/output error")
        return rename(place, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="input/output"):
        _fill(tmp_path / "kept", "new")
    assert [(entry.name, (entry / "a.txt").read_text()) for entry in tmp_path.iterdir()] == [("kept", "old")]


def test_text_is_replaced_and_nothing_temporary_is_left(tmp_path: Path) -> None:
    write_text(tmp_path / "x" / "a.txt", "one")
    write_text(tmp_path / "x" / "a.txt", "two")
    assert [file.read_text() for file in (tmp_path / "x").iterdir()] == ["two"]


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path


def test_fingerprints() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
    assert model_fingerprint(make_llama(0)) == model_fingerprint(make_llama(0)) != model_fingerprint(make_llama(1))


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    with atomic_folder(tmp_path / "link") as temporary:
        (temporary / "file").touch()
    assert (tmp_path / "link").is_symlink()
    assert [file.name for file in (tmp_path / "disk" / "real").iterdir()] == ["file"]
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["disk", "file", "link", "real"]


def test_where_a_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    require_writable("out", tmp_path / "new" / "newer")
    for folder, message in ((Path(), "has no name"), (tmp_path / "file" / "new", f"be made in {tmp_path}/file;")):
        with pytest.raises(ConfigError, match=f"out={folder} .*{message}"):
            require_writable("out", folder)
