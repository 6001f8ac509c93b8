"""Values that a layout stores in another way than draftsmith, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import YARN, make_llama, spread
from parity.published_files import DRAFTED, HIDDEN, PROMPT
from parity.test_exports import exported, made
from parity.test_exports import target as target
from recording import decoded_logits
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import ConfigError, load_drafter
from draftsmith.heads.block_network import Visibility
from draftsmith.heads.draft_model import DraftModel


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_windows_are_written_or_refused(format: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("eagle3", target, layers=[2, 4, 5])
    drafter.body.config.layer_types, drafter.body.config.sliding_window = ["sliding_attention"], 5
    if format != "vllm":
        with pytest.raises(ConfigError, match="sliding_window=5; expected full attention, or format=vllm"):
            exported(drafter, target, format, tmp_path / "out")
        return
    out = exported(drafter, target, format, tmp_path / "out").folder
    layers = json.loads((out / "config.json").read_text())["transformer_layer_config"]
    assert (layers["layer_types"], layers["sliding_window"]) == (["sliding_attention"], 5)
    again = load_drafter(out, target)
    assert torch.equal(decoded_logits(again, target, PROMPT, DRAFTED), decoded_logits(drafter, target, PROMPT, DRAFTED))


@pytest.mark.parametrize("causal", [True, False])
def test_windows_of_blocks_are_written(causal: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("dflash", target, block_size=4)
    drafter.body.sees = Visibility((3, 3), causal, from_anchor=False)
    again = load_drafter(exported(drafter, target, "vllm", tmp_path / "out").folder, target)
    assert again.body.sees == drafter.body.sees
    drafter.body.sees.windows = (3, 5)
    with pytest.raises(ConfigError, match=r"windows of \[3, 5\] tokens; expected one size"):
        exported(drafter, target, "vllm", tmp_path / "other")


def test_a_mask_that_is_a_tokens_embedding_needs_no_embeddings(tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("dflash", target, block_size=4)
    with torch.no_grad():
        drafter.body.mask_embedding.copy_(target.get_input_embeddings().weight[17])
    out = exported(drafter, target, "vllm", tmp_path / "out").folder
    assert json.loads((out / "config.json").read_text())["mask_token_id"] == 17
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    assert torch.equal(load_drafter(out, target).body.mask_embedding, drafter.body.mask_embedding)


def test_embeddings_with_another_row_than_the_masks_are_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    out = exported(made("dflash", target, block_size=4, trained_mask=True), target, "vllm", tmp_path / "out").folder
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"mask_token_id": 3}))
    with pytest.raises(ConfigError, match="embeddings of their own are not supported"):
        load_drafter(out, target)


def test_biases_of_attention_have_one_after_it_too(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Engines allocate it where `attention_bias` is true and leave it uninitialised."""
    from draftsmith.heads.eagle3 import Eagle3
    from draftsmith.heads.layers import layer_config

    drafter = Eagle3(layer_config(target, 1, attention_bias=True), layers=(2, 4, 5)).eval().requires_grad_(False)
    drafter.attach(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    out = exported(drafter, target, "vllm", tmp_path / "out").folder
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["layers.0.self_attn.o_proj.bias"], torch.zeros(HIDDEN))
    assert json.loads((out / "config.json").read_text())["transformer_layer_config"]["attention_bias"] is True
    again = load_drafter(out, target).state_dict()
    assert all(torch.equal(value, again[part]) for part, value in drafter.state_dict().items())


LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}]
SCALINGS += [LONG | {"original_max_position_embeddings": 32}, {key: YARN[key] for key in YARN if key != "rope_theta"}]
ROTATED = [("draft_model", "transformers"), ("draft_model", "vllm"), ("draft_model", "sglang"), ("eagle", "sglang")]
ROTATED += [("eagle3", "sglang"), ("eagle3", "vllm"), ("peagle", "vllm"), ("dflash", "sglang"), ("dflash", "vllm")]


@pytest.mark.parametrize(("drafter", "scaling"), spread(ROTATED, SCALINGS))
def test_base_and_scaling_have_the_names_of_old_and_new_readers(
    drafter: tuple[str, str], scaling: dict[str, Any], tmp_path: Path
) -> None:
    """transformers 5 writes `rope_parameters` alone, for which other readers take base 10,000."""
    (kind, format), rope = drafter, {**scaling, "rope_theta": 500.0}
    rotated = make_llama(num_hidden_layers=8, rope_parameters=rope).requires_grad_(False)
    own = made(kind, rotated, **({"num_tokens": 3, "mask_token": 17} if kind == "peagle" else {}))
    stored = json.loads((exported(own, rotated, format, tmp_path / "out").folder / "config.json").read_text())
    layers = stored.get("transformer_layer_config", stored)
    assert layers["rope_theta"] == 500.0
    assert layers.get("rope_scaling") == (None if scaling["rope_type"] == "default" else scaling)
    assert stored["torch_dtype"] == stored["dtype"] == "float32"
    for names in (["rope_theta", "rope_scaling"], ["rope_parameters"], []):
        read = LlamaConfig(**{key: value for key, value in layers.items() if key not in names})
        assert read.rope_parameters == rope
    again = load_drafter(tmp_path / "out", rotated)
    config = again.model.config if isinstance(again, DraftModel) else again.body.config
    assert config.rope_parameters == rope
