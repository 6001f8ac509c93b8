"""Commands keep a text's first space where the target's tokenizer strips it."""

import json
from pathlib import Path

import pytest
from commands import run, write_prompts
from conftest import make_llama
from piece_tokenizer import make_piece_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    make_llama(seed=5).save_pretrained(tmp_path / "target")
    make_piece_tokenizer(metaspace=False).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def _written(folder: Path, prompt: str, count: int) -> str:
    """The prompt and its continuation by transformers, decoded as one text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(found[0], skip_special_tokens=True)


def _prompt_before_a_space(folder: Path) -> str:
    return next(text for text in "abcdefghijklmnopqrstuvwxyz" if _written(folder, text, 1)[1:2] == " ")


def test_generate_keeps_the_space_after_the_prompt(folder: Path, capsys: pytest.CaptureFixture) -> None:
    prompt = _prompt_before_a_space(folder)
    assert not run("generate", prompt, "--target", folder, "--max-new-tokens", 12)
    assert capsys.readouterr().out == _written(folder, prompt, 12) + "\n"


def test_regenerate_keeps_the_space_before_a_response(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompt = _prompt_before_a_space(folder)
    write_prompts(tmp_path / "asked.jsonl", prompt)
    out = tmp_path / "answers.jsonl"
    options = ["--out", out, "--response-tokens", 12, "--temperature", 0]
    assert not run("data", "regenerate", tmp_path / "asked.jsonl", "--target", folder, *options)
    row = json.loads(out.read_text())
    assert row["prompt"] + row["response"] == _written(folder, prompt, 12)
    assert row["response"].startswith(" ")
    capsys.readouterr()
    assert not run("data", "preview", out, "--target", folder)
    shown = capsys.readouterr().out
    assert f"{prompt}⟦{row['response'].rstrip()}" in shown
