"""Runs that are continued from checkpoints of others, and runs that end when tau stops rising."""

import shutil
from pathlib import Path

import pytest
import torch
from run_results import as_if_killed, finished, metrics_of, taus_of
from safetensors.torch import load_file

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe import load_recipe
from draftsmith.train.trainer import train


def _train(recipe: Path, folder: Path, *overrides: str) -> Path:
    return train(load_recipe(str(recipe), [f"output={folder}", "drafter.type=medusa", *overrides]))


def _state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = folder / "checkpoints" / f"step-{step:06d}"
    parts = {file.stem: load_file(file) for file in place.glob("*.safetensors")}
    return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}


def _require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_stable_run_is_continued_and_decayed_from_a_checkpoint(recipe_file: Path, tmp_path: Path) -> None:
    """Step 4 of a constant run, continued to 12 steps and decayed by step 8, equals the runs that were never cut.

    The warm-up takes 3 steps of each.
    """
    long = ("train.steps=12", "train.schedule=constant", "train.warmup_fraction=0.25", "train.optimizer=muon")
    short = ("train.steps=8", "train.schedule=wsd", "train.warmup_fraction=0.375", "train.optimizer=muon")
    short += ("train.decay_fraction=0.5",)
    _train(recipe_file, tmp_path / "long", *long, "train.keep_checkpoints=9")
    source = f"continue_from={tmp_path / 'long' / 'checkpoints' / 'step-000004'}"
    for name, overrides in {"long": long, "short": short}.items():
        if name == "short":
            _train(recipe_file, tmp_path / name, *overrides)
        cut = tmp_path / f"{name}-cut"
        _train(recipe_file, cut, source, *overrides)
        last = 12 if name == "long" else 8
        _require_equal(_state(cut, last), _state(tmp_path / name, last))
        after = [row for row in metrics_of(tmp_path / name) if row["step"] > 4]
        assert [row for row in metrics_of(cut) if row["step"] > 4] == after
        first = metrics_of(cut)[0]
        assert first["step"] == 4, "the checkpoint's drafter is the first candidate"
        assert "evaluation" in first
    assert finished(tmp_path / "short-cut")["best_tau"] == max(taus_of(tmp_path / "short-cut"))


def test_a_finished_run_takes_more_steps_where_its_first_ones_stay_the_same(recipe_file: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = ("train.schedule=wsd", "train.checkpoint_every=1", "train.decay_fraction=0.25")
    _train(recipe_file, whole, *options, "train.steps=8", "train.evaluate_every=4")
    _train(recipe_file, run, *options, "train.schedule=constant", "train.steps=4")  # 'wsd' would decay the last rate
    for _ in range(2):  # the second time it is finished
        _train(recipe_file, run, *options, "train.steps=8", "train.evaluate_every=4")
        _require_equal(_state(run, 8), _state(whole, 8))
        assert metrics_of(run) == metrics_of(whole)
        assert finished(run)["steps"] == 8
    newest = r"continue_from=.*/step-000008"
    refusals = {
        "train.steps=7": "expected another output folder$",
        "train.steps=9": r"continue_from=.*/step-000007$",  # the decay begins a step later in this one
        "train.steps=9 train.schedule=linear": newest + "; with train.schedule='linear' its steps had other rates",
        "train.steps=9 train.schedule=constant train.patience=3": newest,
        "train.steps=9 train.batch_size=4": r"batch_size=8 there, 4 here; expected another output folder$",
    }
    for overrides, message in refusals.items():
        with pytest.raises(ConfigError, match=message):
            _train(recipe_file, run, *options, "train.evaluate_every=4", *overrides.split())


def test_a_continued_run_resumes_without_the_checkpoint_that_it_came_from(recipe_file: Path, tmp_path: Path) -> None:
    _train(recipe_file, tmp_path / "first", "train.steps=4", "train.schedule=constant")
    source = f"continue_from={tmp_path / 'first' / 'checkpoints' / 'step-000004'}"
    _train(recipe_file, tmp_path / "second", source)
    whole = metrics_of(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    as_if_killed(tmp_path / "second", 8)
    _train(recipe_file, tmp_path / "second", source)
    assert metrics_of(tmp_path / "second") == whole


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
        (
            ["train.schedule=wsd", "train.decay_fraction=0.75"],
            r"train\.decay_fraction=0\.75 of train\.steps=12, a decay that begins after step 3; expected .* step 4 or",
        ),
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


def test_a_decay_is_continued_as_it_began(recipe_file: Path, tmp_path: Path) -> None:
    decay = ("train.schedule=wsd", "train.decay_fraction=0.75", "train.keep_checkpoints=9")
    _train(recipe_file, tmp_path / "first", *decay)
    source = f"continue_from={tmp_path / 'first' / 'checkpoints' / 'step-000008'}"
    _train(recipe_file, tmp_path / "second", source, *decay)
    _require_equal(_state(tmp_path / "second", 12), _state(tmp_path / "first", 12))


STILL = ("train.learning_rate=1e-9", "train.evaluate_every=2", "train.patience=2", "train.steps=30")
"""At this rate nothing is learnt, so that tau does not rise."""


def test_a_run_ends_when_tau_does_not_rise(recipe_file: Path, tmp_path: Path) -> None:
    _train(recipe_file, tmp_path / "run", *STILL)
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["step"] == 6, "evaluations at steps 0, 2 | 4, 6"
    assert rows[-1]["ending"]["last_step"] == 6
    assert finished(tmp_path / "run")["steps"] == 6
    assert (tmp_path / "run" / "checkpoints" / "step-000006").is_dir()


def test_a_stable_run_decays_when_tau_does_not_rise_also_when_it_is_resumed(recipe_file: Path, tmp_path: Path) -> None:
    overrides = (*STILL, "train.schedule=wsd", "train.decay_fraction=0.2", "train.checkpoint_every=1")
    _train(recipe_file, tmp_path / "run", *overrides)
    rows, state = metrics_of(tmp_path / "run"), _state(tmp_path / "run", 12)
    rates = [row["lr"] / 1e-9 for row in rows if "lr" in row]
    assert len(rates) == 12, "the decay takes 6 of 30 steps, and begins after step 6"
    assert rates[2:] == pytest.approx([1.0] * 4 + [1 - (i / 6) ** 0.5 for i in range(6)])
    as_if_killed(tmp_path / "run", 11)  # during the decay
    _train(recipe_file, tmp_path / "run", *overrides)
    assert metrics_of(tmp_path / "run") == rows
    _require_equal(_state(tmp_path / "run", 12), state)
