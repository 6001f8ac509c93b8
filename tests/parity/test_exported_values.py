"""Values that a layout stores in another way than draftsmith; those that it cannot express are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import YARN, make_llama, make_t5, spread
from parity.published_files import DRAFTED, HIDDEN, KEPT, PROMPT
from parity.test_exports import eight_layers, exported, made
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
    drafter.body.sees = Visibility((3, 3), causal, windows_from_anchor=False)
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


ANCHORED, NORMED_HEADS = {"sample_from_anchor": True}, {"layers": [2, 4, 5], "qk_norm": True}
MANY = {"block_size": 4, "lilicorr_candidate_topk": 32, "lilicorr_hidden_size": 8, "lilicorr_factor_dim": 4}
TRAINED = "a trained mask embedding; expected the embedding of a token, or format=vllm"
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a repository's": ("medusa", {}, "hydra", "format='hydra'; expected one of vllm, sglang, gguf, native,"),
    "eagle in vllm": ("eagle", {}, "vllm", "expected sglang, transformers for a drafter of type eagle"),
    "residual": ("eagle3", {"norm_before_residual": True}, "sglang", "norm_before_residual=True; expected false, or"),
    "norm": ("eagle3", {"norm_before_fc": True}, "sglang", "norm_before_fc=True; expected false, or format=vllm"),
    "two norms": ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "vllm", "norm_before_fc and fc_norm; expected"),
    "layers": ("eagle3", {"num_hidden_layers": 2}, "sglang", "2 layers; expected one layer, or format=vllm"),
    "features": ("eagle3", {"layers": [1, 4]}, "sglang", r"features of layers \[1, 4\]; expected three of them"),
    "one feature twice": ("eagle3", {"layers": [1, 1, 5]}, "vllm", r"\[1, 1, 5\]; expected different layers"),
    "gated": ("dflash", {"markov_rank": 3, "markov_type": "gated"}, "vllm", "markov_type=gated; expected vanilla, or"),
    "recurrent": ("dflash", {"markov_rank": 3, "markov_type": "rnn"}, "gguf", "markov_type=rnn; expected vanilla, or"),
    "a selector alone": ("dflash", {"selector_rank": 2}, "vllm", "selector_rank=2, conv_kernel_size=0; expected both"),
    "convolutions alone": ("dflash", {"conv_kernel_size": 2}, "sglang", "conv_kernel_size=2; expected both or none"),
    "dflash 2 in gguf": ("dflash", {"selector_rank": 2}, "gguf", "convolutions or transitions other than"),
    "mtp in vllm": ("mtp", {}, "vllm", "format='vllm'; expected native, transformers for a drafter of type mtp"),
    "an anchor that predicts": (
        "dflash",
        {"sample_from_anchor": True},
        "vllm",
        "sample_from_anchor=True without markov_rank or confidence_head; expected false, or format=transformers",
    ),
    # SGLang's DFlash.
    "a causal DSpark": ("dflash", ANCHORED | {"causal": True}, "sglang", "causal layers; expected layers that see the"),
    "many candidates": ("dflash", MANY, "sglang", "lilicorr_candidate_topk=32; expected a power of two, at most 16,"),
    "a trained mask": ("dflash", {"trained_mask": True}, "sglang", TRAINED),
    "a trained mask of DSpark": ("dflash", ANCHORED | {"trained_mask": True}, "sglang", TRAINED),
    "Markov": ("dflash", {"markov_rank": 3}, "sglang", "markov_rank=3; expected 0, or format=vllm"),
    "confidence": ("dflash", {"confidence_head": True}, "sglang", "a confidence head; expected none, or format=vllm"),
    "own lm_head": ("dflash", {"draft_vocabulary": KEPT}, "sglang", "an lm_head of its own; expected the target's, or"),
    "norms of heads in sglang": ("eagle3", NORMED_HEADS, "sglang", "qk_norm=True; expected false, or format="),
    "norms of heads in vllm": ("eagle3", NORMED_HEADS, "vllm", "qk_norm=True; expected false, or format="),
    # llama.cpp's heads.
    "two layers": ("eagle3", {"num_hidden_layers": 2}, "gguf", "2 layers; expected one layer, or format=vllm"),
    "two features": ("eagle3", {"layers": [1, 4]}, "gguf", r"features of layers \[1, 4\]; expected three of them"),
    "last layer": ("eagle3", {"layers": [1, 4, 8]}, "gguf", r"\[1, 4, 8\]; expected layers 1 to 7, which llama"),
    "norms of features": ("eagle3", {"fc_norm": True}, "gguf", "fc_norm=True; expected false"),
    "normed output": ("eagle3", {"norm_output": True}, "gguf", "norm_output=True; expected false"),
    "norms of heads": ("eagle3", {"qk_norm": True}, "gguf", "qk_norm=True; expected false"),
    "anchor": ("dflash", ANCHORED, "gguf", "sample_from_anchor=True without markov_rank; expected false"),
    "confidence alone": ("dflash", {"confidence_head": True}, "gguf", "a confidence head without markov_rank;"),
    "last layer of dflash": ("dflash", {"layers": [8]}, "gguf", r"features of layers \[8\]; expected layers 1 to 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_say_is_refused(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    kind, options, format, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as refusal:
        exported(made(kind, target, **options), target, format, tmp_path / "out")
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_mask_state_that_no_features_give_is_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("peagle", target)
    with torch.no_grad():
        drafter.body.fc.weight[0] = 0
    with pytest.raises(ConfigError, match=r"a mask state that fc cannot produce \(relative error .*%\); expected an"):
        exported(drafter, target, "vllm", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, target: LlamaForCausalLM) -> None:
    (tmp_path / "out").mkdir()
    exported(made("medusa", target), target, "vllm", tmp_path / "out")
    before = (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ConfigError, match="out exists already; expected a new or an empty folder"):
        exported(made("medusa", target), target, "transformers", tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == before


def test_draft_models_of_another_vocabulary_or_kind_go_to_transformers_alone(tmp_path: Path) -> None:
    t5 = make_t5(2)
    drafter = made("draft_model", t5)
    with pytest.raises(ConfigError, match="an encoder-decoder model; expected format=transformers"):
        exported(drafter, t5, "vllm", tmp_path / "vllm")
    out = exported(drafter, t5, "transformers", tmp_path / "out").folder
    again = load_drafter(out, t5).state_dict()
    assert all(torch.equal(value, again[part]) for part, value in drafter.state_dict().items())
    drafter.vocab_size = 60
    with pytest.raises(ConfigError, match="a vocabulary of 60 beside the target's 64; expected the same size"):
        exported(drafter, eight_layers(), "sglang", tmp_path / "sglang")
