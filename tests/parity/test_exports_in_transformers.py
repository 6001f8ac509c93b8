"""Exports inside stock transformers: draft models as `assistant_model`, heads as `custom_generate`, same text."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from parity.test_exports import eight_layers, exported, made
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from draftsmith import ConfigError, load_drafter
from draftsmith.decode import decoder as decoder_module
from draftsmith.heads.retrieval import Hybrid

PROMPT = torch.tensor([[5, 9, 33, 2, 5, 9]])
LENGTH = 16


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    model = eight_layers()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code that it runs into a cache."""
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub", "transformers.utils"):
        loaded: ModuleType | None = sys.modules.get(module)
        if hasattr(loaded, "HF_MODULES_CACHE"):
            monkeypatch.setattr(loaded, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def written(target: LlamaForCausalLM, **options: Any) -> Tensor:
    mask = torch.ones_like(PROMPT)
    return target.generate(PROMPT, attention_mask=mask, do_sample=False, max_new_tokens=LENGTH, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_model_is_an_assistant(dtype: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """AutoModel loads the folder, which has no draftsmith section: weights are bit-equal, the text is the target's."""
    drafter = made("draft_model", target, init="target_layers", num_hidden_layers=2)
    out = exported(drafter, target, "transformers", tmp_path / "out", dtype=dtype).folder
    assert "draftsmith" not in json.loads((out / "config.json").read_text())
    assistant = AutoModelForCausalLM.from_pretrained(out)
    assert str(assistant.dtype) == f"torch.{dtype}"
    for name, value in drafter.model.state_dict().items():
        assert torch.equal(assistant.state_dict()[name], value.to(assistant.dtype)), name
    if dtype == "float32":
        assert torch.equal(assistant(PROMPT).logits, drafter.model(PROMPT).logits)
    assert torch.equal(written(target, assistant_model=assistant), written(target))


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_a_head_is_a_custom_generate(kind: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made(kind, target)
    out = exported(drafter, target, "transformers", tmp_path / "out").folder
    again = load_drafter(out, target)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    target.__dict__.pop("_draftsmith_drafters", None)
    assert torch.equal(written(target, custom_generate=str(out), trust_remote_code=True), written(target))
    assert [place for place, _ in target._draftsmith_drafters] == [str(out)]


def test_each_repository_brings_its_own_drafter(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same in all, and transformers keeps one copy of it for folders of one name."""
    for name in ("one", "other"):
        drafter = made("medusa", target, num_heads=2 if name == "one" else 3)
        exported(drafter, target, "transformers", tmp_path / name / "drafter")
    heads = []
    made_decoder = decoder_module.SpeculativeDecoder.__init__

    def watched(self: Any, model: Any, drafter: Any, **options: Any) -> None:
        if not isinstance(drafter, Hybrid):  # which the default is made of
            heads.append(drafter.num_heads)
        made_decoder(self, model, drafter, **options)

    monkeypatch.setattr(decoder_module.SpeculativeDecoder, "__init__", watched)
    for name in ("one", "other"):
        written(target, custom_generate=str(tmp_path / name / "drafter"), trust_remote_code=True)
    one, other = (str(tmp_path / name / "drafter") for name in ("one", "other"))
    written(target, custom_generate=one, trust_remote_code=True, drafter=other)
    assert heads == [2, 3], "what is loaded once is kept"
    written(target, custom_generate=one, trust_remote_code=True, drafter=other, draft_length=1)
    assert heads == [2, 3, 3]


def test_weights_of_a_repository_are_data_at_its_revision(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """No code is fetched with them."""
    out = exported(made("medusa", target), target, "transformers", tmp_path / "out").folder
    module = ModuleType("generate")
    exec((out / "custom_generate" / "generate.py").read_text(), module.__dict__)
    asked = []

    def snapshot_download(place: str, **options: Any) -> str:
        asked.append((place, options["revision"], "*.py" in options["allow_patterns"]))
        return str(out)

    module.snapshot_download = snapshot_download
    options = {"input_ids": PROMPT, "do_sample": False, "max_new_tokens": LENGTH}
    tokens = module.generate(target, drafter="user/drafter", revision="v1", streamer=None, **options)
    assert torch.equal(tokens, written(target))
    assert asked == [("user/drafter", "v1", False)]
    with pytest.raises(ConfigError, match=r"drafter=None; expected the folder or Hub repository of this drafter"):
        module.generate(target, **options)


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_sampling_batches_stops_and_streams_as_generate_does(
    tmp_path: Path, target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the export's folder, as its card says."""
    monkeypatch.chdir(exported(made("medusa", target), target, "transformers", tmp_path / "out").folder)
    assert 'custom_generate=".", trust_remote_code=True' in Path("README.md").read_text()
    ours = {"custom_generate": ".", "trust_remote_code": True, "policy": "chain:draft_length=2"}
    heard = Heard()
    assert torch.equal(written(target, streamer=heard, **ours), written(target))
    assert (heard.tokens, heard.ended) == (written(target)[0].tolist(), True)
    letter = tiny_tokenizer.decode(written(target)[0, PROMPT.shape[1] + 4])
    stops = {"stop_strings": [letter], "tokenizer": tiny_tokenizer}
    assert torch.equal(written(target, **stops, **ours), written(target, **stops))
    assert written(target, **stops, **ours).shape[1] <= PROMPT.shape[1] + 5
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        both = PROMPT.repeat(2, 1)
        options = {"attention_mask": torch.ones_like(both), "max_new_tokens": 8, "do_sample": True, "top_k": 5}
        texts.append(target.generate(input_ids=both, **options, **ours))
    assert texts[0].shape == (2, PROMPT.shape[1] + 8)
    assert torch.equal(*texts)


def test_without_draftsmith_it_says_what_is_missing(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = exported(made("medusa", target), target, "transformers", tmp_path / "out").folder
    monkeypatch.setitem(sys.modules, "draftsmith", None)  # as where it is not installed
    with pytest.raises(ImportError, match="draftsmith"):
        written(target, custom_generate=str(out), trust_remote_code=True)
