"""Writes are atomic, a locked folder is refused to other processes, and fingerprints change with the data."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import printed
from conftest import make_llama
from datasets import Dataset
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from draftsmith.distill.hidden_state_cache import SignalCache
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import Medusa
from draftsmith.heads.checkpoint import save_drafter
from draftsmith.provenance import fingerprint, model_fingerprint
from draftsmith.storage import (
    JsonLines,
    atomic_folder,
    hold_cache,
    hold_folder,
    hold_name,
)


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


def test_files_have_the_permissions_of_the_umask(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    before = os.umask(0o027)
    try:
        with atomic_folder(tmp_path / "atomic") as temporary:
            save_file({"a": torch.zeros(1)}, temporary / "a.safetensors")
        drafter = Medusa.from_target(tiny_target, num_heads=1)
        save_drafter(drafter, tmp_path / "plain", target={}, recipe=None, draft_length=1)
        rows = Dataset.from_list([{"input_ids": [2, 3]}])
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
            cache = SignalCache(tiny_target, rows, (), "float32")
            cache.build([0], OnlineTeacher(tiny_target), lambda: None)
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}


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


HOLDS = """
import sys, time
from pathlib import Path
from draftsmith import storage
with getattr(storage, sys.argv[1])(*sys.argv[3:], Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(how: str, path: Path, *key: str) -> Iterator[subprocess.Popen]:
    """Start a process that holds `path`."""
    command = [sys.executable, "-c", HOLDS, how, str(path), *key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with another("hold_folder", folder, "output") as first:
        says = f"output={folder} is in use by another process; expected another path"
        with pytest.raises(ConfigError, match=says), hold_folder("output", folder):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (folder / ".lock").exists(), "a killed process cannot clean up"
        with hold_folder("output", folder):
            with hold_folder("output", folder):
                pass
            assert (folder / ".lock").exists(), "held twice, given back once"
        assert list(folder.iterdir()) == []


def test_a_new_folder_in_which_nothing_was_written_goes_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_folder("out", tmp_path / "new"):
        1 / 0  # noqa: B018
    with hold_folder("out", tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    with (
        pytest.raises(ConfigError, match=r"out=.*/kept/file is a file; expected a folder"),
        hold_folder("out", tmp_path / "kept" / "file"),
    ):
        pass


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(ConfigError, match=r"cannot be written \((File exists|Not a directory)\)"), hold_cache(path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if Path("/proc").is_dir():
        with pytest.raises(ConfigError, match=r"out=/proc/x cannot be written \("), hold_name("out", Path("/proc/x")):
            pass


COMMANDS = {
    "check": ["check", "--target", "{target}", "--drafter", "prompt-lookup", "--out", "{out}"],
    "forecast": ["forecast", "--target", "{target}", "--drafter", "prompt-lookup", "--out", "{out}"],
    "eval": ["eval", "--target", "{target}", "--drafter", "prompt-lookup", "--out", "{out}"],
    "train": ["train", "{recipe}", "output={out}"],
    "quickstart": ["quickstart", "--out", "{out}"],
    "regenerate": ["data", "regenerate", "{recipe}", "--target", "{target}", "--out", "{out}"],
}


def test_every_command_that_writes_says_who_is_there(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is loaded, without leaving files."""
    out = tmp_path / "out"
    values = {"target": str(tmp_path / "tiny-target"), "recipe": str(recipe_file)}
    with another("hold_folder", out, "out"), another("hold_name", tmp_path / "new", "out"):
        for name, command in COMMANDS.items():
            held = tmp_path / "new" if name == "regenerate" else out  # which writes one file
            code, _, said = printed(capsys, *(part.format(**values, out=held) for part in command))
            assert (code, said.count("\n")) == (2, 1), (name, said)
            assert f"={held} is in use by another process" in said
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert not (tmp_path / "new").exists()


def test_lines_are_read_without_a_change_and_appended_after_the_whole_ones(tmp_path: Path) -> None:
    """Cut at every byte, as a kill or a full disk leaves the file; it is appended to twice."""
    written, values = JsonLines(tmp_path / "new" / "a.jsonl", "then"), [{"a": "é\u2028"}, {}, [1]]
    begins = [written.append(value) for value in values]
    data = written.path.read_bytes()
    assert list(JsonLines(tmp_path / "none", "then").lines()) == []
    assert [written.line(begin) for begin in begins] == [line for _, line in written.lines()]
    for cut in range(len(data) + 1):
        written.path.write_bytes(data[:cut])
        kept = [begin for begin, _ in written.lines()]
        assert kept == begins[: data[:cut].count(b"\n")]
        assert written.path.read_bytes() == data[:cut]
        assert [written.append(5), written.append(6)] == [begin for begin, _ in written.lines()][len(kept) :]
        assert written.path.read_bytes() == data[: data[:cut].rfind(b"\n") + 1] + b"5\n6\n"
