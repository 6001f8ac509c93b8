"""trackio and mlflow, which are extras of their own: they are skipped where the packages are missing."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftsmith.errors import ConfigError
from draftsmith.train import launch
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.trackers import LEGEND

PLACES = ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME")


def _train(recipe: Path, folder: Path, tracker: str) -> None:
    overrides = ["train.steps=4", "train.checkpoint_every=2", "train.evaluate_every=2", "data.validation=3"]
    call = [sys.executable, "-m", "draftsmith.train", str(recipe), f"tracker={tracker}", *overrides]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "training continues without it" not in done.stderr


@pytest.fixture(params=["trackio", "mlflow"])
def tracked(request: pytest.FixtureRequest, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of four steps that was killed after its checkpoint of step 2, once step 4 was logged, and continued."""
    pytest.importorskip(request.param)
    if request.param == "mlflow":
        pytest.importorskip("sqlalchemy")
        pytest.importorskip("alembic")
    for variable in PLACES:
        monkeypatch.delenv(variable, raising=False)
    folder = recipe_file.parent
    _train(recipe_file, folder, request.param)
    (folder / "run" / "finished.json").unlink()
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000004")
    _train(recipe_file, folder, request.param)
    yield request.param
    strangers = {file.name for file in folder.iterdir()}
    assert strangers <= {"run", "cache", "recipe.yaml", "prompts.jsonl", "tiny-target"}, (
        "all of it is in the run's folder"
    )


def test_two_starts_of_a_run_are_one_in_the_tracker(tracked: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "tracker"
    rows = read_metrics(tmp_path / "run")
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    validated = {row["step"]: row["validation"]["loss"] for row in rows if "validation" in row}
    if tracked == "mlflow":
        with sqlite3.connect(place / "mlflow.db") as database:
            (run,) = database.execute("select run_uuid, name from runs")
            found = database.execute("select key, step, value from metrics").fetchall()
            assert ("train/learning_rate", "0.003") in database.execute("select key, value from params").fetchall()
        assert run[1] == "tiny"
        logged = {key: [(step, value) for name, step, value in found if name == key] for key, *_ in found}
        files = {file.name: file for file in (place / "artifacts").rglob("*") if file.is_file()}
        assert LEGEND in files["step-000004.html"].read_text()
    else:
        with sqlite3.connect(place / "draftsmith.db") as database:
            found = database.execute("select run_id, step, metrics from metrics").fetchall()
            ((config,),) = database.execute("select config from configs")
        assert len({run for run, *_ in found}) == 1
        assert json.loads(config)["train/learning_rate"] == 0.003
        values = [(key, step, value) for _, step, text in found for key, value in json.loads(text).items()]
        logged = {key: [(step, value) for name, step, value in values if name == key] for key, *_ in values}
        assert LEGEND in logged["evaluation/sample_1"][-1][1]["_value"]
    assert sorted(step for step, _ in logged["train/loss"]) == [1, 2, 3, 3, 4, 4]
    assert dict(logged["train/loss"]) == pytest.approx(losses)
    assert dict(logged["validation/loss"]) == pytest.approx(validated)
    assert {step for step, _ in logged["train/seconds_by_part/backward"]} == {1, 2, 3, 4}


@pytest.mark.parametrize("tracker", ["trackio", "mlflow"])
def test_a_missing_package_is_named(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == tracker else find_spec(name))
    with pytest.raises(
        ConfigError, match=f"tracker={tracker} is not installed; .* pip install 'draftsmith\\[{tracker}\\]'"
    ):
        launch._require_tracker(tracker)
