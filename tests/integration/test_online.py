"""Learning in commands: the drafter that `generate --learn` saves, `check --learn`, the model card, and a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import PreTrainedTokenizerFast

from draftsmith import load_drafter
from draftsmith.cli import main
from draftsmith.heads import DraftModel
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.hub.model_card import CardRequest, write_card
from draftsmith.reading import read_json


@pytest.fixture
def pair(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """A target and a draft model that often agrees with it, in folders."""
    target = make_llama()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=2)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "mlp" in name:
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    described = describe_target(target, tiny_tokenizer, "org/target")
    recipe = {"name": "tiny"}
    save_drafter(drafter, tmp_path / "drafter", target=described, recipe=recipe, draft_length=3)
    return tmp_path / "target", tmp_path / "drafter"


def _main(*arguments: object) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def section(folder: Path) -> dict:
    return read_json(folder / "config.json")["draftsmith"]


def test_a_saved_drafter_counts_its_tokens_and_learns_again(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    call = ["generate", "secretword", "--target", target, "--max-new-tokens", 40]
    assert _main(*call, "--drafter", drafter) == 0
    plain = capsys.readouterr().out
    saved = tmp_path / "saved"
    assert _main(*call, "--drafter", drafter, "--learn", "--save-drafter", saved) == 0
    shown = capsys.readouterr()
    assert shown.out == plain
    learned = section(saved)["online"]
    assert f"learned from {learned['tokens']} tokens: 0 steps" in " ".join(shown.err.split())
    assert 0 < learned["tokens"] <= 40
    assert section(saved)["recipe"] == {"name": "tiny"}
    assert section(saved)["target"]["name"] == "org/target"
    assert section(saved)["draft_length"] == 3
    assert _main(*call, "--drafter", saved, "--learn", "--save-drafter", saved) == 0
    assert section(saved)["online"]["tokens"] == 2 * learned["tokens"]
    for file in saved.rglob("*"):
        assert b"secretword" not in file.read_bytes()
    capsys.readouterr()
    write_card(saved, None, None, CardRequest("user/name", None))
    card = " ".join((saved / "README.md").read_text().split())
    assert "Adapted online with draftsmith" in card
    assert f"states at {2 * learned['tokens']} decoded tokens, in 0 optimizer steps. 0 updates were adopted" in card
    write_card(drafter, None, None, CardRequest("user/name", None))
    assert "Adapted online" not in (drafter / "README.md").read_text()


def test_learning_that_cannot_be_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    call = ["generate", "a", "--target", target]
    for options, message in (
        (["--drafter", drafter, "--save-drafter", tmp_path / "x"], "without --learn; expected both"),
        (["--learn"], "learn without a drafter"),
        (["--drafter", drafter, "--learn", "--save-drafter", tmp_path / "mine"], "holds something else"),
        (["--drafter", drafter, "--learn", "--save-drafter", tmp_path], f"save-drafter={tmp_path} holds something"),
        (["--drafter", drafter, "--learn", "--save-drafter", tmp_path / "mine" / "config.json"], "holds something"),
    ):
        assert _main(*call, *options) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    options = ["--learn", "--drafter", "suffix"]
    assert _main("generate", "a", "--target", target, *options) == 2
    assert "type 'suffix', which has no weights of its own" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_count_is_refused(pair: tuple[Path, Path], capsys: pytest.CaptureFixture) -> None:
    target, drafter = pair
    config = read_json(drafter / "config.json")
    for online in ({"tokens": -1}, {"text": 1}, {"tokens": "a secret"}):
        config["draftsmith"]["online"] = online
        (drafter / "config.json").write_text(json.dumps(config))
        assert _main("generate", "a", "--target", target, "--drafter", drafter) == 2
        assert "draftsmith.online" in capsys.readouterr().err


def test_a_check_with_learning_is_lossless(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcd", "hello", "xyz")))
    call = ["--target", target, "--drafter", drafter, "--prompts", prompts, "--tokens", 1500, "--learn"]
    assert _main("check", *call, "--out", tmp_path / "out") == 0
    assert "T=1: LOSSLESS" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "out" / "check.json").read_text())["settings"]["learn"] is True


SERVES = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from draftsmith import OnlineLearning, SpeculativeDecoder, load_drafter
from draftsmith.heads.checkpoint import describe_target

target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval().requires_grad_(False)
out, number = Path(sys.argv[3]), 0
drafter = load_drafter(sys.argv[2], target)
described = describe_target(target, None, "org/target")

def keep(update):
    print(update.kind, flush=True)
    if update.kind == "adopted":
        learn.save(out, described)

learn = OnlineLearning(every=4, judge_every=4, batch_rows=4, learning_rate=3e-3, on_update=keep)
decoder = SpeculativeDecoder(target, drafter, learn=learn)
print("ready", flush=True)
while True:
    number += 1
    prompt = torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(number)).tolist()
    decoder.generate_batch([prompt, prompt[::-1]], max_new_tokens=20, eos_token_id=None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("adoptions", [1, 2])
def test_a_kill_loses_no_saved_update(pair: tuple[Path, Path], tmp_path: Path, adoptions: int) -> None:
    target, drafter = pair
    out = tmp_path / "out"
    command = [sys.executable, "-c", SERVES, str(target), str(drafter), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        seen = 0
        for line in process.stdout:
            # The next line after "adopted" shows that it was saved; or the kill falls into the middle of saving.
            seen += line.strip() == "adopted"
            if seen == adoptions:
                time.sleep(0.02 * adoptions)
                process.send_signal(signal.SIGKILL)
                break
    saved = section(out)["online"] if out.exists() else {"adopted": 0}
    assert saved["adopted"] in (adoptions - 1, adoptions)
    if saved["adopted"]:
        loaded = load_drafter(out, make_llama())
        assert loaded.online == saved


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    rows = [{"prompt": f"abc{'hello world'[n % 10 :]}{n}", "category": "ba"[n % 2], "id": f"r{n}"} for n in range(44)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_an_evaluation_measures_learning_beside_frozen(
    pair: tuple[Path, Path], requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    out = tmp_path / "out"
    call = ["eval", "--target", target, "--drafter", f"d={drafter}", "--prompts", requests, "--learn", "--out", out]
    before = (drafter / "model.safetensors").read_bytes()
    assert _main(*call, "--max-new-tokens", 24, "--policy", "d=chain:draft_length=2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    evaluation = read_json(out / "eval.json")
    online = evaluation["online"]
    assert online["summary"] in shown
    assert "At the end (requests 38 to 44)" in shown or "At the end (requests 37 to 44)" in shown
    assert (drafter / "model.safetensors").read_bytes() == before
    rows = {row["drafter"]: row for row in evaluation["rows"] if row["category"] == "all"}
    assert set(rows) == {"d", "d, learning"}
    assert {row["policy"] for row in rows.values()} == {"chain:draft_length=2"}
    assert all(row["greedy_identical"] == [44, 44] for row in rows.values())
    stored = {entry["drafter"]: entry for entry in evaluation["measurements"]}
    assert all(entry["units"] == [[f"r{n}"] for n in range(44)] for entry in stored.values())
    assert online["windows"][0]["first"] == 1
    assert [w["first"] for w in online["windows"][1:]] == [w["last"] + 1 for w in online["windows"][:-1]]
    assert online["windows"][-1]["last"] == online["total"]["last"] == 44
    learned = stored["d, learning"]
    assert online["total"]["tokens_served"] == sum(row[0] for row in learned["tokens"])
    assert online["learning_seconds"] > 0
    speed = online["total"]["tokens_served"] / sum(row[0] for row in learned["seconds"])
    assert online["total"]["tokens_per_second"][2] == pytest.approx(speed)
    seconds = sum(row[0] for row in learned["seconds"])
    assert rows["d, learning"]["overhead_share"] * seconds >= 0.999 * online["learning_seconds"]
    table = (out / "report.md").read_text().partition("## Learning")[2].partition("\n## ")[0]
    assert "gain |\n|---" in table
    assert table.count("\n| ") == 1 + len(online["windows"]) + 1
    for report in ("report.md", "report.html"):
        text = (out / report).read_text()
        assert "Learning" in text
        assert "tokens served" in text
    assert (out / "online.png").exists()
    push = ["push", drafter, "user/name", "--eval", out, "--dry-run", "--out", tmp_path / "pushed"]
    assert _main(*push) == 0
    capsys.readouterr()
    assert _main(*push, "--as", "d, learning") == 2
    assert "expected --as with one of the drafters measured there: d" in " ".join(capsys.readouterr().err.split())
    assert _main(*call) == 2
    assert "holds a measurement; expected another folder: learning is not continued" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_does_not_combine_with_learning_is_refused(
    pair: tuple[Path, Path], requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, drafter = pair
    call = ["eval", "--target", target, "--prompts", requests, "--out", tmp_path / "out", "--learn"]
    for options, message in (
        (["--drafter", f"b={drafter}"], "learn with drafter=['a', 'b']; expected one"),
        (["--repeats", 2], "learn with repeats=2; expected 1"),
        (["--batch-size", 2], "learn with batch_size=[2]; expected 1"),
        (["--temperature", 0, "--temperature", 1], "learn with temperature=[0.0, 1.0]; expected one"),
        (["--gamma", 2, "--policy", "chain"], "learn with gamma or policy=[2, 'chain']; expected one"),
        (["--compile"], "learn with compile=True"),
    ):
        assert _main(*call, "--drafter", f"a={drafter}", *options) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()
    assert _main(*call, "--drafter", "suffix") == 2
    assert "type 'suffix', which has no weights of its own" in " ".join(capsys.readouterr().err.split())
