"""Whole commands on one GPU: a recipe that is killed and resumed, `draftsmith eval` and `draftsmith check`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from runpy import run_path

import pytest
import torch

from draftsmith.cli import main
from draftsmith.train import trainer as loop
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import read_metrics

pytestmark = pytest.mark.gpu
WAITS = 300.0
"""Seconds until a run that is to be killed has taken its first steps; loading CUDA may take long."""


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def run(*arguments: object) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize(("drafter", "precision"), [("draft_model", "no"), ("eagle3", "bf16"), ("medusa", "auto")])
def test_train_resume_and_evaluate(
    drafter: str, precision: str, recipe_file: Path, tiny_target_folder: Path, tmp_path: Path, device: torch.device
) -> None:
    """A run that was killed continues from its last checkpoint, and its drafter is measured by `draftsmith eval`."""
    folder = tmp_path / "run"
    layers = ["drafter.layers=[1,2]"] if drafter == "eagle3" else []
    overrides = [f"drafter.type={drafter}", f"train.mixed_precision={precision}", "train.steps=40", *layers]
    overrides += ["train.learning_rate=1e-2", "train.evaluate_every=20"]
    command = [sys.executable, "-m", "draftsmith.train", str(recipe_file), *overrides]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + WAITS
        while process.poll() is None and time.monotonic() < deadline and len(losses(folder)) < 10:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = losses(folder)
    assert 10 <= len(before) < 40, "the run was to be killed half way"
    best = loop.train(load_recipe(str(recipe_file), overrides))
    after = losses(folder)
    assert list(after) == list(range(1, 41))
    # Sums over atomics, as in the gradient of an embedding, are in another order each time.
    kept = {step: loss for step, loss in after.items() if step in before}
    assert kept == pytest.approx(before, rel=1e-2)
    assert sum(list(after.values())[-5:]) < 0.9 * sum(list(after.values())[:5])
    finished = json.loads((folder / "finished.json").read_text())
    if device.type == "cuda":  # on a CPU pages count, and this process may have had them before
        assert 0 < finished["memory"]["peak_bytes"] <= torch.cuda.get_device_properties(device).total_memory

    out = tmp_path / "eval"
    call = ["eval", "--target", tiny_target_folder, "--drafter", best, "--prompts", tmp_path / "prompts.jsonl"]
    call += ["--count", 3, "--max-new-tokens", 12, "--repeats", 1, "--temperature", 0, "--temperature", 1]
    assert run(*call, "--out", out) == 0
    written = json.loads((out / "eval.json").read_text())
    assert (written["environment"]["accelerator"] is not None) == (device.type == "cuda")
    assert all(row["tau"] >= 1 and row["tokens_per_second"] > 0 for row in written["rows"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_check(dtype: str, recipe_file: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    """The target drafts for itself with two of its layers: greedy texts and draws, in each precision.

    A false alarm has probability 1e-3 for the fixed seed (`draftsmith.eval.lossless.check.ALPHA`).
    """
    out = tmp_path / "check"
    call = ["check", "--target", tiny_target_folder, "--drafter", "early-exit:layers=1", "--dtype", dtype]
    call += ["--prompts", tmp_path / "prompts.jsonl", "--count", 3, "--gamma", 3, "--tokens", 800, "--out", out]
    assert run(*call) == 0
    written = json.loads((out / "check.json").read_text())
    assert written["verdict"] == "lossless"
    assert {arm["temperature"] for arm in written["arms"]} == {0.0, 1.0}


def test_sampling_goes_through_every_batch(recipe_file: Path, tmp_path: Path) -> None:
    """Responses of the target, sampled in batches on the GPU and cached as integers, are read again by the next run."""
    for output in ("first", "second"):
        loop.train(load_recipe(str(recipe_file), [f"output={tmp_path / output}", "train.steps=4", "data.batch_size=7"]))
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert first == pytest.approx(second, rel=1e-3)


def test_the_benchmark_of_large_shapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    sizes = "--shape tiny --batches 1 2 --contexts 8 --temperatures 1 --gamma 3 --max-new-tokens 24 --repeats 1"
    sizes += " --lengths 64 --steps 1"
    monkeypatch.setattr(sys, "argv", ["gpu.py", *sizes.split()])
    monkeypatch.syspath_prepend(str(folder))
    run_path(str(folder / "gpu.py"), run_name="__main__")
    for name in ("decoder", "gpu_training"):  # which the script imported from its folder
        sys.modules.pop(name, None)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.endswith("%")]) == 4 + 3
