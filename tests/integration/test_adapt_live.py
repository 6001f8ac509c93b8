"""`draftsmith adapt --live`: requests are answered in their order, and the drafter that learns is saved."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_llama, mostly_slow
from transformers import PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.cli import main
from draftsmith.heads import DraftModel
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.reading import read_json

COUNT = 44


@pytest.fixture
def pair(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    target = make_llama()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=2).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in drafter.named_parameters():
        if "mlp" in name:
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    described = describe_target(target, tiny_tokenizer, str(tmp_path / "target"))
    save_drafter(drafter, tmp_path / "drafter", target=described, recipe=None, draft_length=3)
    return tmp_path / "target", tmp_path / "drafter"


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    rows = [{"prompt": f"abc{'helloworld'[n % 9 :]}{n}", "id": f"r{n}"} for n in range(COUNT)]
    rows[1] = {"turns": ["first", "second"], "id": "r1"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in ("adapt", *arguments)])
    return int(left.value.code or 0)


def saved(out: Path) -> dict:
    return read_json(out / "drafter" / "config.json")["draftsmith"]["online"]


def test_requests_are_answered_and_the_drafter_learns(
    pair: tuple[Path, Path],
    requests: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a file, and again from stdin: the same answers, which are the target's own."""
    target, drafter = pair
    out = tmp_path / "out"
    options = ["--live", "--out", out, "--max-new-tokens", 64, "--every", 16]
    assert run(drafter, requests, *options) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [(line["id"], line["turn"]) for line in lines[:4]] == [("r0", 1), ("r1", 1), ("r1", 2), ("r2", 1)]
    assert len(lines) == COUNT + 1
    model, tokenizer = make_llama(), PreTrainedTokenizerFast.from_pretrained(target)
    for line in lines[3:6]:
        ids = tokenizer(f"abc{'helloworld'[int(line['id'][1:]) % 9 :]}{line['id'][1:]}")["input_ids"]
        expected = SpeculativeDecoder(model).generate(ids, max_new_tokens=64)
        assert line["tokens"] == len(expected.tokens)
        assert line["response"] == tokenizer.decode(expected.tokens, skip_special_tokens=True)
        assert line["tau"] >= 1
    learned = saved(out)
    assert 0 < learned["tokens"] <= sum(line["tokens"] for line in lines)
    assert learned["steps"] > 0
    assert f"learned from {learned['tokens']} tokens: {learned['steps']} steps" in shown.err
    following = f"next: draftsmith eval --target {target} --drafter {out}/drafter --prompts {requests}"
    assert shown.err.splitlines()[-1] == following
    assert load_drafter(out / "drafter", model).online == learned
    for file in out.rglob("*"):
        assert file.is_dir() or b"helloworld" not in file.read_bytes()

    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(requests.read_text().splitlines()[:3]) + "\n"))
    assert run(drafter, "-", *options) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["response"] for line in shown.out.splitlines()] == [line["response"] for line in lines[:4]]
    assert f"continues with {out}/drafter" in shown.err
    assert learned["tokens"] < saved(out)["tokens"] < 2 * learned["tokens"]


def test_what_was_learned_is_saved_before_an_error(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "abcd", "id": 7}\n\n{"prompt": 3\n'))
    assert run(pair[1], "-", "--live", "--out", tmp_path / "out") == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["id"] == "7"
    assert "stdin:3: not JSON" in shown.err
    assert saved(tmp_path / "out")["tokens"] > 0


@pytest.mark.parametrize("stop", mostly_slow([signal.SIGTERM, signal.SIGINT], signal.SIGINT))
def test_a_signal_ends_it_with_a_summary(pair: tuple[Path, Path], tmp_path: Path, stop: signal.Signals) -> None:
    program = "import sys; from draftsmith.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "adapt", pair[1], "-", "--live", "--out", tmp_path / "out"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(list(map(str, command)), env=environment, **pipes) as process:
        process.stdin.write('{"prompt": "abcd"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "#1"
        process.send_signal(stop)
        said = process.stderr.read()
        assert process.stdout.read() == "", "stdout holds answers only, whatever libraries log"
    assert process.returncode in (0, 128 + stop), "in the middle of an answer, or while the next request is awaited"
    assert "learned from" in said
    assert "Traceback" not in said
    assert saved(tmp_path / "out")["tokens"] > 0


def test_what_cannot_be_is_refused(
    pair: tuple[Path, Path], requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "metrics.jsonl").touch()
    for arguments, message in (
        ([drafter, requests, "--out", mine], "holds metrics.jsonl; expected a new folder"),
        ([drafter, requests, "--max-new-tokens", 0], "max-new-tokens=0; expected >= 1"),
        ([drafter, requests, "--every", 0], "every=0; expected >= 1"),
        ([drafter, requests, "--temperature", -1], "temperature=-1.0; expected"),
        ([drafter, requests, "--keep", 2], "--keep with --live; it has no such option"),
        ([drafter, requests, "train.steps=3"], "--live with 'train.steps=3'"),
        ([drafter, requests, "--watch", tmp_path], "--live with --watch"),
        ([drafter, tmp_path / "none.jsonl"], "and there is none"),
        ([drafter], "prompts are missing"),
        (["suffix", requests], "drafter=suffix names no target; expected --target"),
        (["suffix", requests, "--target", target], "type 'suffix', which has no weights of its own"),
    ):
        place = [] if "--out" in arguments else ["--out", tmp_path / "out"]
        assert run(*arguments, "--live", *place) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
    assert run(drafter, requests, "--max-new-tokens", 3) == 2
    assert "--max-new-tokens without --live; expected both" in capsys.readouterr().err
