"""Exports that a layout cannot express are refused by name, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.published_files import KEPT
from parity.test_exports import eight_layers, exported, made
from parity.test_exports import target as target
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith import ConfigError, load_drafter

ANCHORED, NORMED_HEADS = {"sample_from_anchor": True}, {"layers": [2, 4, 5], "qk_norm": True}
MANY = {"block_size": 4, "lilicorr_candidate_topk": 32, "lilicorr_hidden_size": 8, "lilicorr_factor_dim": 4}
TRAINED = "a trained mask embedding; expected the embedding of a token, or format=vllm"
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a repository's": (
        "medusa",
        {},
        "hydra",
        "format='hydra'; expected one of vllm, sglang, gguf, native, transformers",
    ),
    "eagle in vllm": ("eagle", {}, "vllm", "expected sglang, transformers for a drafter of type eagle"),
    "residual": ("eagle3", {"norm_before_residual": True}, "sglang", "norm_before_residual=True; expected false, or"),
    "norm": ("eagle3", {"norm_before_fc": True}, "sglang", "norm_before_fc=True; expected false, or format=vllm"),
    "two norms": ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "vllm", "norm_before_fc and fc_norm; expected"),
    "layers": ("eagle3", {"num_hidden_layers": 2}, "sglang", "2 layers; expected one layer, or format=vllm"),
    "features": ("eagle3", {"layers": [1, 4]}, "sglang", r"features of layers \[1, 4\]; expected three of them"),
    "one feature twice": ("eagle3", {"layers": [1, 1, 5]}, "vllm", r"\[1, 1, 5\]; expected different layers"),
    "gated": ("dflash", {"markov_rank": 3, "markov_type": "gated"}, "vllm", "markov_type=gated; expected vanilla, or"),
    "recurrent": ("dflash", {"markov_rank": 3, "markov_type": "rnn"}, "gguf", "markov_type=rnn; expected vanilla, or"),
    "a selector alone": (
        "dflash",
        {"selector_rank": 2},
        "vllm",
        "selector_rank=2, conv_kernel_size=0; expected both or",
    ),
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
    with pytest.raises(
        ConfigError, match=r"a mask state that fc cannot produce \(relative error .*%\); expected an fc of"
    ):
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
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(T5Config(**sizes, d_kv=16, decoder_start_token_id=0)).eval()
    drafter = made("draft_model", t5)
    with pytest.raises(ConfigError, match="an encoder-decoder model; expected format=transformers"):
        exported(drafter, t5, "vllm", tmp_path / "vllm")
    out = exported(drafter, t5, "transformers", tmp_path / "out").folder
    again = load_drafter(out, t5).state_dict()
    assert all(torch.equal(value, again[part]) for part, value in drafter.state_dict().items())
    drafter.vocab_size = 60
    with pytest.raises(ConfigError, match="a vocabulary of 60 beside the target's 64; expected the same size"):
        exported(drafter, eight_layers(), "sglang", tmp_path / "sglang")
