"""A locked folder is refused to other processes; for a part of the cache they wait; a kill leaves no lock."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.errors import ConfigError
from draftsmith.storage import hold_cache, hold_folder

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


def test_a_part_of_the_cache_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The waiting process continues after the other one ends, and after it is killed."""
    for end in (lambda process: process.stdin.close(), lambda process: process.kill()):
        with another("hold_cache", tmp_path / "samples") as first:
            got = threading.Event()

            def waits(got: threading.Event = got) -> None:
                with hold_cache(tmp_path / "samples"):
                    got.set()

            thread = threading.Thread(target=waits)
            thread.start()
            assert not got.wait(0.5)
            end(first)
            thread.join(60)
            assert got.is_set()
        assert f"waiting for another process, which is writing {tmp_path}" in capfd.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(ConfigError, match=r"cannot be written \((File exists|Not a directory)\)"), hold_cache(path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
            with pytest.raises(SystemExit) as stop:
                main([part.format(**values, out=held) for part in command])
            said = capsys.readouterr().err.splitlines()
            assert (stop.value.code, len(said)) == (2, 1), (name, said)
            assert f"={held} is in use by another process" in said[0], said
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert not (tmp_path / "new").exists()
