"""`draftsmith adapt --watch`: a drafter that learns from states in a folder which the test fills."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.cli import main
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import DraftModel, Eagle3, Medusa
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.reading import read_json
from draftsmith.train.online import exported
from draftsmith.train.online.buffer import CONTEXT, ROW_TOKENS
from draftsmith.train.online.exported import held_back

DEPTH = 4
PROMPTS = [[int(x) for x in torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(i))] for i in range(400)]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "POLL", 0.05)


@pytest.fixture
def target(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = make_llama(num_hidden_layers=DEPTH).requires_grad_(False)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return model


def saved(drafter: TrainableDrafter, target: LlamaForCausalLM, place: Path) -> Path:
    described = describe_target(target, None, str(place.parent / "target"))
    save_drafter(drafter, place, target=described, recipe={"name": "tiny"}, draft_length=3)
    return place


@pytest.fixture
def drafter(target: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The target with noise, which is quickly unlearned."""
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=DEPTH).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in drafter.named_parameters():
        if "mlp" in name:
            weight.add_(0.15 * torch.randn(weight.shape, generator=generator))
    return saved(drafter, target, tmp_path / "drafter")


def fill(folder: Path, target: LlamaForCausalLM, numbers: range, layers: tuple[int, ...] = (DEPTH,)) -> None:
    """Write states as vLLM's connector does: the output of each layer, before the last norm."""
    folder.mkdir(exist_ok=True)
    decoder = SpeculativeDecoder(target)
    some = [PROMPTS[number] for number in numbers]
    outputs = decoder.generate_batch(some, max_new_tokens=60, temperature=1.0, seeds=numbers[0], eos_token_id=None)
    teacher = OnlineTeacher(target, layers)
    for number, output in zip(numbers, outputs, strict=True):
        ids_1T = torch.tensor([[*output.prompt_tokens, *output.tokens]])
        features_TF = teacher.signals(ids_1T, torch.ones_like(ids_1T), ids_1T > 0).features_BTF[0]
        states_TSH = features_TF.reshape(len(ids_1T[0]), len(layers), -1).contiguous()
        save_file({"token_ids": ids_1T[0], "hidden_states": states_TSH}, folder / f"cmpl-{number}-0.safetensors")
        (folder / f"cmpl-{number}-0.safetensors.lock").touch()


def run(drafter: Path, folder: Path, out: Path, *options: object) -> int:
    command = ["adapt", drafter, "--watch", folder, "--out", out, "--idle-minutes", 0.04, *options]
    with pytest.raises(SystemExit) as left:
        main([str(part) for part in command])
    return int(left.value.code or 0)


def tau(drafter: Path, target: LlamaForCausalLM) -> float:
    decoder = SpeculativeDecoder(target, load_drafter(drafter, target), draft_length=3)
    outputs = decoder.generate_batch(PROMPTS[-16:], max_new_tokens=40, eos_token_id=None, temperature=1.0, seeds=0)
    rounds = [record for output in outputs for record in output.rounds]
    return sum(record.committed for record in rounds) / len(rounds)


def section(version: Path) -> dict:
    return read_json(version / "drafter" / "config.json")["draftsmith"]


def said(capsys: pytest.CaptureFixture) -> str:
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_better_drafters_become_versions(
    target: LlamaForCausalLM, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In the engine's layout too; a second run continues with the newest one, and reads only what is new."""
    states, out = tmp_path / "states", tmp_path / "out"
    fill(states, target, range(72))
    assert run(drafter, states, out, "--every", 16, "--format", "transformers", "--keep", 2) == 0
    shown, newest = said(capsys), (out / "latest").resolve()
    learned = section(newest)
    assert "72 files read; learned from 4608 tokens" in shown
    assert learned["online"]["adopted"] >= 1
    assert (learned["recipe"], learned["draft_length"]) == ({"name": "tiny"}, 3)
    assert int(newest.name[1:]) == 1 + learned["online"]["adopted"], "the first one is the given drafter"
    assert len(list(out.glob("v*"))) == 2
    before, after = tau(drafter, target), tau(newest / "drafter", target)
    assert after > 1.05 * before
    assert tau(newest / "transformers", target) == after, "an engine reads the same drafter"
    assert shown.endswith(f"next: draftsmith eval --target {tmp_path}/target --drafter {out}/latest/drafter")
    assert len(list(states.glob("*.safetensors"))) == 72

    fill(states, target, range(72, 76))
    assert run(drafter, states, out, "--delete-read", "--format", "transformers") == 0
    shown = said(capsys)
    assert f"continues with {newest}" in shown
    assert "4 files read; learned from" in shown
    assert "new version" not in shown
    assert sorted(states.iterdir()) == sorted(
        file for number in range(72) for file in states.glob(f"cmpl-{number}-0.safetensors*")
    )
    assert run(drafter, states, out, "--format", "native") == 2
    assert "format='native'; expected vllm, sglang, gguf, transformers for a drafter of type draft_model" in said(
        capsys
    )


def test_features_of_files_are_those_that_the_drafter_reads(
    target: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """EAGLE-3 reads layers in an order of its own; a file that changes, is cut or is another's is left out."""
    states, out = tmp_path / "states", tmp_path / "out"
    drafter = saved(Eagle3.from_target(target, layers=(1, 3)), target, tmp_path / "drafter")
    fill(states, target, range(64), layers=(3, DEPTH, 1))
    whole = (states / "cmpl-1-0.safetensors").read_bytes()
    (states / "cut.safetensors").write_bytes(whole[:-9])
    save_file({"token_ids": torch.tensor([1, 2]), "hidden_states": torch.zeros(2, 1, 32)}, states / "one.safetensors")
    nan = torch.full((40, 3, 32), torch.nan)
    save_file({"token_ids": torch.arange(40), "hidden_states": nan}, states / "nan.safetensors")
    assert run(drafter, states, out, "--every", 16, "--format", "vllm") == 0
    shown = said(capsys)
    assert "64 files read, 3 unreadable; learned from" in shown
    assert "one.safetensors: 1 layers instead of 3: left until it changes" in shown
    assert "nan.safetensors: states that are not finite" in shown
    assert shown.count("cut.safetensors: ") == 1
    assert section(out / "latest")["online"]["steps"] > 0
    assert load_drafter(out / "latest" / "vllm", target).type == "eagle3"
    (states / "cut.safetensors").write_bytes(whole)
    assert run(drafter, states, out, "--format", "vllm") == 0
    assert "1 files read, 2 unreadable" in said(capsys)


def test_rows_hold_the_targets_own_states(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Of a long text in several rows, with spans that the file names, for a head and for EAGLE-3."""
    ids = torch.randint(2, 64, (100,), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(100, dtype=torch.int64)
    mask[10:90] = 1
    known = OnlineTeacher(target, (1, 3)).signals(ids[None], torch.ones(1, 100).long(), ids[None] > 0)
    layers = known.features_BTF[0].reshape(100, 2, -1)
    stored = torch.cat([known.hidden_BTH[0][:, None], layers], 1).contiguous()
    (tmp_path / "states").mkdir()
    save_file({"token_ids": ids, "loss_mask": mask, "hidden_states": stored}, tmp_path / "states" / "a.safetensors")
    for kind in (Eagle3.from_target(target, layers=(3, 1)), Medusa.from_target(target)):
        place = saved(kind, target, tmp_path / f"{kind.type}")
        request = exported.WatchRequest(str(place), tmp_path / "states", tmp_path / f"out-{kind.type}", keep=1)
        loaded = exported.load_target(str(tmp_path / "target"))
        request.out.mkdir()
        watch = exported._Watch(request, exported.Versions(request.out, 1), loaded, str(place), print)
        (file,) = [watch._files.look(), watch._files.look()][1]
        watch._recognised([file])
        text = watch._opened(file)
        assert len(text.ids_T) == 90, "what follows may be padding"
        rows = list(watch._rows(text.ids_T.tolist(), text))
        assert [len(row.text.tokens) - row.text.prompt_length for row in rows] == [ROW_TOKENS, 80 - ROW_TOKENS]
        for row, start in zip(rows, (10, 10 + ROW_TOKENS), strict=True):
            end = start + len(row.text.tokens) - row.text.prompt_length
            begin = end - len(row.text.tokens)
            assert row.text.tokens == ids[begin:end].tolist()
            assert begin == max(start - 1 - (CONTEXT if kind.type == "eagle3" else 0), 0)
            torch.testing.assert_close(row.hidden_nH, known.hidden_BTH[0, start - 1 : end - 1], rtol=1e-4, atol=1e-4)
            if row.features_TF is not None:
                expected_TF = layers[begin : end - 1].flip(1).flatten(1)
                torch.testing.assert_close(row.features_TF, expected_TF, rtol=1e-4, atol=1e-4)


def test_a_text_is_always_on_the_same_side() -> None:
    sides = [held_back([number, 7]) for number in range(400)]
    assert sides == [held_back([number, 7]) for number in range(400)]
    # A binomial of 400 and 1/4 has a standard deviation of 8.7; the texts are fixed, so this never fails by chance.
    assert 70 < sum(sides) < 130


def test_what_cannot_be_watched_is_refused(
    target: LlamaForCausalLM, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    states, out = tmp_path / "states", tmp_path / "out"
    states.mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    for watched, place, options, message in (
        (tmp_path / "none", out, [], "expected a folder, into which an engine writes hidden states"),
        (states, states / "out", [], "lies in"),
        (states, mine, [], "holds notes.txt; expected a new folder"),
        (states, out, ["--keep", 0], "keep=0; expected >= 1"),
        (states, out, ["--every", 0], "every=0; expected >= 1"),
        (states, out, ["--max-minutes", 0], "max-minutes=0.0; expected > 0"),
        (states, out, ["--temperature", -1], "temperature=-1.0; expected"),
        (states, out, ["--dtype", "int8"], "dtype='int8'; expected one of float32"),
        (states, out, ["--format", "vlm"], "format='vlm'; expected one of vllm"),
        (states, out, ["--format", "medusa"], "for a drafter of type draft_model"),
        (states, out, ["--answer-again"], "--answer-again with --watch; it has no such option"),
        (states, out, ["--target", "/none"], "target=/none; expected"),
    ):
        assert run(drafter, watched, place, *options) == 2
        assert message in said(capsys)
        assert not out.exists()
    for arguments, message in (
        (["adapt", drafter], "prompts are missing; expected a file, or --watch"),
        (["adapt", drafter, "x.jsonl", "--watch", states], "--watch with 'x.jsonl'; expected one of the two"),
        (["adapt", drafter, "x.jsonl", "--keep", 3], "--keep without --watch; expected both"),
        (["adapt", drafter, "x.jsonl", "--every", 3], "--every without --watch or --live; expected both"),
        (["adapt", drafter, "x.jsonl", "--trust-remote-code"], "--trust-remote-code without --live or --watch"),
        (["adapt", "suffix", "--watch", states, "--target", tmp_path / "target"], "drafter=suffix has no weights"),
        (["adapt", tmp_path / "target", "--watch", states], "names no target; expected --target"),
    ):
        with pytest.raises(SystemExit) as left:
            main([str(part) for part in arguments])
        assert left.value.code == 2
        assert message in said(capsys)
    fill(states, make_llama(seed=1, num_hidden_layers=DEPTH), range(2))
    assert run(drafter, states, out) == 2
    assert f"watch={states}: the states are not the target's; the nearest ones are" in said(capsys)
    shutil.rmtree(states)
    fill(states, target, range(2), layers=(1, 2))
    assert run(drafter, states, out) == 2
    assert "expected the final states as well" in said(capsys)
    other = saved(Medusa.from_target(target), target, tmp_path / "other")
    assert run(other, states, out) == 2
    assert "holds versions of a draft_model drafter; expected a new folder for medusa" in said(capsys)


PROGRAM = "import sys; from draftsmith.cli import main; main(sys.argv[1:])"


def started(drafter: Path, states: Path, out: Path, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "adapt", drafter, "--watch", states, "--out", out, "--every", 16, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment)


def test_a_signal_ends_it_with_a_summary(target: LlamaForCausalLM, drafter: Path, tmp_path: Path) -> None:
    """Nothing comes, and it waits; then files are moved into the folder while it runs."""
    states, out = tmp_path / "states", tmp_path / "out"
    states.mkdir()
    fill(tmp_path / "written", target, range(3))
    with started(drafter, states, out) as process:
        lines = iter(process.stdout)
        assert any(line.startswith("watching") for line in lines)
        for file in (tmp_path / "written").iterdir():
            file.rename(states / file.name)
        assert any(line.startswith(f"states in {states}: at most 0.00%") for line in lines)
        deadline = time.monotonic() + 60
        while len((out / "read.jsonl").read_text().splitlines()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert "3 files read; learned from 192 tokens: 0 steps" in rest
    assert "latest is v0001" in rest


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_a_kill_loses_no_version(target: LlamaForCausalLM, drafter: Path, tmp_path: Path, delay: float) -> None:
    """Killed after an adoption, before or after its version is written; the next run continues with the newest one."""
    states, out = tmp_path / "states", tmp_path / "out"
    fill(states, target, range(72))
    with started(drafter, states, out) as process:
        for line in process.stdout:
            if line.startswith("learning: adopted"):
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                break
    read = len((out / "read.jsonl").read_text().splitlines())
    assert 0 < read < 72
    newest = max(out.glob("v*"))
    assert section(newest)["online"]["adopted"] == int(newest.name[1:]) - 1
    fill(states, target, range(72, 80))
    with started(drafter, states, out, "--idle-minutes", 0.05) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert lines[0] == f"continues with {newest}"
    assert f"{80 - read} files read; learned from" in lines[-3]
    assert (out / "latest").resolve() == max(out.glob("v*"))
    assert int((out / "latest").resolve().name[1:]) >= int(newest.name[1:])
    assert not list(out.glob(".*tmp*"))
