"""Runs that are continued from checkpoints of others, averaged weights, and runs that end when tau stops rising."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.trainer import train


def _train(recipe: Path, folder: Path, *overrides: str) -> Path:
    return train(load_recipe(str(recipe), [f"output={folder}", "drafter.type=medusa", *overrides]))


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "memory_bytes")
    return [{key: value for key, value in row.items() if key not in clock} for row in read_metrics(folder)]


def _state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = folder / "checkpoints" / f"step-{step:06d}"
    return {
        f"{file.stem}/{name}": value for file in place.glob("*.safetensors") for name, value in load_file(file).items()
    }


def _require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_stable_run_is_continued_and_decayed_from_a_checkpoint(recipe_file: Path, tmp_path: Path) -> None:
    """Step 4 of a constant run, continued to 12 steps and decayed by step 8, equals the runs that were never cut."""
    long = ("train.steps=12", "train.schedule=constant", "train.optimizer=muon")
    short = ("train.steps=8", "train.schedule=wsd", "train.decay_fraction=0.5", "train.optimizer=muon")
    _train(recipe_file, tmp_path / "long", *long, "train.keep_checkpoints=9")
    source = f"continue_from={tmp_path / 'long' / 'checkpoints' / 'step-000004'}"
    for name, overrides in {"long": long, "short": short}.items():
        if name == "short":
            _train(recipe_file, tmp_path / name, *overrides)
        cut = tmp_path / f"{name}-cut"
        _train(recipe_file, cut, source, *overrides)
        last = 12 if name == "long" else 8
        _require_equal(_state(cut, last), _state(tmp_path / name, last))
        after = [row for row in _rows(tmp_path / name) if row["step"] > 4]
        assert [row for row in _rows(cut) if row["step"] > 4] == after
        first = _rows(cut)[0]
        assert first["step"] == 4, "the checkpoint's drafter is the first candidate"
        assert "evaluation" in first
    taus = [row["evaluation"]["tau"] for row in _rows(tmp_path / "short-cut") if "evaluation" in row]
    assert json.loads((tmp_path / "short-cut" / "finished.json").read_text())["best_tau"] == max(taus)


def test_a_continued_run_resumes_without_the_checkpoint_that_it_came_from(recipe_file: Path, tmp_path: Path) -> None:
    _train(recipe_file, tmp_path / "first", "train.steps=4", "train.schedule=constant")
    source = f"continue_from={tmp_path / 'first' / 'checkpoints' / 'step-000004'}"
    _train(recipe_file, tmp_path / "second", source)
    whole = _rows(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "second" / "finished.json").unlink()
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-000012")  # as if killed after step 8
    _train(recipe_file, tmp_path / "second", source)
    assert _rows(tmp_path / "second") == whole


def test_a_continuation_that_does_not_fit_is_refused(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(recipe_file, tmp_path / "first", "train.steps=4")
    checkpoint = tmp_path / "first" / "checkpoints" / "step-000004"
    refusals = (
        ([f"continue_from={tmp_path}"], r"expected a checkpoint such as runs/NAME/checkpoints/step-001000"),
        (["train.batch_size=4"], r"train\.batch_size=8 there, 4 here; expected the same value"),
        (["data.count=20"], r"data\.count=1000 there, 20 here; expected the same value"),
        (["train.steps=4"], r"train\.steps=4; expected more steps than its 4"),
        (["train.warmup_fraction=0.5"], r"a warm-up \(train\.warmup_fraction=0\.5\) that ends before them"),
    )
    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.train.trainer.make_accelerator", lambda *_: pytest.fail("work began"))
        for overrides, message in refusals:
            with pytest.raises(ConfigError, match=message):
                _train(recipe_file, tmp_path / "second", f"continue_from={checkpoint}", *overrides)
    (checkpoint / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(DraftsmithError, match=r"continue_from=.* cannot be read .*; expected an intact checkpoint"):
        _train(recipe_file, tmp_path / "second", f"continue_from={checkpoint}")
