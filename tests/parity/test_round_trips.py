"""A file that an engine loads is written again bit for bit; conversions keep logits to 1e-12 in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.published_files import (
    DRAFTED,
    HEAD,
    HEADS,
    HIDDEN,
    KEPT,
    KV_HEADS,
    LILICORR,
    PROMPT,
    VLLM,
    VOCAB,
    Tensors,
    dflash2_tensors,
    dflash_tensors,
    eagle3_tensors,
    layer_shapes,
    lilicorr_tensors,
    llama_config,
    random_tensors,
    six_layers,
    speculators,
    vocabulary_maps,
    written,
)
from recording import decoded_logits
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from draftsmith import load_drafter
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.hub.export import export_drafter

LAYER = "layers.0."
Folder = tuple[dict[str, Any], Tensors]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return six_layers()


def speculators_eagle3(target: LlamaForCausalLM) -> Folder:
    return speculators("eagle3", **VLLM), eagle3_tensors()


def speculators_eagle3_of_8_tokens_in_a_window(target: LlamaForCausalLM) -> Folder:
    norms = {f"fc_norm.{k}.weight": (HIDDEN,) for k in range(3)}
    config = speculators("eagle3", **VLLM, fc_norm=True, norm_output=True, draft_vocab_size=len(KEPT))
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 3}
    return config, eagle3_tensors(KEPT) | random_tensors(norms, 1)


def speculators_eagle3_as_saved(target: LlamaForCausalLM) -> Folder:
    """The package's `save_pretrained` keeps the embeddings, which are the target's."""
    config, tensors = speculators_eagle3_of_8_tokens_in_a_window(target)
    return config, tensors | {"embed_tokens.weight": target.get_input_embeddings().weight}


def speculators_peagle(target: LlamaForCausalLM) -> Folder:
    config = speculators("peagle", **VLLM, mask_token_id=17, draft_vocab_size=len(KEPT))
    return config, eagle3_tensors(KEPT) | random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=2)


def speculators_dflash(target: LlamaForCausalLM) -> Folder:
    config = speculators("dflash", block_size=4, mask_token_id=17, sample_from_anchor=False)
    config["transformer_layer_config"]["model_type"] = "qwen3"
    return config | {"aux_hidden_state_layer_ids": [2, 4]}, dflash_tensors()


def speculators_dflash_as_saved(target: LlamaForCausalLM) -> Folder:
    """With the target's embeddings and lm_head."""
    config, tensors = speculators_dflash(target)
    return config, tensors | _targets(target)


def speculators_dspark_of_8_tokens(target: LlamaForCausalLM) -> Folder:
    config, tensors = speculators_dspark(target)
    embeddings = {"embed_tokens.weight": target.get_input_embeddings().weight}
    return config | {"sliding_window_non_causal": True}, tensors | embeddings


def _targets(target: LlamaForCausalLM) -> Tensors:
    return {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}


def speculators_dflash_with_a_trained_mask(target: LlamaForCausalLM) -> Folder:
    config, tensors = speculators_dflash(target)
    embeddings = target.get_input_embeddings().weight.clone()
    embeddings[-1] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))
    return config | {"mask_token_id": VOCAB - 1}, tensors | {"embed_tokens.weight": embeddings}


def speculators_dspark(target: LlamaForCausalLM) -> Folder:
    config = speculators("dspark", block_size=4, mask_token_id=17, markov_rank=5, sample_from_anchor=True)
    config |= {"aux_hidden_state_layer_ids": [2, 4], "enable_confidence_head": True, "draft_vocab_size": len(KEPT)}
    config["transformer_layer_config"]["model_type"] = "qwen3"
    shapes = {"markov_head.markov_w1.weight": (VOCAB, 5), "markov_head.markov_w2.weight": (len(KEPT), 5)}
    shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 5), "confidence_head.proj.bias": (1,)}
    shapes |= {"lm_head.weight": (len(KEPT), HIDDEN)}
    return config, dflash_tensors() | random_tensors(shapes, 3) | vocabulary_maps(KEPT)


def speculators_mtp(target: LlamaForCausalLM) -> Folder:
    shapes = {f"mtp_layers.0.{name.removeprefix(LAYER)}": shape for name, shape in layer_shapes().items()}
    shapes |= {f"mtp_layers.0.{norm}_layernorm.weight": (HIDDEN,) for norm in ("final", "hidden", "token")}
    shapes |= {"mtp_layers.0.input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    config = speculators("mtp", num_nextn_predict_layers=1)
    config["transformer_layer_config"]["num_hidden_layers"] = 6  # the target's
    del config["draft_vocab_size"]
    return config, random_tensors(shapes)


def sglang_eagle3(target: LlamaForCausalLM) -> Folder:
    """SpecForge's files, SpecBundle's and AngelSlim's."""
    config = llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(KEPT))
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    return config, {name.replace(LAYER, "midlayer."): value for name, value in eagle3_tensors(KEPT).items()}


def sglang_eagle31(target: LlamaForCausalLM) -> Folder:
    config, tensors = sglang_eagle3(target)
    norms = random_tensors({f"fc_norm.{k}.weight": (HIDDEN,) for k in range(3)}, 1)
    return config | {"fc_norm": True, "norm_output": True}, tensors | norms


def eagle3_of_the_repository(target: LlamaForCausalLM) -> Folder:
    """Without layer ids, which are 2, L/2 and L - 3 in its code."""
    config, tensors = sglang_eagle3(target)
    del config["eagle_config"]
    return config, tensors


def angelslim_eagle3(target: LlamaForCausalLM) -> Folder:
    config, tensors = eagle3_of_the_repository(target)
    return config | {"architectures": ["Eagle3LlamaForCausalLM"]}, tensors


def automodel_eagle3(target: LlamaForCausalLM) -> Folder:
    """NeMo Automodel's files, with the target's number of layers, and the target's embeddings."""
    config, tensors = eagle3_of_the_repository(target)
    config |= {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 6, "parallel_drafting": False}
    inner = {name.replace("midlayer.", LAYER): value for name, value in tensors.items()}
    inner["embed_tokens.weight"] = target.get_input_embeddings().weight
    outer = ("lm_head.weight", "d2t", "t2d")
    return config, {name if name in outer else f"model.{name}": value for name, value in inner.items()}


def zlab_dflash(target: LlamaForCausalLM) -> Folder:
    """z-lab's files, SpecForge's, and what SGLang reads."""
    config = llama_config(model_type="qwen3", architectures=["DFlashDraftModel"], num_target_layers=6, block_size=4)
    config["dflash_config"] = {"target_layer_ids": [1, 3], "mask_token_id": 17}
    config["layer_types"] = ["full_attention"]
    return config, dflash_tensors()


def zlab_dflash_in_windows(target: LlamaForCausalLM) -> Folder:
    """As the drafters for Qwen3.5 and Gemma 4: most layers have a causal window."""
    config, _ = zlab_dflash(target)
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return config | {"sliding_window": 5, "use_sliding_window": True}, dflash_tensors(2)


def zlab_dflash_in_windows_not_causal(target: LlamaForCausalLM) -> Folder:
    config, tensors = zlab_dflash_in_windows(target)
    return config | {"is_causal": False}, tensors


def nvidia_dspark(target: LlamaForCausalLM) -> Folder:
    """Model-Optimizer's export: flat names, a window in all layers, causal, with sinks."""
    config, tensors = zlab_dflash_in_windows(target)
    config |= {"layer_types": ["full_attention"] * 2, "attention_sink_bias": True}
    config["dflash_config"] |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 5, "causal": True, "attention_sink_bias": True}
    config["dflash_config"] |= {"markov_rank": 5, "markov_head_type": "vanilla"}
    shapes: dict[str, tuple[int, ...]] = {f"markov_w{i}.weight": (VOCAB, 5) for i in (1, 2)}
    shapes |= {"confidence_proj.weight": (1, HIDDEN + 5), "confidence_proj.bias": (1,)}
    shapes |= {f"layers.{layer}.self_attn.attention_sink_bias": (HEADS,) for layer in range(2)}
    return config, tensors | random_tensors(shapes, 3)


def nemotron_dspark(target: LlamaForCausalLM) -> Folder:
    """NVIDIA's published file: nested names; the block predicts from its first mask."""
    config, tensors = nvidia_dspark(target)
    config |= {"architectures": ["Qwen3DSparkModel"], "layer_types": ["sliding_attention"] * 2, "markov_rank": 5}
    config |= {"dspark_bonus_anchor": True, "sample_from_anchor": False, "mask_token_id": 17}
    config |= {"target_layer_ids": [1, 3], "dflash_config": {"attention_sink_bias": True}}
    del config["attention_sink_bias"]
    return config, {
        name if "markov" not in name else f"markov_head.{name}": value
        for name, value in tensors.items()
        if "confidence" not in name
    }


def zlab_dflash2(target: LlamaForCausalLM) -> Folder:
    config, tensors = zlab_dflash(target)
    config |= {"architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] |= {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6}
    return config, tensors | dflash2_tensors()


def zlab_dflash2_in_a_window(target: LlamaForCausalLM) -> Folder:
    """As published: every position sees as far ahead as back."""
    config, tensors = zlab_dflash2(target)
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
    return config | {"is_causal": False}, tensors


def lilicorr(target: LlamaForCausalLM) -> Folder:
    config, tensors = zlab_dflash(target)
    config |= {"architectures": ["LiLiCorrDraftModel"]}
    config["dflash_config"] |= {f"lilicorr_{key}": value for key, value in LILICORR.items()}
    return config, tensors | lilicorr_tensors()


def lilicorr_with_convolutions(target: LlamaForCausalLM) -> Folder:
    config, tensors = lilicorr(target)
    config["dflash_config"] |= {"conv_kernel_size": 3, "conv_group_size": 8}
    convolutions = {name: value for name, value in dflash2_tensors().items() if "conv" in name}
    return config, tensors | convolutions


def speculators_dflash2(target: LlamaForCausalLM) -> Folder:
    config, tensors = speculators_dflash(target)
    config |= {"speculators_model_type": "dflash2", "sliding_window_non_causal": True}
    config["speculators_config"]["algorithm"] = "dflash2"
    keys = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6}
    return config | keys, tensors | dflash2_tensors()


def angelslim_dflash(target: LlamaForCausalLM) -> Folder:
    config, tensors = zlab_dflash(target)
    return config | {"architectures": ["QwenDFlashDraftModel"]}, tensors


def deepspec_dflash(target: LlamaForCausalLM) -> Folder:
    """A DSpark of rank 0, with the target's embeddings and lm_head."""
    config = llama_config(model_type="qwen3", architectures=["Qwen3DSparkModel"], num_target_layers=6, block_size=4)
    config |= {"target_layer_ids": [1, 3], "mask_token_id": 17, "layer_types": ["full_attention"], "markov_rank": 0}
    config |= {"enable_confidence_head": False, "num_anchors": 64}
    return config, dflash_tensors() | _targets(target)


def deepspec_dspark(target: LlamaForCausalLM, kind: str = "vanilla") -> Folder:
    config, tensors = deepspec_dflash(target)
    config |= {"markov_rank": 5, "markov_head_type": kind, "enable_confidence_head": True}
    shapes = {f"markov_head.markov_w{i}.weight": (VOCAB, 5) for i in (1, 2)}
    extra = {"gated": ("gate_proj", 5, HIDDEN + 5), "rnn": ("joint_proj", 15, HIDDEN + 10)}.get(kind)
    if extra is not None:
        name, rows, columns = extra
        shapes |= {f"markov_head.{name}.weight": (rows, columns), f"markov_head.{name}.bias": (rows,)}
    shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 5), "confidence_head.proj.bias": (1,)}
    return config | {"confidence_head_with_markov": True}, tensors | random_tensors(shapes, 3)


def deepspec_gated_dspark(target: LlamaForCausalLM) -> Folder:
    return deepspec_dspark(target, "gated")


def deepspec_recurrent_dspark(target: LlamaForCausalLM) -> Folder:
    return deepspec_dspark(target, "rnn")


def specforge_dspark(target: LlamaForCausalLM) -> Folder:
    """DeepSpec's keys in `dflash_config`, without embeddings and lm_head."""
    config, tensors = deepspec_dspark(target)
    inner = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    nested = {key: config.pop(key) for key in (*inner, "target_layer_ids", "mask_token_id")}
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": nested | {"projector_type": "dspark"}}
    return config, {name: value for name, value in tensors.items() if name.split(".")[0] not in SHARED}


def deepspec_eagle3(target: LlamaForCausalLM) -> Folder:
    norms = {f"{LAYER}self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}
    config = llama_config(model_type="qwen3", architectures=["Qwen3Eagle3Model"], target_layer_ids=[0, 1, 2, 3, 4])
    config |= {"num_target_layers": 6, "layer_types": ["full_attention"], "draft_num_hidden_layers": 1}
    stored = {"embed_tokens.weight": target.get_input_embeddings().weight}
    return config, eagle3_tensors(features=5) | random_tensors(norms, 7) | stored


def eagle1(target: LlamaForCausalLM) -> Folder:
    shapes = {name: shape for name, shape in layer_shapes().items() if "input_layernorm" not in name}
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    embeddings = {"embed_tokens.weight": target.get_input_embeddings().weight}
    return llama_config(bias=True), random_tensors(shapes) | embeddings


def medusa_of_vllm(target: LlamaForCausalLM) -> Folder:
    shapes = {
        f"blocks.{k}.layers.0.{part}": (HIDDEN,) * n for k in range(2) for part, n in (("weight", 2), ("bias", 1))
    }
    shapes |= {f"lm_heads.{k}.weight": (len(KEPT), HIDDEN) for k in range(2)}
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "medusa_fc_bias": True}
    config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "truncated_vocab_size": len(KEPT)}
    return config, random_tensors(shapes) | {"token_map": torch.tensor(KEPT)}


def medusa_of_the_original(target: LlamaForCausalLM) -> Folder:
    shapes = {f"{k}.0.linear.{part}": (HIDDEN,) * n for k in range(2) for part, n in (("weight", 2), ("bias", 1))}
    shapes |= {f"{k}.1.weight": (VOCAB, HIDDEN) for k in range(2)}
    return {"medusa_num_heads": 2, "medusa_num_layers": 1}, random_tensors(shapes)


def plain_llama(target: LlamaForCausalLM) -> Folder:
    outer, inner = KV_HEADS * HEAD, HEADS * HEAD
    shapes = {f"model.{name}": shape for name, shape in layer_shapes().items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), f"model.{LAYER}self_attn.o_proj.weight": (HIDDEN, inner)}
    assert shapes[f"model.{LAYER}self_attn.k_proj.weight"] == (outer, HIDDEN)
    return llama_config(architectures=["LlamaForCausalLM"]), random_tensors(shapes)


LAYOUTS: list[tuple[Callable[[LlamaForCausalLM], Folder], str]] = [
    (speculators_eagle3, "vllm"),
    (speculators_eagle3_of_8_tokens_in_a_window, "vllm"),
    (speculators_eagle3_as_saved, "vllm"),
    (speculators_peagle, "vllm"),
    (speculators_dflash, "vllm"),
    (speculators_dflash_as_saved, "vllm"),
    (speculators_dspark_of_8_tokens, "vllm"),
    (speculators_dflash_with_a_trained_mask, "vllm"),
    (speculators_dspark, "vllm"),
    (sglang_eagle3, "sglang"),
    (sglang_eagle31, "sglang"),
    (zlab_dflash, "sglang"),
    (zlab_dflash_in_windows, "sglang"),
    (zlab_dflash_in_windows, "vllm"),
    (zlab_dflash_in_windows_not_causal, "vllm"),
    (zlab_dflash_in_windows_not_causal, "sglang"),
    (nemotron_dspark, "vllm"),
    (zlab_dflash2, "sglang"),
    (speculators_dflash2, "vllm"),
    (zlab_dflash2_in_a_window, "vllm"),
    (zlab_dflash2_in_a_window, "sglang"),
    (lilicorr, "vllm"),
    (lilicorr_with_convolutions, "sglang"),
    (deepspec_dflash, "sglang"),
    (deepspec_dspark, "sglang"),
    (deepspec_gated_dspark, "sglang"),
    (deepspec_recurrent_dspark, "sglang"),
    (medusa_of_vllm, "vllm"),
    (plain_llama, "transformers"),
    (plain_llama, "vllm"),
]
SHARED = ("embed_tokens", "lm_head")


def ours(folder: Folder, target: LlamaForCausalLM, tmp_path: Path) -> TrainableDrafter:
    """Their folder, read, saved as a checkpoint and loaded again."""
    config, tensors = folder
    drafter = load_drafter(written(tmp_path / "theirs", config, tensors), target)
    assert drafter.unread_keys == (), "every key of the layout is known"
    assert isinstance(drafter, TrainableDrafter)
    made_for = describe_target(target, None, "tiny")
    save_drafter(drafter, tmp_path / "ours", target=made_for, recipe=None, draft_length=3)
    again = load_drafter(tmp_path / "ours", target)
    assert isinstance(again, TrainableDrafter)
    return again


@pytest.mark.parametrize(("layout", "format"), LAYOUTS, ids=[f"{make.__name__}-{name}" for make, name in LAYOUTS])
def test_files_come_back(
    layout: Callable[[LlamaForCausalLM], Folder], format: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    """Every tensor bit for bit, and every key of the config that describes the drafter."""
    config, tensors = layout(target)
    drafter = ours((config, tensors), target, tmp_path)
    out = export_drafter(drafter, target, format, tmp_path / "again", target_name="org/target").folder
    (file,) = out.glob("*.safetensors")
    again = load_file(file)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    stored = json.loads((out / "config.json").read_text())
    bookkeeping = {"speculators_version", "speculators_config", "rope_theta"}
    changed = {key for key in config.keys() - bookkeeping if not _within(config[key], stored.get(key))}
    assert not changed


def _within(wanted: Any, found: Any) -> bool:
    """Return whether a mapping has all keys and values of another one, in nested mappings too."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_within(value, found.get(key)) for key, value in wanted.items())
    return wanted == found


CONVERSIONS: list[tuple[Callable[[LlamaForCausalLM], Folder], str]] = [
    (zlab_dflash2, "vllm"),
    (speculators_dflash2, "sglang"),
    (zlab_dflash, "vllm"),  # ids count from 1, the convention of the anchor is written
    (sglang_eagle3, "vllm"),  # ids count from 1, norm_before_residual is written
    (angelslim_eagle3, "sglang"),  # another class
    (automodel_eagle3, "sglang"),
    (angelslim_dflash, "sglang"),
    (eagle3_of_the_repository, "sglang"),  # the ids that are missing there are written
    (speculators_peagle, "transformers"),
    (speculators_mtp, "transformers"),  # the halves of input_proj change places
    (speculators_eagle3, "sglang"),
    (speculators_eagle3, "transformers"),
    (deepspec_dspark, "vllm"),
    (speculators_dspark, "transformers"),
    (nvidia_dspark, "vllm"),  # nested names
    (nvidia_dspark, "transformers"),
    (specforge_dspark, "vllm"),
    (specforge_dspark, "sglang"),
    (deepspec_recurrent_dspark, "transformers"),
    (deepspec_eagle3, "transformers"),
    (eagle1, "sglang"),  # without embeddings
    (medusa_of_the_original, "vllm"),
]


@pytest.mark.parametrize(("layout", "format"), CONVERSIONS, ids=[f"{m.__name__}-{name}" for m, name in CONVERSIONS])
def test_conversions_keep_the_logits(
    layout: Callable[[LlamaForCausalLM], Folder], format: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    drafter = ours(layout(target), target, tmp_path)
    out = export_drafter(drafter, target, format, tmp_path / "again", target_name="org/target").folder
    (file,) = out.glob("*.safetensors")
    with_embeddings = (layout, format) == (specforge_dspark, "sglang")  # all others take them from the target
    assert ("embed_tokens.weight" in load_file(file)) == with_embeddings
    again = load_drafter(out, target)
    wide, logits = six_layers().double(), []
    for each in (drafter, again):
        assert isinstance(each, TrainableDrafter)
        each.attach(wide)
        logits.append(decoded_logits(each.double(), wide, PROMPT, DRAFTED))
    assert torch.equal(logits[0].isinf(), logits[1].isinf())
    assert (logits[0] - logits[1]).nan_to_num(0.0).abs().max() < 1e-12


def test_sglangs_commands_name_the_size_of_a_block(tmp_path: Path, target: LlamaForCausalLM) -> None:
    for layout, words in ((zlab_dflash, "DFLASH num-draft-tokens"), (deepspec_dspark, "DSPARK dspark-block-size")):
        drafter, (algorithm, size) = ours(layout(target), target, tmp_path / words), words.split()
        usage = export_drafter(drafter, target, "sglang", tmp_path / algorithm, target_name="org/target").usage
        assert f"--speculative-algorithm {algorithm}" in usage
        assert f"--speculative-{size} 4" in usage
