"""`draftsmith check --server` over HTTP; tests/unit/eval/lossless/test_served.py has the wrong servers.

A lossless server fails a check once in a thousand seeds; the seeds here are fixed.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import run, write_prompts
from conftest import make_llama
from engine_server import Engine, behind_a_proxy, chat_tokenizer

from draftsmith import SpeculativeDecoder
from draftsmith.eval.server.counters import CounterRoutes
from draftsmith.heads.draft_model import DraftModel

SIZES = {"max_position_embeddings": 32}


class Server(Engine):
    """An engine that drafts with another model, whose drafts are often wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decoder = SpeculativeDecoder(make_llama(**SIZES), DraftModel(make_llama(1, **SIZES)), draft_length=3)
        self.lock = threading.Lock()

    def tokens(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        settings = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body["seed"]}
        with self.lock:
            return self.decoder.generate(prompt, **settings).tokens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    behind_a_proxy(monkeypatch)
    make_llama(**SIZES).save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", "abcd", "hello")
    return tmp_path / "target"


def check(url: str, folder: Path, *more: Any) -> int:
    prompts = folder.parent / "prompts.jsonl"
    command = ["check", "--server", url, "--target", folder, "--prompts", prompts, "--dtype", "float32"]
    return run(*command, "--tokens", 500, *more)


def test_a_lossless_server_that_fails_in_between(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what was not answered is asked again, and the verdict is in both files."""
    out = folder.parent / "out"
    with Server(fault=lambda number, _: "refused" if number == 60 else None).running() as server:
        assert check(server.url, folder, "--out", out) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "this prompt is too long" in error
        assert json.loads((out / "check.json").read_text())["verdict"] == "inconclusive"
        before, asked = len((out / "answers.jsonl").read_text().splitlines()) - 1, len(server.asked)
        assert check(server.url, folder, "--out", out, "--seed", 4) == 2
        assert "holds another check: seed=0 there, 4 here" in " ".join(capsys.readouterr().err.split())
        assert check(server.url, folder, "--out", out) == 0
        again = {json.dumps([body["prompt"], body["seed"], body["max_tokens"]]) for body in server.asked[asked:]}
        assert before > 40
        earlier = {
            json.dumps([body["prompt"], body["seed"], body["max_tokens"]])
            for body in server.asked[:59]
            if body["max_tokens"] == 8
        }
        assert len(again & earlier) < 8, "only those that were asked when one was refused"
    shown = " ".join(capsys.readouterr().out.split())
    assert "server (8 requests at a time) at T=0: LOSSLESS: 2 of 2" in shown
    assert "counts no drafts" in shown
    written = json.loads((out / "check.json").read_text())
    assert (written["verdict"], written["finished"]) == ("lossless", True)
    assert (out / "check.md").read_text().startswith("# LOSSLESS: server\n")
    assert not (out / "answers.jsonl").exists()


def test_a_server_that_drafts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has another model, too, whose context is shorter."""
    counters = "vllm:generation_tokens_total 5.0\nvllm:spec_decode_num_drafts_total 700.0\n"  # for others, before
    others = {"names": ["small", "tiny"], "contexts": {"small": 2, "tiny": 32}}
    with Server(metrics=lambda _: counters, **others).running() as server:
        assert check(server.url, folder, "--temperature", 0, "--model", "tiny") == 3
    told = capsys.readouterr()
    assert "has drafted nothing during the check" in " ".join(told.out.split())
    assert "LOSSLESS" not in told.out
    assert "stop strings: not tested: the server drafted nothing" in " ".join(told.out.split())
    stages = [line.removeprefix("  stage: ") for line in told.err.splitlines() if line.startswith("  stage: ")]
    assert stages == [
        *("asking what the server serves", "loading the target", "the reference's greedy texts"),
        *("greedy texts, one request at a time", "greedy texts, 8 requests at a time"),
        *("texts at T=0.01, one request at a time", "stop strings", "the end of the context"),
    ]


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"config": {"speculative_config": {"rejection_sample_method": "fly"}}}, "rejection_sample_method=fly"),
        ({"config": {"speculative_config": {"rejection_sample_method": "block"}}}, None),
        ({"config": "VllmConfig(...)"}, None),
        ({"config": {"speculative_config": None}}, None),
        (
            {"info": {"internal_states": [{"speculative_accept_threshold_single": 0.9}]}},
            "speculative_accept_threshold_single=0.9",
        ),
        ({"info": {"speculative_accept_threshold_single": 1.0, "internal_states": 3}}, None),
    ],
)
def test_lossy_options_that_a_server_shows_are_named(described: dict[str, Any], named: str | None) -> None:
    with Server(**described).running() as server:
        assert CounterRoutes(server.url).lossy_options() == ([] if named is None else [named])


def test_a_server_with_a_lossy_option_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = {"speculative_config": {"rejection_sample_method": "fly"}}
    with Server(config=described).running() as server:
        check(server.url, folder, "--temperature", 0)
    told = " ".join(capsys.readouterr().out.split())
    assert "runs with rejection_sample_method=fly, which does not keep the target's distribution" in told


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"names": ["one", "two"]}, [], "--model is missing, and the server has one, two; expected one of them"),
        ({"names": []}, [], "--model is missing, and the server lists no model"),
        ({"fault": lambda number, body: "beyond" if number > 4 else None}, [], "tokens beyond the tokenizer's 64"),
        ({"fault": lambda number, body: "page"}, [], "server refuses every form of a request"),
        ({}, ["--baseline", "http://127.0.0.1:9"], "expected a running server"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    folder: Path, options: dict[str, Any], more: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(**options).running() as server:
        assert check(server.url, folder, *more) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_baseline_that_drafts_and_a_server_that_drafts_greedily_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are said, and neither verdict is LOSSLESS; a reading that fails is no zero."""

    def counted(server: Engine) -> str:
        drafts = sum(body["temperature"] == 0 for body in server.asked)
        return f"vllm:generation_tokens_total 5\nvllm:spec_decode_num_drafts_total {drafts}\n"

    with Server(metrics=counted).running() as server, Server(metrics=counted).running() as other:
        out = folder.parent / "out"
        assert check(server.url, folder, "--baseline", other.url, "--out", out) == 3
    said = " ".join(capsys.readouterr().out.split())
    arms = json.loads((out / "check.json").read_text())["arms"]
    assert f"baseline={other.url} drafts: its texts are not those of the target alone" in said
    assert {arm["verdict"] for arm in arms} == {"inconclusive"}
    drafted = {arm["policy"]: arm["greedy"]["drafted"] for arm in arms if arm["temperature"] == 0}
    assert drafted["one request at a time"] == 2
    assert [arm["sampling"]["rule"]["drafted"] for arm in arms if arm["sampling"]] == [0]


def test_a_server_that_answers_every_seed_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(answer=lambda prompt, _, most: [5, 6, 7, 8, 9, 10, 11, 12][:most]).running() as server:
        check(server.url, folder, "--baseline", server.url, "--temperature", 1)
    assert "the server answers every seed alike: it ignores seeds" in " ".join(capsys.readouterr().out.split())
