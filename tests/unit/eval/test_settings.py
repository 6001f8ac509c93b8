"""Loading for `eval`, `check` and `forecast`: prompts are read once and refused before weights are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_llama
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from draftsmith.cli import main
from draftsmith.distill.load_target import DTYPES
from draftsmith.errors import ConfigError
from draftsmith.eval import prompts
from draftsmith.eval.settings import PairSettings, load_session


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of prompts that are read."""
    sources: list[str] = []
    read_source = prompts.read_source

    def counted(source: str, *rest: Any) -> Any:
        sources.append(source)
        return read_source(source, *rest)

    monkeypatch.setattr(prompts, "read_source", counted)
    return sources


def _refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "check", "forecast"])
def test_long_prompts_are_refused_before_weights_are_read(
    command: str,
    tmp_path: Path,
    tiny_target_folder: Path,
    reads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    file, out = tmp_path / "long.jsonl", tmp_path / "out"
    file.write_text(json.dumps({"prompt": "ab" * 100}) + "\n")
    call = (command, "--target", tiny_target_folder, "--drafter", "suffix", "--prompts", file, "--out", out)
    assert "prompt=200 tokens; expected fewer than the context of 128" in _refused(capsys, *call)
    assert reads == [str(file)]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "no/where"], "drafter=no/where; expected a local folder or a Hub id"),
        (["--drafter", "hybrid:drafter=no/where"], "drafter=no/where; expected a local folder or a Hub id"),
    ],
)
def test_drafters_are_refused_before_weights_are_read(
    options: list[str],
    message: str,
    tmp_path: Path,
    tiny_target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "ab"}) + "\n")
    assert message in _refused(
        capsys, "eval", "--target", tiny_target_folder, "--prompts", file, "--out", tmp_path / "out", *options
    )


def test_every_policy_has_to_suit_the_target(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Before anything is decoded, also with policies of which the first works."""
    config = BloomConfig(vocab_size=len(tiny_tokenizer), hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    policies = ("chain:draft_length=2", "best-first:size=4,depth=2")
    settings = PairSettings(str(tmp_path), {"draft": str(tmp_path)}, policies=policies)
    with pytest.raises(ConfigError, match=r"policy=best-first.* takes no position_ids"):
        load_session(settings, None)
    assert load_session(replace(settings, policies=policies[:1]), None).drafters


@pytest.mark.parametrize("command", ["eval", "check", "forecast"])
def test_prompts_have_to_fit_every_drafter(
    command: str, tmp_path: Path, tiny_target_folder: Path, reads: list[str], capsys: pytest.CaptureFixture
) -> None:
    file, short, out = tmp_path / "prompts.jsonl", tmp_path / "short", tmp_path / "out"
    file.write_text(json.dumps({"prompt": "ab" * 10}) + "\n")
    make_llama(max_position_embeddings=16).save_pretrained(short)
    call = (command, "--target", tiny_target_folder, "--drafter", short, "--prompts", file, "--out", out)
    assert "prompt=20 tokens; expected fewer than the context of 16" in _refused(capsys, *call)
    assert reads == [str(file)]
    assert not out.exists()


@pytest.mark.parametrize(
    ("stored", "dtype", "fast", "said"),
    [
        ("bfloat16", "float32", True, True),
        ("bfloat16", "bfloat16", True, False),
        ("bfloat16", "float32", False, False),
        ("float32", "float32", True, False),
    ],
)
def test_a_target_of_16_bits_that_is_computed_in_32_is_told(
    stored: str,
    dtype: str,
    fast: bool,
    said: bool,
    tiny_target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    make_llama().to(DTYPES[stored]).save_pretrained(tiny_target_folder)
    monkeypatch.setattr("draftsmith.distill.load_target.bf16_is_fast", lambda _: fast)
    load_session(PairSettings(str(tiny_target_folder), {}, dtype=dtype), None, progress=False)
    line = "target: stored in bfloat16, computed in float32; --dtype bfloat16 is faster on this machine"
    assert (line in capsys.readouterr().err) == said
