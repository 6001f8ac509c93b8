"""Settings that commands share: refused before anything is loaded, then loaded once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import make_llama
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from draftsmith.cli import main
from draftsmith.decode.rules import RULES
from draftsmith.distill.load_target import DTYPES
from draftsmith.errors import ConfigError
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import PairSettings, RuleName, named_drafters
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.medusa import Medusa
from draftsmith.names import check_target_name


def test_every_rule_can_be_named() -> None:
    assert get_args(get_args(RuleName)[0]) == tuple(RULES)


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture, tmp_path: Path) -> Refused:
    """Call a command and return its error; it writes nothing."""

    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in (*arguments, "--out", tmp_path / "out")])
        assert stop.value.code == 2
        assert not (tmp_path / "out").exists()
        return " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    ("command", "prompt", "drafter", "message"),
    [
        ("eval", "ab" * 100, "suffix", "p.jsonl:1: prompt=200 tokens; expected fewer than the context of 128"),
        ("check", "ab", "no/where", "--drafter=no/where: no such folder, not in the Hub's cache"),
        ("forecast", "ab", "hybrid:drafter=no/where", "--drafter=no/where: no such folder, not in the Hub's cache"),
    ],
)
def test_prompts_and_drafters_are_refused_before_weights_are_read(
    command: str,
    prompt: str,
    drafter: str,
    message: str,
    tmp_path: Path,
    tiny_target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n")
    assert message in refused(command, "--target", tiny_target_folder, "--drafter", drafter, "--prompts", file)


@pytest.mark.parametrize(
    ("command", "sizes", "message"),
    [
        ("forecast", {"max_position_embeddings": 16}, "prompt=20 tokens; expected fewer than the context of 16"),
        ("check", {"vocab_size": 60}, "has a vocabulary of 60; expected the target's 64"),
    ],
)
def test_pairs_have_to_fit(
    command: str, sizes: dict[str, int], message: str, tmp_path: Path, tiny_target_folder: Path, refused: Refused
) -> None:
    """Prompts the context of every drafter, and vocabularies each other."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "ab" * 10}) + "\n")
    make_llama(**sizes).save_pretrained(tmp_path / "draft")
    pair = ("--target", tiny_target_folder, "--drafter", tmp_path / "draft")
    assert message in refused(command, *pair, "--prompts", file)


def test_every_policy_has_to_suit_the_target(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Before anything is decoded, also with policies of which the first works."""
    config = BloomConfig(vocab_size=len(tiny_tokenizer), hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    policies = ("chain:draft_length=2", "best-first:size=4,depth=2")
    settings = PairSettings(target=str(tmp_path), drafters={"draft": str(tmp_path)}, policies=policies)
    with pytest.raises(ConfigError, match=r"policy=best-first.* takes no position_ids"):
        load_session(settings, None)
    assert load_session(settings.model_copy(update={"policies": policies[:1]}), None).drafters


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
    load_session(PairSettings(target=str(tiny_target_folder), drafters={}, dtype=dtype), None, progress=False)
    line = "target: stored in bfloat16, computed in float32; --dtype bfloat16 is faster on this machine"
    assert (line in capsys.readouterr().err) == said


def test_wrong_pairs_are_recognised(
    tmp_path: Path, tiny_target_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture
) -> None:
    other = make_llama()
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    run, head = tmp_path / "runs" / "mine", tmp_path / "head"
    described = describe_target(other, tiny_tokenizer, "user/other")
    recipe = {"target": {"dtype": "bfloat16", "quantization": "int8"}}
    draft = DraftModel.from_target(other, num_hidden_layers=1)
    save_drafter(draft, run / "drafter", target=described, recipe=recipe, draft_length=2)
    save_drafter(Medusa.from_target(other), head, target=described, recipe=None, draft_length=2)

    assert named_drafters([str(run)]) == {"mine": str(run / "drafter")}
    for target in (run, head):
        with pytest.raises(ConfigError, match=r"target=.* is a drafter of type .* for user/other; expected a target"):
            check_target_name(str(target))

    load_session(
        PairSettings(target=str(tiny_target_folder), drafters={"mine": str(run / "drafter")}), None, progress=False
    )
    said = " ".join(capsys.readouterr().err.split())
    assert f"mine was trained for user/other, and the weights of {tiny_target_folder} are different" in said
    assert "mine was trained on the target in bfloat16, not float32 (--dtype bfloat16)" in said
    assert "mine was trained on the target in int8, which is not quantized here" in said
    assert "swapped" not in said

    make_llama(num_hidden_layers=6).save_pretrained(tmp_path / "large")
    load_session(
        PairSettings(target=str(tiny_target_folder), drafters={"d": str(tmp_path / "large")}), None, progress=False
    )
    assert "are --target and --drafter swapped?" in " ".join(capsys.readouterr().err.split())
    load_session(
        PairSettings(target=str(tiny_target_folder), drafters={"d": str(tiny_target_folder)}), None, progress=False
    )
    assert "note:" not in capsys.readouterr().err
