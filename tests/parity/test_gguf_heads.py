"""GGUF files of EAGLE-3, DFlash and DSpark, by llama.cpp's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from parity.test_exports import made
from parity.test_gguf import HIDDEN, LAYER, SIZES, VOCAB, neighbours, read, written
from parity.test_gguf import target as target
from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from draftsmith import ConfigError

KEPT = list(range(5, 85, 2))
EAGLE3 = {"blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight", "fc.weight": "fc.weight"}
EAGLE3 |= {"output_norm.weight": "norm.weight", "output.weight": "lm_head.weight"}
EAGLE3 |= {f"blk.0.{theirs}.weight": f"layers.0.{own}.weight" for own, theirs in LAYER.items() if "_norm" not in own}
EAGLE3 |= {f"blk.0.{LAYER[own]}.weight": f"layers.0.{own}.weight" for own in LAYER if own.endswith("_layernorm")}
DFLASH = {f"blk.0.{theirs}.weight": f"layers.0.{own}.weight" for own, theirs in LAYER.items()}
DFLASH |= {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
}


@pytest.mark.parametrize("normed", [True, False])
def test_eagle3(normed: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Rows of queries and keys as in Llama; d2t holds tokens, of the draft vocabulary."""
    options = {"norm_before_residual": True, "norm_before_fc": True, "draft_vocabulary": KEPT} if normed else {}
    drafter = made("eagle3", target, layers=[1, 4, 7], **options)
    result = written(drafter, target, tmp_path / "out")
    keys, tensors = read(result.folder)
    state = drafter.body.state_dict()
    wanted = {theirs: state[own] for theirs, own in EAGLE3.items()}
    wanted |= {f"blk.0.attn_{p}.weight": neighbours(state[f"layers.0.self_attn.{p}_proj.weight"]) for p in "qk"}
    if normed:
        wanted |= {"enc.output_norm.weight": state["input_norm.weight"], "d2t": torch.tensor(KEPT)}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[part], value) for part, value in wanted.items())
    own = {key.removeprefix("eagle3."): value for key, value in keys.items() if key.startswith("eagle3.")}
    assert (own["target_layers"], own["target_hidden_size"], own["vocab_size"]) == ([1, 4, 7], HIDDEN, VOCAB)
    assert (own["norm_before_residual"], own["norm_before_fc"], own["block_count"]) == (normed, normed, 1)
    assert "--spec-type draft-eagle3 --spec-draft-n-max 4" in result.usage


@pytest.mark.parametrize("kind", ["dflash", "dflash of 40 tokens", "dspark", "dspark from the anchor"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained mask", "a token's mask"])
def test_dflash(kind: str, trained: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Rows as in transformers; embeddings, and the target's lm_head beside them, only for a trained mask."""
    options: dict[str, Any] = {"block_size": 5, "num_hidden_layers": 1}
    options |= {"trained_mask": True} if trained else {"mask_token": 17}
    options |= {"draft_vocabulary": KEPT} if "40" in kind else {}
    anchored, dspark = "anchor" in kind, "dspark" in kind
    options |= {"markov_rank": 3, "confidence_head": anchored, "sample_from_anchor": anchored} if dspark else {}
    drafter = made("dflash", target, **options)
    embeddings = target.get_input_embeddings().weight
    result = written(drafter, target, tmp_path / "out")
    keys, tensors = read(result.folder)
    state = drafter.state_dict()
    wanted = {theirs: state[f"body.{own}"] for theirs, own in DFLASH.items()}
    if dspark:
        wanted |= {f"markov_w{k}.weight": state[f"markov.markov_w{k}.weight"] for k in (1, 2)}
    if anchored:
        wanted |= {f"conf_proj.{part}": state[f"confidence.{part}"] for part in ("weight", "bias")}
    if trained:
        wanted |= {"token_embd.weight": embeddings.clone(), "output.weight": target.lm_head.weight}
        wanted["token_embd.weight"][-1] = drafter.body.mask_embedding
    if "40" in kind:
        wanted |= {"output.weight": state["body.lm_head.weight"], "d2t": torch.tensor(KEPT)}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[part], value) for part, value in wanted.items())
    assert keys["dflash.target_layers"] == list(drafter.needs.layers)
    assert keys["dflash.block_size"] == 5
    assert keys["tokenizer.ggml.mask_token_id"] == (VOCAB - 1 if trained else 17)
    assert keys.get("dflash.sample_from_anchor") == (anchored if dspark else None)
    assert keys.get("dflash.has_confidence_head") == (anchored if dspark else None)
    name = "draft-dspark" if dspark else "draft-dflash"
    assert f"--spec-type {name} --spec-draft-n-max {5 if anchored else 4}" in result.usage


def test_windows_biases_and_targets_are_refused(tmp_path: Path) -> None:
    target = make_llama(**SIZES | {"num_hidden_layers": 8}).requires_grad_(False)
    windowed = made("dflash", target)
    windowed.body.sees.windows = (3, None)
    with pytest.raises(ConfigError, match="a window of 3 tokens; expected none: llama"):
        written(windowed, target, tmp_path / "out")
    drafter = made("eagle3", target)
    drafter.body.config.attention_bias = True
    with pytest.raises(ConfigError, match="attention_bias=True; expected false"):
        written(drafter, target, tmp_path / "out")
    drafter.body.config.attention_bias = False
    drafter.body.config.layer_types, drafter.body.config.sliding_window = ["sliding_attention"], 5
    with pytest.raises(ConfigError, match="sliding_window=5; expected full attention"):
        written(drafter, target, tmp_path / "out")
    drafter = made("eagle3", target)
    target.config.rope_parameters["mrope_section"] = [2, 1, 1]
    with pytest.raises(ConfigError, match=r"a target with mrope_section=\[2, 1, 1\]; expected one position per token"):
        written(drafter, target, tmp_path / "out")
    del target.config.rope_parameters["mrope_section"]
    target.get_input_embeddings().register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ConfigError, match="a target that scales its embeddings; expected another format"):
        written(drafter, target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 8, "logits_scaling": 4.0}
    torch.manual_seed(0)
    target = GraniteForCausalLM(GraniteConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)).eval()
    with pytest.raises(ConfigError, match="a target that scales or caps its logits; expected another format"):
        written(made("dflash", target.requires_grad_(False)), target, tmp_path / "out")
