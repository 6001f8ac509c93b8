"""A GGUF file as the target of every command: from the file to a drafter that llama-server loads beside it."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import printed, write_rows
from conftest import mostly_slow, write_recipe
from gguf_files import tiny_llama, write_gguf
from transformers import AutoModelForCausalLM

from draftsmith.distill.load_target import load_target

pytest.importorskip("gguf")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    target = write_gguf(tmp_path / "target.gguf", tiny_llama(), "Q8_0")
    data, short = {"count": 8, "prompt_tokens": 48, "response_tokens": 8}, {"steps": 2, "evaluate_every": 2}
    decoded = {"count": 2, "max_new_tokens": 6}
    recipe = write_recipe(tmp_path, target, decoded, data, batch_size=4, draft_length=2, **short)
    asked = ({"messages": [{"role": "user", "content": f"Count to {number}, then {number}."}]} for number in range(16))
    return {"target": target, "prompts": write_rows(tmp_path / "prompts.jsonl", asked), "recipe": recipe}


def test_from_a_file_to_a_drafter_for_llama_server(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target, prompts, drafter = str(paths["target"]), str(paths["prompts"]), str(tmp_path / "run" / "drafter")
    code, said, err = printed(capsys, "memory", str(paths["recipe"]))
    assert code == 0, err
    assert "in training" in said
    code, said, err = printed(capsys, "data", "preview", prompts, "--target", target, "--response", "target")
    assert code == 0, err
    assert "assistant:" in said, "the file's chat template"
    code, _, err = printed(capsys, "train", str(paths["recipe"]), "drafter.init=target_layers")
    assert code == 0, err
    described = json.loads((Path(drafter) / "config.json").read_text())["draftsmith"]["target"]
    assert described["name"] == target
    assert described["revision"] == load_target(target, device="cpu").revision
    common = ["--target", target, "--drafter", drafter, "--prompts", prompts]
    short = ("--count", "2", "--max-new-tokens", "6", "--temperature", "0")
    code, said, err = printed(capsys, "eval", *common, "--out", "eval", *short)
    assert code == 0, err
    rows = json.loads((tmp_path / "eval" / "eval.json").read_text())["rows"]
    assert rows
    code, said, err = printed(capsys, "generate", *common[:4], "Count", "--max-new-tokens", "4")
    assert code == 0, err
    code, said, err = printed(capsys, "export", drafter, "--format", "gguf", "--target", target, "--out", "exported")
    assert code == 0, err
    assert f"llama-server -m {target} -md exported/drafter.gguf" in said
    assert said.endswith(f"next: draftsmith eval server http://localhost:8080 --target {target} --model {target}\n")
    assert load_target(str(tmp_path / "exported"), device="cpu").model.config.num_hidden_layers == 1
    code, said, err = printed(capsys, "export", target, "--format", "gguf", "--target", target, "--out", "plain")
    assert code == 0, err
    assert "\nllama-server -m plain/drafter.gguf --port 8080 --metrics\n" in said
    assert "-md" not in said + (tmp_path / "plain" / "README.md").read_text(), "a target does not draft for itself"
    assert "next:" not in said
    plain, quantized = (load_target(name, device="cpu").model.state_dict() for name in ("plain", target))
    assert all(torch.equal(plain[name], weight) for name, weight in quantized.items())
    code, said, err = printed(capsys, "export", drafter, "--format", "vllm", "--target", target, "--out", "for vllm")
    assert code == 0, err
    (served,) = re.findall(r"vllm serve (\S+) --speculative-config", said)
    assert served != target, "vLLM starts no GGUF file with a speculative config"
    assert AutoModelForCausalLM.from_pretrained(served).config.vocab_size == tiny_llama().config.vocab_size


@pytest.mark.parametrize("command", mostly_slow(["eval", "generate", "memory", "train"], "eval", "memory"))
def test_a_broken_file_ends_in_one_line(command: str, paths: dict[str, Path], capsys: pytest.CaptureFixture) -> None:
    paths["target"].write_bytes(paths["target"].read_bytes()[:5000])
    target, prompts = str(paths["target"]), str(paths["prompts"])
    arguments = {
        "eval": ["--target", target, "--drafter", "suffix", "--prompts", prompts],
        "generate": ["--target", target, "--drafter", "suffix", "Count"],
    }
    code, _, err = printed(capsys, command, *arguments.get(command, [str(paths["recipe"])]))
    assert code == 2
    assert "Traceback" not in err
    assert "target.gguf cannot be read" in err.splitlines()[-1]
