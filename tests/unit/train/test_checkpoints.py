"""Checkpoints that are kept, the one that is resumed, and the files on disk before a rename."""

import random
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from draftsmith import storage
from draftsmith.errors import DraftsmithError
from draftsmith.storage import clear_leftovers, write_text
from draftsmith.train.checkpoints import HASHES, STATE, Progress, load_from, load_state, save_state
from draftsmith.train.engine import Engine


def _engine(module: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return Engine(Accelerator(cpu=True), module, [optimizer], clip_norm=1.0)


def _save(folder: Path, step: int, keep: int = 2) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module.weight.sum().backward()
    optimizer.step()
    state = _engine(module, optimizer).state()
    save_state(folder, Progress(step, 1.0, 0), {"name": "x"}, state, keep)


def _load(folder: Path) -> tuple[int | None, list[str]]:
    module = nn.Linear(2, 2)
    progress, problems = load_state(folder, _engine(module, torch.optim.AdamW(module.parameters())).load)
    return None if progress is None else progress.step, problems


def _tear(checkpoint: Path) -> None:
    file = checkpoint / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def test_a_torn_checkpoint_ahead_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    _save(tmp_path, 8)
    _tear(tmp_path / "step-000008")
    step, problems = _load(tmp_path)
    assert step == 4
    assert len(problems) == 1
    _save(tmp_path, 5, keep=1)
    assert _load(tmp_path) == (5, [])


FILES = ("model.safetensors", "optimizer.safetensors", STATE)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_in_any_file_falls_back_to_the_checkpoint_before(file: str, tmp_path: Path) -> None:
    """Bits at random places of headers and tensors; in the state those of its values, as its hashes prove nothing."""
    for step in (4, 8):
        _save(tmp_path, step)
    damaged = tmp_path / "step-000008" / file
    whole = damaged.read_bytes()
    end = whole.index(HASHES.encode()) - 8 if file == STATE else len(whole)  # up to the end of the last value
    dice = random.Random(0)
    for _ in range(40):
        place = dice.randrange(end)
        if file == STATE and whole[place : place + 1].isspace():
            continue  # the values stay the same
        flipped = bytearray(whole)
        flipped[place] ^= 1 << dice.randrange(8)
        damaged.write_bytes(flipped)
        step, problems = _load(tmp_path)
        assert step == 4, f"byte {place}"
        assert problems[0].startswith("checkpoint step-000008 cannot be read (")
        with pytest.raises(DraftsmithError, match="expected an intact checkpoint"):
            load_from(tmp_path / "step-000008", lambda state: None)
    damaged.write_bytes(whole)
    assert _load(tmp_path) == (8, [])
    damaged.unlink()
    assert _load(tmp_path)[0] == 4


def test_a_run_that_continues_another_one_has_its_own_end_and_best_drafter(tmp_path: Path) -> None:
    """The other run ended before its recipe's steps, by `patience`; its fixed tensors have to be those here."""
    module = nn.Linear(2, 2)
    engine = _engine(module, torch.optim.AdamW(module.parameters()))
    progress = Progress(6, 2.5, 4, [0.5], 0.1, evaluated=True, end=6, fixed={"d2t": "1"})
    save_state(tmp_path, progress, {"name": "x"}, engine.state(), 2)
    continued = load_from(tmp_path / "step-000006", engine.load)
    assert continued == Progress(6, 0.0, 0, [0.5], 0.1, evaluated=False, end=None, fixed={"d2t": "1"})
    resumed, _ = load_state(tmp_path, engine.load)
    assert resumed == progress


def test_the_newest_are_kept_and_those_ahead_are_not_counted(tmp_path: Path) -> None:
    """One ahead of the step is damaged, or the run would have resumed from it; steps are numbers, not names."""
    for step in (999_998, 999_999, 1_000_000, 1_000_002):
        _save(tmp_path, step, keep=9)
    _save(tmp_path, 1_000_001, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-1000001"]
    assert _load(tmp_path) == (1_000_001, [])


def test_what_a_kill_left_is_cleared_or_put_back(tmp_path: Path) -> None:
    for name in (".drafter.old-12", ".drafter.tmp-12", ".target.old-7", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".metrics.jsonl.tmp-3").write_text("")
    (tmp_path / ".gitignore").write_text("")
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "drafter", "target"]
    assert (tmp_path / "drafter" / "file").read_text() == ".drafter.old-12"
    assert (tmp_path / "target" / "file").read_text() == "target"


def test_a_text_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "old")

    def full(path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(storage, "_fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
