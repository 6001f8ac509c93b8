"""Fixtures of commands on tiny models. No test depends on the seconds that they measure."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import write_prompts
from conftest import make_llama
from engine_server import behind_a_proxy, chat_tokenizer
from forked import Server
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.eval.server import counters
from draftsmith.heads import Medusa
from draftsmith.heads.checkpoint import describe_target, save_drafter


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes, rounds and `generate` once, instead of several times for a median."""
    for module, counts in {
        "decode.profiling": {"REPEATS": 1, "TURNS": 2},
        "eval.baseline": {"TRIALS": 1, "TOKENS": 8, "PAIRS": 1},
    }.items():
        for name, value in counts.items():
            monkeypatch.setattr(f"draftsmith.{module}.{name}", value)


@pytest.fixture(scope="session")
def run_server() -> Iterator[Server]:
    """Return the process that runs of all test files are forked from."""
    served = Server()
    yield served
    served.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "few.jsonl", "abcd", "hello", "xyz")


@pytest.fixture
def medusa_folder(tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    made_for = describe_target(tiny_target, tiny_tokenizer, "tiny")
    drafter = Medusa.from_target(tiny_target, num_heads=2)
    save_drafter(drafter, tmp_path / "medusa", target=made_for, recipe={"name": "x"}, draft_length=2)
    return tmp_path / "medusa"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a target that an engine of tests/engine_server.py serves."""
    behind_a_proxy(monkeypatch)
    monkeypatch.setattr(counters, "SETTLE_SECONDS", 0.0)
    make_llama().save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"
