"""`draftsmith forecast --server` against servers whose rounds take known times."""

import json
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands import run, write_prompts
from conftest import make_llama
from engine_server import Engine

from draftsmith.eval.forecast import server_costs
from draftsmith.eval.forecast.profile import profile_from, read_profile
from draftsmith.eval.server.measure import CounterRoutes
from draftsmith.heads import HEADS
from draftsmith.heads.checkpoint import describe_target, save_drafter

ROUND = 0.01
"""Seconds of a round; of a drafting server 16 times as many where several requests run: noise decides nothing."""


class Timed:
    """An engine that drafts `length` tokens, accepts all of them, and sleeps in each round."""

    def __init__(self, length: int, style: str = "vllm") -> None:
        self.length, self.style = length, style
        self.rounds, self.tokens, self.lock = 0, 0, threading.Lock()
        info = {"speculative_num_draft_tokens": length + 1, "speculative_eagle_topk": 1} if style == "sglang" else None
        self.engine = Engine(answer=self._answer, metrics=self._metrics, info=info)

    def _answer(self, prompt: list[int], seed: int, most: int) -> list[int]:
        done = 1
        while done < most:
            time.sleep(ROUND * (16 if self.length and self.engine.busy > 1 else 1))
            done += self.length + 1
            with self.lock:
                self.rounds += 1
        with self.lock:
            self.tokens += most
        return [2 + (prompt[0] + place) % 50 for place in range(most)]

    def _metrics(self, _: Engine) -> str:
        lines = [f"{self.style}:generation_tokens_total {self.tokens}"]
        if self.length and self.style in ("vllm", "llamacpp"):
            lines += [f"{self.style}:spec_decode_num_drafts_total {self.rounds}"]
            lines += [f"{self.style}:spec_decode_num_draft_tokens_total {self.rounds * self.length}"]
        if self.length and self.style == "sglang":
            lines += [f"sglang:spec_verify_calls_total {self.rounds}"]
        return "\n".join(lines)


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"SHORT": 2, "LONG": 32, "TURNS": 4}.items():
        monkeypatch.setattr(server_costs, name, value)
    write_prompts(folder.parent / "prompts.jsonl", "abc", "hello")
    return folder


def forecast(folder: Path, out: str, *more: Any) -> int:
    call = ["forecast", "--target", folder, "--drafter", f"self={folder}", "--out", folder.parent / out]
    call += ["--prompts", folder.parent / "prompts.jsonl", "--max-new-tokens", 12, *more]
    return run(*call)


def test_the_best_length_by_load_and_where_drafting_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draft of 3 is always accepted: it pays for one request, and not for 8, whose rounds take 16 times as long."""
    profile, plan = folder.parent / "profile.json", folder.parent / "plan.json"
    sizes = ["--temperature", 0, "--batch-size", 1, "--batch-size", 8]
    with Timed(0).engine.running() as plain, Timed(3).engine.running() as drafting:
        servers = ["--server", plain.url, "--server", drafting.url, "--model", "tiny", "--context", 20]
        assert forecast(folder, "one", *sizes, *servers, "--save-profile", profile, "--write", plan) == 0
    lengths = {len(body["prompt"]) for body in plain.asked if body.get("ignore_eos")}
    assert lengths == {20}
    assert all(body["temperature"] == 0 for body in plain.asked), "an engine that loses temperatures is timed at T=0"
    shown = " ".join(capsys.readouterr().out.split())
    written = json.loads(plan.read_text())
    assert written["vllm"]["num_speculative_tokens"] == 3
    assert written["vllm"]["num_speculative_tokens_per_batch_size"] == [[1, 7, 3], [8, 8, 0]]
    assert written["vllm"]["model"] == str(folder), "vLLM loads a draft model's folder as it is"
    assert written["vllm"]["draft_sample_method"] == "probabilistic"
    assert written["export"] == {}
    assert written["off_from"] == 8
    assert list(written["sglang"]) == ["1-7", "8-8"]
    assert (
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        in (written["sglang"]["1-7"])
    )
    assert written["sglang"]["8-8"] == ""
    assert "speculation: off from 8 requests at a time" in shown
    stored = json.loads((folder.parent / "one" / "forecast.json").read_text())
    assert {row["policy"] for row in stored["rows"]} == {"chain:draft_length=3"}, "only what was measured"
    assert stored["engine"] == written
    read = read_profile(profile)["*"]
    assert len(read.repeats) >= 2
    assert read.alone[1] >= ROUND
    assert "20 tokens of context" in read.name
    assert forecast(folder, "two", *sizes, "--profile", profile) == 0


def test_the_lines_of_a_head_name_its_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine loads a checkpoint of a head; the printed command writes what the settings name."""
    target = make_llama()
    described = describe_target(target, None, "tiny")
    head = HEADS["peagle"].from_target(target, layers=[1], num_tokens=3)
    save_drafter(head, folder.parent / "peagle", target=described, recipe=None, draft_length=3)
    profile = profile_from({"alone": {1: 1.0}, "verify": {1: {1: 1.0}}, "drafters": {"*": {"draft": {1: {3: 0.0}}}}})
    monkeypatch.setattr("draftsmith.eval.forecast.command.measure_servers", lambda *_: profile)
    monkeypatch.chdir(folder.parent)
    call = ["forecast", "--target", str(folder), "--drafter", "./peagle", "--prompts", "prompts.jsonl"]
    call += ["--model", "tiny", "--temperature", "1", "--max-new-tokens", "12", "--out", "out"]
    with Engine().running() as one, Engine().running() as other:
        assert run(*call, "--server", one.url, "--server", other.url) == 0
    said = capsys.readouterr().out.splitlines()
    (command,) = [line for line in said if line.startswith("first: ")]
    engine = json.loads(Path("out/forecast.json").read_text())["engine"]
    assert engine["export"] == {"vllm": command.removeprefix("first: ")}
    assert (engine["vllm"]["method"], engine["vllm"]["draft_sample_method"]) == ("eagle3", "probabilistic")
    assert run(*shlex.split(command)[2:]) == 0
    written = json.loads((Path(engine["vllm"]["model"]) / "config.json").read_text())
    assert written["speculators_model_type"] == "peagle"


def test_lengths_between_measured_ones_and_sglang(folder: Path) -> None:
    with (
        Timed(0).engine.running() as plain,
        Timed(2, "llamacpp").engine.running() as middle,
        Timed(1).engine.running() as one,
        Timed(3, "sglang").engine.running() as two,
    ):
        servers = [part for each in (plain, one, middle, two) for part in ("--server", each.url)]
        assert forecast(folder, "out", "--temperature", 1, *servers, "--model", "tiny") == 0
    stored = json.loads((folder.parent / "out" / "forecast.json").read_text())
    assert {row["policy"] for row in stored["rows"]} == {f"chain:draft_length={k}" for k in (1, 2, 3)}
    assert stored["engine"]["off_from"] is None
    assert stored["settings"]["rule"] == "token"


def test_what_cannot_be_measured_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Timed(0).engine.running() as plain, Timed(0).engine.running() as other, Timed(2).engine.running() as drafting:
        both = ["--server", plain.url, "--server", drafting.url]
        named = [*both, "--model", "tiny"]
        cases: list[tuple[list[Any], str]] = [
            ([*both, "--temperature", 0], "--model is missing"),
            (named, "expected one with --server"),
            ([*named[2:], "--temperature", 0], "draft length of a running server cannot be changed"),
            ([*named, "--temperature", 0, "--policy", "chain:draft_length=2"], "engines draft chains"),
            ([*named, "--temperature", 0, "--drafter", "suffix"], "expected one drafter"),
            ([*named, "--temperature", 0, "--profile", "p.yaml"], "--server with --profile; expected one"),
            ([*named, "--temperature", 0, "--context", 0], "--context=0; expected >= 1"),
            ([*named, "--temperature", 0, "--context", 120], "expected at most 96, the target's limit less 32 tokens"),
            ([*named[:2], "--server", plain.url, "--model", "tiny", "--temperature", 0], "each only once"),
            (
                [*named, "--temperature", 0, "--write", folder],
                f"write={folder} is a folder",
            ),
            (["--context", 9, "--temperature", 0], "without --server"),
            ([*both, "--model", "other", "--temperature", 0], "does not serve other"),
        ]
        plain_ones = ["--server", plain.url, "--server", other.url, "--model", "tiny", "--temperature", 0]
        cases.append((plain_ones, "expected one without a drafter and different draft lengths"))
        for options, said in cases:
            assert forecast(folder, "no", *options) == 2, options
            assert said in " ".join(capsys.readouterr().err.split()), options
        assert not (folder.parent / "no" / "forecast.json").exists()


def test_draft_lengths_of_sglang() -> None:
    for info, expected in (
        ({"speculative_num_draft_tokens": 5, "speculative_eagle_topk": 1}, 4),
        ({"internal_states": [{"speculative_num_draft_tokens": 3}]}, 2),
        ({"speculative_num_draft_tokens": None}, None),
        ({"speculative_num_draft_tokens": 1}, None),
        (None, None),
    ):
        with Engine(info=info).running() as engine:
            assert CounterRoutes(engine.url).sglang_draft_length() == expected
    with (
        Engine(info={"speculative_num_draft_tokens": 9, "speculative_eagle_topk": 4}).running() as engine,
        pytest.raises(Exception, match=r"drafts trees \(topk=4\); expected --speculative-eagle-topk 1"),
    ):
        CounterRoutes(engine.url).sglang_draft_length()
