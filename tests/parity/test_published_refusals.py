"""Published drafters that do not fit, or that nothing here can express: refused by tensor or key."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from parity.published_files import (
    HEAD,
    HIDDEN,
    INNER,
    KEPT,
    LILICORR,
    VLLM,
    VOCAB,
    Tensors,
    dflash_tensors,
    eagle3_tensors,
    llama_config,
    six_layers,
    speculators,
    written,
)
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from draftsmith import load_drafter
from draftsmith.errors import ConfigError

FLAT = {"architectures": ["LlamaForCausalLMEagle3"]}
ZLAB = llama_config(architectures=["DFlashDraftModel"], block_size=4, target_layer_ids=[1, 3])
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6, "mask_token_id": 17}
LATTICE = {f"lilicorr_{key}": value for key, value in LILICORR.items()} | {"mask_token_id": 17}
DEEPSPEC = ZLAB | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 17}
BLOCK = {"block_size": 4, "mask_token_id": 17, "aux_hidden_state_layer_ids": [2, 4]}
MEDUSA = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1}
HEADS = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN), "lm_heads.0.weight": torch.zeros(2, HIDDEN)}
EAGLE1 = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), "layers.0.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN)}
FOLDERS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "eagle3": (speculators("eagle3", **VLLM, draft_vocab_size=len(KEPT)), eagle3_tensors(KEPT)),
    "sglang": (llama_config(**FLAT), {}),
    "automodel": (llama_config(architectures=["LlamaEagle3DraftModel"]), {}),
    "eagle": (llama_config(), EAGLE1),
    "peagle": (speculators("peagle", mask_token_id=1), {}),
    "dflash": (speculators("dflash", **BLOCK), {}),
    "zlab": (ZLAB, {}),
    "zlab2": (ZLAB | {"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND}, {}),
    "lilicorr": (ZLAB | {"architectures": ["LiLiCorrDraftModel"], "dflash_config": LATTICE}, {}),
    "deepspec": (DEEPSPEC, {}),
    "mtp": (speculators("mtp"), {}),
    "medusa": (MEDUSA, HEADS),
}
KEYS: list[tuple[str, str, Any]] = [
    ("eagle3", "draft_vocab_size", 65),
    ("eagle3", "speculators_model_type", "eagle4"),
    ("eagle3", "transformer_layer_config", 3),
    ("eagle3", "transformer_layer_config.num_key_value_heads", 3),
    ("eagle3", "transformer_layer_config.model_type", "gemma2"),
    ("eagle3", "transformer_layer_config.partial_rotary_factor", 0.5),
    ("eagle3", "transformer_layer_config.vocab_size", 60),
    ("eagle3", "target_hidden_size", 48),
    ("eagle3", "eagle_aux_hidden_state_layer_ids", [2, 3, 7]),
    ("eagle3", "speculators_config.proposal_methods", "greedy"),
    ("eagle3", "logit_scale", 0.5),
    ("sglang", "eagle_config.eagle_aux_hidden_state_layer_ids", [1, 2, 6]),
    ("sglang", "eagle_aux_hidden_state_layer_ids", [2, 3, 5]),
    ("automodel", "parallel_drafting", True),
    ("peagle", "mask_token_id", 64),
    ("dflash", "sample_from_anchor", 1.5),
    ("dflash", "draft_vocab_size", 65),
    ("dflash", "block_size", 1),
    ("dflash", "markov_head_type", "x"),
    ("dflash", "aux_hidden_state_layer_ids", None),
    ("zlab", "mask_token_id", None),
    ("zlab", "dflash_config", [1]),
    ("zlab", "num_target_layers", 7),
    ("zlab", "target_layer_ids", [6]),
    ("zlab", "target_layer_ids", None),
    ("zlab", "output_multiplier", 0.5),
    ("zlab", "final_logit_softcapping", 30.0),
    ("zlab", "is_causal", "yes"),
    ("zlab", "dflash_config.causal", "no"),
    ("zlab", "dflash_config.swa_window_size", 3),
    ("zlab", "attention_sink_bias", "all"),
    ("deepspec", "dspark_bonus_anchor", "yes"),
    ("deepspec", "attention_value_scale", 0.5),
    ("zlab", "dflash_config.projector_type", "domino"),
    ("zlab", "dflash_config.input_embedding_scale", 8.0),
    ("zlab", "dflash_config.conv_kernel_size", 3),
    ("zlab2", "dflash_config.conv_group_size", 5),
    ("zlab2", "dflash_config.selector_top_k", 65),
    ("zlab2", "dflash_config.selector_rank", None),
    ("lilicorr", "dflash_config.lilicorr_candidate_topk", 6),
    ("lilicorr", "dflash_config.lilicorr_candidate_topk", 32),
    ("lilicorr", "dflash_config.lilicorr_logit_scale", None),
    ("lilicorr", "dflash_config.lilicorr_vector_eps", float("inf")),
    ("lilicorr", "dflash_config.conv_kernel_size", 2.5),
    ("zlab", "dflash_config.training_mode", "vp_drafter"),
    ("zlab", "dflash_config.loss_type", "vp_drafter"),
    ("deepspec", "markov_head_type", "lstm"),
    ("deepspec", "dflash_config.projector_type", "domino"),
    ("deepspec", "target_layer_ids", [-1]),
    ("mtp", "num_nextn_predict_layers", 2),
    ("medusa", "hidden_size", 16),
    ("medusa", "num_heads", 0),
]
"""A layout, one of its keys and a value that does not fit; the error names both."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return six_layers()


def refusal(folder: Path, config: dict[str, Any], tensors: Tensors, target: LlamaForCausalLM) -> str:
    written(folder, config, tensors or {"x": torch.zeros(1)})
    with pytest.raises(ConfigError) as refused:
        load_drafter(folder, target)
    said = str(refused.value)
    assert str(folder) in said
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("layout", "key", "value"), KEYS, ids=[f"{layout}-{key}" for layout, key, _ in KEYS])
def test_a_value_that_does_not_fit_is_named(
    layout: str, key: str, value: Any, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    config, tensors = deepcopy(FOLDERS[layout])
    *path, last = key.split(".")
    inner = config
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
    assert f"{last}={value!r}" in refusal(tmp_path / "d", config, tensors, target)


@pytest.mark.parametrize("name", ["DominoDraftModel", "Eagle3DeepseekV2ForCausalLM", "Gemma4DSparkModel"])
def test_an_architecture_without_a_reader_is_refused(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    assert f"a {name}; expected one of" in refusal(tmp_path / "d", llama_config(architectures=[name]), {}, target)


def without(name: str, **changes: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, tensors: (tensors.pop(name, None), config.update(changes))


def replaced(name: str, value: torch.Tensor, **changes: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, tensors: (tensors.update({name: value}), config.update(changes))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("eagle3", without("layers.0.hidden_norm.weight"), "no tensor layers.0.hidden_norm.weight; expected float"),
        ("eagle3", replaced("norm.weight", torch.tensor([torch.nan] * HIDDEN)), "tensor norm.weight has values that"),
        ("eagle3", without("d2t"), "no tensor d2t; expected int [8]"),
        ("eagle3", without("", fc_norm=True), "no tensor fc_norm.0.weight; expected float [32]"),
        ("eagle3", without("", draft_vocab_size=9), "tensor d2t is int [8]; expected int [9]"),
        ("eagle3", replaced("sink", torch.zeros(3)), "unexpected tensor sink [3]"),
        ("eagle3", replaced("layers.0.self_attn.q_norm.weight", torch.ones(HEAD)), "unexpected tensor layers.0."),
        ("eagle3", replaced("fc.weight", torch.zeros(32, 32)), "fc.weight is float [32, 32]; expected float [32, 96]"),
        ("eagle3", replaced("embed_tokens.weight", torch.zeros(VOCAB, HIDDEN)), "embeddings of their own are not"),
        ("eagle3", replaced("t2d", torch.ones(VOCAB).long()), "t2d is int [64]; expected bool [64]"),
        ("eagle3", replaced("t2d", torch.arange(VOCAB) < 8), "d2t and t2d name different tokens"),
        ("eagle3", replaced("d2t", torch.tensor(KEPT) + 30), "d2t leads outside the vocabulary of 64"),
        ("eagle3", replaced("d2t", torch.tensor(KEPT)), "d2t holds the tokens themselves; expected offsets"),
        ("sglang", replaced("layers.0.x", torch.zeros(1)), "no tensor "),
        ("peagle", without(""), "no tensor mask_hidden; expected float [1, 1, 96]"),
        ("peagle", replaced("mask_hidden", torch.zeros(HIDDEN)), "is float [32]; expected float [1, 1, 96]"),
        ("peagle", without("", speculators_config={}), "speculative_tokens=None in config.json; expected an integer"),
        ("zlab", without("", architectures=None), "no architectures; expected one of DFlash2DraftModel, "),
        ("zlab", replaced("prefix_gru.x", torch.ones(1), mask_token_id=1), "unexpected tensor prefix_gru.x"),
        ("eagle", without(""), "no tensor layers.0.self_attn.q_proj.weight; expected float [32, 32]"),
        ("eagle", without("", bias=True), "no tensor fc.bias; expected float [32]"),
        ("medusa", without(""), "lm_heads.0.weight is float [2, 32]; expected float [64, 32]"),
        ("medusa", without("", truncated_vocab_size=2), "no tensor token_map; expected int [2]"),
        ("medusa", replaced("token_map", torch.tensor([3, 64]), truncated_vocab_size=2), "repeated or unknown tokens"),
        ("medusa", replaced("token_map", torch.tensor([3, 3]), truncated_vocab_size=2), "repeated or unknown tokens"),
        ("medusa", without("", medusa_fc_bias=True), "no tensor blocks.0.layers.0.bias; expected float [32]"),
        (
            "medusa",
            replaced("blocks.0.layers.0.bias", torch.zeros(HIDDEN), medusa_fc_bias=False),
            "medusa_fc_bias=False in config.json; expected True",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    layout: str, change: Callable[[dict[str, Any], Tensors], object], message: str, tmp_path: Path, target: Any
) -> None:
    config, tensors = deepcopy(FOLDERS[layout])
    if layout == "zlab":
        tensors |= dflash_tensors()
    change(config, tensors)
    assert message in refusal(tmp_path / "d", config, tensors, target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (speculators("eagle3", transformer_layer_config={}), "hidden_size=4096 in config.json; expected 32"),
        (
            speculators("eagle3", transformer_layer_config=llama_config(num_attention_heads="four")),
            "num_attention_heads",
        ),
        (
            speculators("eagle3", transformer_layer_config=llama_config(layer_types=["sliding_attention"])),
            "sliding_window=",
        ),
        (
            ZLAB | {"sliding_window": 129, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
            "sliding_window=129 in config.json; expected an integer, 1 to 128",
        ),
        (
            ZLAB | {"sliding_window": 9, "dflash_config": {"use_swa": True, "swa_window_size": 8}},
            "sliding_window=9 in config.json; expected one of None, 8",
        ),
        (
            ZLAB
            | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
            | {"dflash_config": {"use_swa": True}},
            "use_swa=True in config.json; expected False",
        ),
        (
            DEEPSPEC | {"target_layer_ids": [1, 3], "dspark_bonus_anchor": True, "sample_from_anchor": True},
            "dspark_bonus_anchor=True in config.json; expected False",
        ),
        (DEEPSPEC | {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 2}, "num_hidden_layers=2"),
    ],
)
def test_layers_that_cannot_be_built_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    assert message in refusal(tmp_path / "d", config, {}, target)


def test_lm_heads_of_blocks_have_the_rows_of_their_vocabulary(tmp_path: Path, target: LlamaForCausalLM) -> None:
    config = speculators("dflash", **BLOCK)
    shorter = dflash_tensors() | {"lm_head.weight": torch.zeros(VOCAB - 1, HIDDEN)}
    assert "is float [63, 32]; expected float [64, 32]" in refusal(tmp_path / "d", config, shorter, target)
    said = refusal(tmp_path / "none", config | {"draft_vocab_size": 8}, dflash_tensors(), target)
    assert "no tensor lm_head.weight; expected float [8, 32]" in said
    markov = dflash_tensors() | {"markov_head.markov_w1.weight": torch.ones(VOCAB, 5)}
    said = refusal(tmp_path / "markov", DEEPSPEC | {"markov_head_type": "gated"}, markov, target)
    assert "no tensor markov_w2.weight; expected float [64, 5]" in said


def test_other_targets_and_files_are_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    folder = written(tmp_path / "d", speculators("eagle3", **VLLM), eagle3_tensors())
    with pytest.raises(ConfigError, match=r"hidden_size=32 in config\.json; expected 16"):
        load_drafter(folder, make_llama(num_hidden_layers=6, hidden_size=16))
    with pytest.raises(ConfigError, match=r"\[2, 3, 5\]; expected a list of the target's layers, 1 to 4"):
        load_drafter(folder, make_llama(num_hidden_layers=4))
    save_file({"norm.weight": torch.ones(HIDDEN)}, folder / "more.safetensors")
    with pytest.raises(ConfigError, match=r"tensor norm\.weight is in two files"):
        load_drafter(folder, target)
    (folder / "more.safetensors").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in the folder"):
        load_drafter(folder, target)
