"""Responses of a running server, from the command to a trained drafter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run, write_rows
from conftest import LETTERS, make_llama
from engine_server import Engine, answer_tokens, behind_a_proxy, model_answers
from forked import free_port
from transformers_server import serving

from draftsmith.distill.load_target import load_target
from draftsmith.distill.server.probe import HOT
from draftsmith.errors import ConfigError
from draftsmith.train import data_commands as module
from draftsmith.train import trainer
from draftsmith.train.data_commands import prepare
from draftsmith.train.recipe import load_recipe


@pytest.fixture(autouse=True)
def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    behind_a_proxy(monkeypatch)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Six of two turns, with a system prompt, and one with tools."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": "s"}, *({"role": "user", "content": letter * 3} for _ in "ab")]}
        for letter in "abcdef"
    ]
    rows.append({"messages": rows[0]["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]})
    return write_rows(tmp_path / "prompts.jsonl", rows)


def regenerate(prompts: Path, target: Path, engine: Engine, out: Path, *more: Any) -> list[dict[str, Any]]:
    options = ("--prompt-tokens", 40, "--response-tokens", 12, "--out", out, *more)
    code = run("data", "regenerate", prompts, "--target", target, "--server", engine.url, "--model", "tiny", *options)
    assert code == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("returns_ids", [True, False])
@pytest.mark.parametrize("route", ["auto", "completion"])
def test_every_turn_is_answered_in_order(
    returns_ids: bool, route: str, folder: Path, conversations: Path, tmp_path: Path
) -> None:
    """With the engine's tokens, and by tokenising its text again; each turn follows the answer before it."""
    engine = Engine(returns_ids=returns_ids, strict=True, token_prompts=returns_ids)
    with engine.running():
        rows = regenerate(conversations, folder, engine, tmp_path / "out.jsonl", "--turns", "all", "--route", route)
    assert len(rows) == 7
    seeds = {body["seed"] for body in engine.asked if body["temperature"] > 0}
    assert len(seeds) == 14
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert len(row["spans"]) == 2
        for start, end in row["spans"]:
            ids = row["input_ids"]
            assert any(ids[start:end] == answer_tokens(ids[:start], seed, 12) for seed in seeds)
        assert row["usage"][1]["prompt_tokens"] == row["spans"][1][0]
        assert row["server"]["model"] == "tiny"
        assert row["server"]["temperature"] == 1.0
    with_tools = [body for body in engine.asked if body["temperature"] and body.get("tools") is not None]
    assert len(with_tools) == (2 if route == "auto" else 0)
    assert not list(tmp_path.glob(".out*")), "nothing else is left"
    assert [row.get("tools") for row in rows] == [None] * 6 + [[{"type": "function", "function": {"name": "f"}}]]


def test_thinking_is_trained_or_left_out(folder: Path, conversations: Path, tmp_path: Path) -> None:
    with Engine(thinks=True, returns_ids=False, strict=True).running() as engine:
        kept = regenerate(conversations, folder, engine, tmp_path / "kept.jsonl")
        dropped = regenerate(conversations, folder, engine, tmp_path / "dropped.jsonl", "--thinking", "drop")
    thought = [row["messages"][-1].get("reasoning_content") for row in kept]
    assert sum(value is not None for value in thought) > 3
    for one, other in zip(kept, dropped, strict=True):
        assert one["messages"][-1]["content"] == other["messages"][-1]["content"]
        assert "reasoning_content" not in other["messages"][-1]
        assert len(other["input_ids"]) < len(one["input_ids"]) or "reasoning_content" not in one["messages"][-1]


def test_options_reach_the_server(
    folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is read for one fingerprint, however many rows are written."""
    prints: list[str] = []
    fingerprint_of = module.tokenizer_fingerprint
    monkeypatch.setattr(
        module, "tokenizer_fingerprint", lambda tokenizer: prints.append(fingerprint_of(tokenizer)) or prints[-1]
    )
    more = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 3, "--extra-body", '{"top_k": 5}', "--responses", 2)
    with Engine().running() as engine:
        rows = regenerate(conversations, folder, engine, tmp_path / "out.jsonl", *more)
    assert len(rows) == 14
    assert {row["tokenizer"] for row in rows} == set(prints)
    assert len(prints) == 1
    sent = [body for body in engine.asked if body["temperature"] not in (0, HOT)]
    keys = ("temperature", "top_p", "top_k", "max_tokens")
    assert {tuple(body[key] for key in keys) for body in sent} == {(0.5, 0.9, 5, 12)}
    assert len({body["seed"] for body in sent}) == 14


def _sampled(engine: Engine) -> int:
    """Return the number of answers that were sampled for training."""
    return sum(body["temperature"] not in (0, HOT) for body in engine.asked)


def test_a_recipe_samples_from_a_server_and_trains(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The served model is the target's own, so that the greedy answers are compared with it; more responses later."""
    with Engine(answer=model_answers(make_llama())).running() as engine:
        server = [f"data.server={{url: {engine.url}, model: tiny}}"]
        prepare(load_recipe(str(recipe_file), server))
        assert _sampled(engine) == 36, "the held-out prompts are not asked"
        trainer.train(load_recipe(str(recipe_file), [*server, "data.responses=2"]))
        assert _sampled(engine) == 36 + 36, "the first responses are not asked for again"
    assert "checkpoint" not in capsys.readouterr().err


def test_another_target_under_the_same_alias_is_asked_anew(recipe_file: Path, tiny_target_folder: Path) -> None:
    """The responses of the target that the folder and the server had before are not trained on."""
    for seed in (0, 1):
        make_llama(seed).save_pretrained(tiny_target_folder)
        with Engine(answer=model_answers(make_llama(seed))).running() as engine:
            prepare(load_recipe(str(recipe_file), [f"data.server={{url: {engine.url}, model: tiny}}"]))
            assert sum(body["temperature"] > 0 for body in engine.asked) == 36


def test_another_model_is_refused_before_the_run(recipe_file: Path) -> None:
    with Engine(answer=model_answers(make_llama(seed=1))).running() as engine:
        recipe = load_recipe(str(recipe_file), [f"data.server={{url: {engine.url}, model: tiny}}"])
        with pytest.raises(ConfigError, match=r"of the tokens of greedy answers .*it serves another model"):
            prepare(recipe)
        assert all(body["temperature"] == 0 for body in engine.asked)


def test_without_the_extra_a_server_is_refused(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.distill.data_section.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[serve\]'"):
        prepare(load_recipe(str(recipe_file), ["data.server={url: 'http://h', model: tiny}"]))


@pytest.mark.slow
def test_transformers_serve_is_killed_and_so_are_we(folder: Path, recipe_file: Path, tmp_path: Path) -> None:
    """Both end in the middle and start again; the server is measured, and a drafter trained on its greedy answers."""
    (tmp_path / "home" / "hub").mkdir(parents=True)
    prompts = write_rows(tmp_path / "many.jsonl", ({"turns": [letter * 2, "x", "y"]} for letter in LETTERS))
    port = free_port()
    out = tmp_path / "out.jsonl"
    command = ["data", "regenerate", prompts, "--target", folder, "--server", f"http://127.0.0.1:{port}", "--model"]
    command += [folder, "--turns", "all", "--temperature", 0, "--prompt-tokens", 60, "--response-tokens", 20]
    command += ["--concurrency", 2, "--out", out]
    with serving(folder, tmp_path / "home", port):
        child = subprocess.Popen([sys.executable, "-m", "draftsmith", *map(str, command)], env={**os.environ})
        while not any(file.read_bytes().count(b"\n") > 8 for file in tmp_path.glob(".out.jsonl.*/answers.jsonl")):
            assert child.poll() is None
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not out.exists()
    measured = ["eval", "server", f"http://127.0.0.1:{port}", "--target", folder, "--model", folder]
    measured += ["--prompts", prompts, "--count", 6, "--temperature", 0, "--concurrency", 1, "--concurrency", 2]
    measured += ["--max-new-tokens", 8]
    with serving(folder, tmp_path / "home", port):
        assert run(*command) == 0
        assert run(*measured, "--out", tmp_path / "alone") == 0
        alone = tmp_path / "alone" / "eval.json"
        assert run(*measured, "--out", tmp_path / "again", "--baseline", alone) == 0
    found = json.loads((tmp_path / "again" / "eval.json").read_text())["server"]
    assert [row["concurrency"] for row in found] == [1, 2]
    assert all(row["tokens_per_second"] > 0 and row["speedup"] > 0 and row["tau"] is None for row in found)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(LETTERS)
    target = load_target(str(folder))
    for row in rows:
        assert len(row["spans"]) == 3
        for start, end in row["spans"]:
            ids = torch.tensor([row["input_ids"][:start]])
            whole = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
            text = target.tokenizer.decode(whole[0, start:], skip_special_tokens=True)
            assert target.tokenizer.decode(row["input_ids"][start:end], skip_special_tokens=True) == text
    settings = [f"target.model={folder}", f"data.prompts={out}", "data.response=text", "data.prompt_tokens=60"]
    trainer.train(load_recipe(str(recipe_file), [*settings, "data.response_tokens=100"]))
