"""`draftsmith check` on tiny models: exit codes, what it writes, and what it refuses.

A lossless pair fails a check once in a thousand seeds; the seeds here are fixed.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import run, write_prompts
from conftest import noisy_llama
from forked import Processes, Server

from draftsmith.eval.lossless import check as check_module


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    noisy_llama().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def _main(*arguments: object) -> int:
    return run("check", *arguments)


def test_a_lossless_pair(
    tmp_path: Path, tiny_target_folder: Path, draft_folder: Path, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    call = ["--target", tiny_target_folder, "--drafter", f"d={draft_folder}", "--prompts", prompts, "--gamma", 3]
    call += ["--tokens", 800, "--out", out]
    assert _main(*call) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rule best lossless, T=1: LOSSLESS" in shown
    assert "[bold" not in shown, "styles are not printed as markup"
    assert "3 of 3 greedy texts are the target's own" in shown
    assert "fails once in 1,000" in shown
    written = json.loads((out / "check.json").read_text())
    assert (written["schema"], written["verdict"], written["finished"]) == (1, "lossless", True)
    assert set(written["environment"]) >= {"cpu", "versions", "command"}
    assert written["settings"]["draft_length"] == 3
    greedy, sampled = written["arms"]
    assert greedy["greedy"]["identical"] == 3
    tests = sampled["sampling"]["rule"]["tests"]
    assert len(tests) == len(sampled["sampling"]["control"]["tests"]) == 10
    for test in tests:
        assert 0 <= test["p_value"] <= test["adjusted"] <= 1
        assert 0 < test["detects"] <= 1
    assert min(test["adjusted"] for test in sampled["sampling"]["control"]["tests"]) < 1e-3
    assert shown.split(" next: ")[1].startswith(f"draftsmith eval --target {tiny_target_folder} --drafter d=")
    assert _main(*call, "--seed", 5) == 2
    assert "seed=0 there, 5 here; expected another folder, or --overwrite" in capsys.readouterr().err
    assert _main(*call, "--seed", 5, "--overwrite") == 0
    assert json.loads((out / "check.json").read_text())["settings"]["seed"] == 5


def test_a_lossy_rule(
    tiny_target_folder: Path, draft_folder: Path, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    call = ["--target", tiny_target_folder, "--drafter", draft_folder, "--prompts", prompts, "--gamma", 3]
    assert _main(*call, "--tokens", 500, "--temperature", 1, "--rule", "typical") == 1
    assert "LOSSY: " in capsys.readouterr().out


def test_too_little_evidence(tiny_target_folder: Path, prompts: Path, capsys: pytest.CaptureFixture) -> None:
    """Nothing is ever drafted."""
    call = ["--target", tiny_target_folder, "--drafter", "suffix:min_match=200", "--prompts", prompts]
    assert _main(*call, "--tokens", 500, "--temperature", 1) == 3
    assert "INCONCLUSIVE: nothing was drafted" in capsys.readouterr().out
    assert _main(*call, "--tokens", 500, "--temperature", 1, "--json") == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "inconclusive"


def test_what_is_done_is_kept(
    tmp_path: Path,
    tiny_target_folder: Path,
    draft_folder: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "check_sampling", interrupted)
    out = tmp_path / "out"
    call = ["--target", tiny_target_folder, "--drafter", draft_folder, "--prompts", prompts, "--out", out]
    assert _main(*call) == 130
    said = f"interrupted; what is finished is in {out / 'check.json'}, and the same command continues"
    assert capsys.readouterr().err.splitlines()[-1] == said
    written = json.loads((out / "check.json").read_text())
    assert (written["finished"], written["verdict"], len(written["arms"])) == (False, "inconclusive", 1)


def test_a_killed_check_continues(
    tmp_path: Path,
    tiny_target_folder: Path,
    draft_folder: Path,
    prompts: Path,
    run_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """SIGKILL after the greedy arm: it is kept, by name, and the others are those of a check that was not killed."""
    out, whole, log = tmp_path / "killed", tmp_path / "whole", tmp_path / "killed.log"
    call = ["check", "--target", tiny_target_folder, "--drafter", f"d={draft_folder}", "--prompts", prompts]
    call += ["--gamma", 3, "--tokens", 1500, "--out"]
    processes = Processes(run_server, {})
    (pid,) = processes.start([*map(str, call), str(out)], log, 1, {}, program="draftsmith")
    deadline = time.monotonic() + 100
    while not (out / "check.json").exists():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    assert processes.wait([pid]) == [-signal.SIGKILL], log.read_text()
    assert run(*call, whole) == 0
    expected = json.loads((whole / "check.json").read_text())
    capsys.readouterr()

    def repeated(*_: object, **__: object) -> None:
        raise AssertionError("a finished arm is checked again")

    monkeypatch.setattr(check_module, "check_greedy", repeated)
    assert run(*call, out) == 0
    told, arm = capsys.readouterr(), "d (chain:draft_length=3) at T="
    assert f"kept from an earlier start: {arm}0\n" in told.err
    assert json.loads((out / "check.json").read_text())["arms"] == expected["arms"]
    monkeypatch.setattr(check_module, "check_sampling", repeated)
    assert run(*call, out) == 0
    again = capsys.readouterr()
    assert f"kept from an earlier start: {arm}0; {arm}1\n" in again.err
    assert again.out == told.out
    noisy_llama(0.2).save_pretrained(draft_folder)
    assert run(*call, out) == 2
    assert "holds another check: drafters.d=" in " ".join(capsys.readouterr().err.split())
    stored = json.loads((out / "check.json").read_text())
    (out / "check.json").write_text(json.dumps({**stored, "arms": [{"drafter": "d"}]}))
    assert run(*call, out) == 2
    assert "holds a check.json that is not ours" in " ".join(capsys.readouterr().err.split())


ASSETS = Path(os.environ.get("DRAFTSMITH_ASSETS") or Path(__file__).parents[3] / "shared" / "assets")


@pytest.mark.slow
@pytest.mark.skipif(not (ASSETS / "models").is_dir(), reason="no pretrained models: set DRAFTSMITH_ASSETS")
@pytest.mark.parametrize(("rule", "code"), [("block", 0), ("token", 0), ("typical", 1)])
def test_a_pretrained_pair_that_nobody_here_made(tmp_path: Path, rule: str, code: int) -> None:
    models = ASSETS / "models"
    texts = ["Once upon a time, there was a", "Lily went to the park", "The dog was very", "One day, a boy named Tim"]
    prompts = write_prompts(tmp_path / "stories.jsonl", *texts)
    call = ["--target", models / "stories260K", "--drafter", models / "stories260K-qat-polish256"]
    assert _main(*call, "--prompts", prompts, "--tokens", 4000, "--rule", rule) == code
