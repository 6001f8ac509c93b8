"""Every test has a cache of its own."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.load_target import LoadedTarget


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def loaded(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> LoadedTarget:
    return LoadedTarget(tiny_target, tiny_tokenizer, "tiny", None)
