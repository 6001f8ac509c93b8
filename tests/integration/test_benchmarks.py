"""Benchmark scripts run to the end at tiny sizes. Their figures are not checked: a test asserts no time."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest
import torch

from draftsmith.distill.load_target import load_target
from draftsmith.heads import HEADS
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.train import trainer
from draftsmith.train.progress import PARTS
from draftsmith.train.recipe_sections import TrainSection

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts import each other from their folder."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in ("decoder", "gpu_training"):
        sys.modules.pop(name, None)


def output_of(script: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script and return what it prints."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
    run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The drafter's acceptance is the one that was asked for, and some of its tokens are accepted."""
    sizes = (
        "--shape tiny --batches 1 2 --contexts 8 --max-new-tokens 12 --repeats 1 --gamma 3 --lengths 32 64 --steps 1"
    )
    written = tmp_path / "gpu.json"
    printed = output_of("gpu", f"{sizes} --acceptance 0.7 --json {written}", monkeypatch, capsys)
    stored = json.loads(written.read_text())
    trained = ["EAGLE-3", "EAGLE-3", "EAGLE-3, 256 tokens", "DSpark", "Medusa-5", "draft model"]
    assert [row["trained"] for row in stored["training"]] == trained
    assert [row["tokens"] for row in stored["training"]] == [32, 64, 32, 32, 32, 32]
    assert all(row["estimate"] > 0 and row["ms"] > row["backward"] > 0 for row in stored["training"])
    assert (
        len([line for line in printed.splitlines() if line.startswith(tuple(f"| {name} |" for name in trained))]) == 6
    )
    assert [cell["batch"] for cell in stored["decoding"]] == [1, 1, 2, 2]
    assert f"torch {torch.__version__}, transformers " in printed
    cells = re.findall(r"T=(.*), batch (.*), context 8, 12 new tokens, acceptance (.*) on random tokens, ", printed)
    assert [cell[:2] for cell in cells] == [("0", "1"), ("1", "1"), ("0", "2"), ("1", "2")]
    # Under greedy decoding the share of 512 tokens is chosen, in steps of 1/512.
    assert all(float(acceptance) == pytest.approx(0.7, abs=0.02) for *_, acceptance in cells)
    sides = [line[:18].strip() for line in printed.splitlines() if line.endswith("%")]
    beside = ["generate", "alone, eager", "drafter, eager"]
    assert sides == [*2 * [beside[0], "assisted", *beside[1:]], *2 * beside]
    taus = [float(line[27:34]) for line in printed.splitlines() if line.startswith("drafter, eager")]
    assert taus[-1] > 1


def test_gpu_ends_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of("gpu", "--shape tiny --batches 1 --contexts 8 --lengths 32 --minutes 0", monkeypatch, capsys)
    assert "Medusa-5: not measured, half of the minutes have passed" in printed
    assert "T=0, batch 1, context 8: not measured, 0 minutes have passed" in printed
    assert "ms/round" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--acceptance 1 --shape tiny", "--acceptance 1.0; expected a probability between 0 and 1"),
        ("--max-new-tokens 9 --shape tiny", "--max-new-tokens 9; expected two rounds of gamma [+] 1 tokens"),
        ("", "--shape qwen3-8b needs a GPU, and torch finds none; --shape tiny runs on a CPU"),
    ],
)
def test_gpu_refuses(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        output_of("gpu", arguments, monkeypatch, capsys)


@pytest.mark.slow
def test_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of a run is measured beside a plain loop, in this process and for memory in others."""
    sizes = "--drafters medusa --hidden 64 --layers 2 --vocab 512 --length 32 --batch 2 --chunk 64 --steps 1"
    printed = output_of("training", sizes, monkeypatch, capsys)
    (row,) = [line for line in printed.splitlines() if "medusa" in line]
    cells = [cell.strip() for cell in row.strip("│ \n").split("│")]
    assert len(cells) == 4 + len(PARTS) + 1 + 5
    assert sum(float(cell.rstrip("%")) for cell in cells[4 : 4 + len(PARTS)]) > 80, "the parts are the whole step"


@pytest.mark.slow
def test_batches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--pair tiny --batches 1 3 --max-new-tokens 6 --repeats 1 --cpu-time"
    printed = output_of("batches", sizes, monkeypatch, capsys)
    rows = re.findall(r"^ +(\d)  T=(\d) +(plain|top-p|penalty) +(equal|padded) .*%$", printed, re.MULTILINE)
    assert len(rows) == 5 + 10
    assert len(set(rows)) == len(rows)
    assert "\nbatch 3: on-policy sampling " in printed


def test_decoding_peers_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = load_target("embedded").model
    drafter, made_for = HEADS["medusa"].from_target(target), describe_target(target, None, "embedded")
    save_drafter(drafter, tmp_path / "drafter", target=made_for, recipe=None, draft_length=3)
    with pytest.raises(SystemExit, match="--drafter is of type medusa; expected draft_model, dflash or eagle3"):
        output_of("decoding_peers", f"--drafter {tmp_path / 'drafter'} --prompts 1", monkeypatch, capsys)


@pytest.mark.slow
def test_equal_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run without time takes one step, and both are compared on the same rows."""
    sizes = "data.count=24 data.prompt_tokens=8 data.response_tokens=16 data.validation=4 train.batch_size=4"
    few = f"{sizes} evaluation.count=1 evaluation.max_new_tokens=2"
    runs = ("--run", "heads medusa/embedded", "--run", "mtp mtp/embedded train.draft_length=2")
    arguments = ["equal_time.py", "--seconds", "0.001", "--out", str(tmp_path), *runs, "--common", *few.split()]
    monkeypatch.setattr(sys, "argv", arguments)
    for owner, name in ((trainer, "TrainingRun"), (TrainSection, "rate")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # which the script replaces
    run_path(str(SCRIPTS / "equal_time.py"), run_name="__main__")
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[:2]] for row in rows] == [["heads", "1"], ["mtp", "1"]]
    assert all(1 <= float(row[3]) < 6 for row in rows)
