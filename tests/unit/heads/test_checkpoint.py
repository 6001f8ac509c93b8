"""Drafters are refused where they do not fit; draft models are plain checkpoints of transformers."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads import Drafter, DraftModel, Medusa
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.draft_model import spread


def _save(drafter: Drafter, folder: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    made_for = describe_target(target, tokenizer, "tiny")
    save_drafter(drafter, folder, target=made_for, recipe={"a": 1}, draft_length=3, tokenizer=tokenizer)
    return folder


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("stored", "trained", "loaded"),
    [
        (FLOAT32, FLOAT32, FLOAT16),
        (FLOAT32, BFLOAT16, FLOAT32),
        (BFLOAT16, BFLOAT16, FLOAT16),
        (BFLOAT16, FLOAT16, BFLOAT16),
        (FLOAT16, BFLOAT16, FLOAT16),
    ],
    ids=str,
)
def test_a_cast_target_is_the_same_target(
    stored: torch.dtype, trained: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    """Small weights included, which float16 rounds away; and weights that are others stay others in every dtype."""

    def target(dtype: torch.dtype, change: float = 1.0) -> LlamaForCausalLM:
        made = make_llama()
        made.model.embed_tokens.weight.data[3] *= 1e-6
        made.lm_head.weight.data[:, ::3] *= change
        return made.to(stored).to(dtype)

    folder = _save(Medusa.from_target(target(trained)), tmp_path / "d", target(trained), None)
    assert load_drafter(folder, target(loaded)).type == "medusa"
    with pytest.raises(ConfigError, match="the target's weights are different"):
        load_drafter(folder, target(loaded, change=1.01))


def test_misfits_are_refused(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    medusa = _save(Medusa.from_target(tiny_target), tmp_path / "m", tiny_target, tiny_tokenizer)
    with pytest.raises(ConfigError, match="vocab_size=64; expected the target's 60"):
        load_drafter(medusa, make_llama(vocab_size=60))
    with pytest.raises(ConfigError, match="reads the hidden states of tiny"):
        load_drafter(medusa, make_llama(seed=9))
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    other.add_tokens(["<extra>"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_drafter(medusa, tiny_target, other)
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json"):
        load_drafter(tmp_path, tiny_target)
    with pytest.raises(ConfigError, match="expected a local folder or a Hub id"):
        load_drafter(tmp_path / "absent" / "too deep", tiny_target)


def test_target_layers_are_copied(tiny_target: LlamaForCausalLM) -> None:
    draft = DraftModel.from_target(tiny_target, num_hidden_layers=2, init="target_layers").model
    ids = torch.arange(2, 20)[None]
    assert torch.equal(draft(ids).logits, tiny_target(ids).logits)
    assert spread(1, 12) == [0]
    assert spread(3, 12) == [0, 6, 11]
    with pytest.raises(ConfigError, match=r"drafter\.num_hidden_layers=3; expected 1 to the target's 2"):
        DraftModel.from_target(tiny_target, num_hidden_layers=3)


def test_a_config_that_cannot_be_used_is_not_called_damaged_weights(tmp_path: Path) -> None:
    """A number in quotes, and a key of the drafter that is missing."""
    target = make_llama()
    target.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": None, "rope_theta": "10000"}))
    medusa = Medusa.from_target(target)
    described = describe_target(target, None, "tiny")
    save_drafter(medusa, tmp_path / "medusa", target=described, recipe=None, draft_length=2)
    file = tmp_path / "medusa" / "config.json"
    stored = json.loads(file.read_text())
    del stored["draftsmith"]["drafter"]["num_layers"], stored["draftsmith"]["drafter"]["hidden_size"]
    file.write_text(json.dumps(stored))
    for name in ("model", "medusa"):
        with pytest.raises(ConfigError, match=r"config\.json") as said:
            load_drafter(tmp_path / name, target)
        assert "whole safetensors" not in str(said.value)
