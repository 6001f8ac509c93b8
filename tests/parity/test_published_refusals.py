"""Published drafters that do not fit, or that nothing here can express: refused by tensor or key."""

from collections.abc import Callable
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


@pytest.fixture
def target() -> LlamaForCausalLM:
    return six_layers()


# Refused folders.

EAGLE3_MISFITS: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "missing": (
        lambda _, w: w.pop("layers.0.hidden_norm.weight"),
        r"no tensor layers\.0\.hidden_norm\.weight; expected float \[32\]",
    ),
    "unknown": (
        lambda _, w: w.update({"layers.0.self_attn.sink": torch.zeros(3)}),
        r"unexpected tensor layers\.0\.self_attn\.sink \[3\]",
    ),
    "norms of heads": (
        lambda c, w: (
            c["transformer_layer_config"].update(model_type="qwen3"),
            w.update({"layers.0.self_attn.q_norm.weight": torch.ones(HEAD)}),
        ),
        r"unexpected tensor layers\.0\.self_attn\.q_norm\.weight \[8\]",
    ),
    "a norm that config.json denies": (
        lambda _, w: w.update({"input_norm.weight": torch.ones(96)}),
        r"unexpected tensor input_norm\.weight \[96\]",
    ),
    "a norm that is not there": (
        lambda c, _: c.update(fc_norm=True),
        r"no tensor fc_norm\.0\.weight; expected float \[32\]",
    ),
    "shape": (
        lambda _, w: w.update({"fc.weight": torch.zeros(32, 32)}),
        r"tensor fc\.weight is float \[32, 32\]; expected float \[32, 96\]",
    ),
    "draft vocabulary": (
        lambda c, _: c.update(draft_vocab_size=9),
        r"is (float|int) \[8(, 32)?\]; expected (float|int) \[9(, 32)?\]",
    ),
    "draft vocabulary larger than the target's": (
        lambda c, _: c.update(draft_vocab_size=65),
        "draft_vocab_size=65 in config.json; expected an integer, 1 to 64",
    ),
    "embeddings": (
        lambda _, w: w.update({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}),
        r"tensor embed_tokens\.weight \[64, 32\] is not the target's .* embeddings of their own are not supported",
    ),
    "maps": (lambda _, w: w.update(t2d=w["t2d"].roll(1)), "d2t and t2d name different tokens"),
    "offsets": (lambda _, w: w["d2t"].add_(30), "d2t leads outside the vocabulary of 64"),
    "indices": (lambda _, w: w.update(d2t=torch.tensor(KEPT)), "d2t holds the tokens themselves; expected offsets"),
    "a token twice": (lambda _, w: w.update(d2t=torch.zeros(8).long()), "d2t and t2d name different tokens"),
    "no mask": (lambda _, w: w.pop("t2d"), r"no tensor t2d; expected bool \[64\]"),
    "an index as mask": (lambda _, w: w.update(t2d=w["t2d"].long()), r"t2d is int \[64\]; expected bool \[64\]"),
    "ids": (
        lambda c, _: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 7]),
        r"layer_ids=\[2, 3, 7\]; expected a list of the target's layers, 1 to 6",
    ),
    "kind": (
        lambda c, _: c.update(speculators_model_type="eagle4"),
        "speculators_model_type='eagle4' in config.json; expected one of dflash, dspark, eagle3, mtp, peagle",
    ),
    "DFlash 2": (
        lambda c, _: c.update(speculators_model_type="dflash2", architectures=["DFlash2DraftModel"]),
        r"speculators_model_type='dflash2' in config\.json \(its layers have convolutions, and a selector chooses "
        r"among candidates\); expected one of dflash, dspark, eagle3, mtp, peagle$",
    ),
    "XPress": (
        lambda c, _: c.update(speculators_model_type="xpress", architectures=["XPressSpeculator"]),
        r"speculators_model_type='xpress' in config\.json \(a network refines the logits of a block in several "
        r"passes\); expected one of dflash, dspark, eagle3, mtp, peagle$",
    ),
    "layers": (lambda c, _: c.pop("transformer_layer_config"), "hidden_size=4096 in config.json; expected 32"),
    "layers that are none": (
        lambda c, _: c.update(transformer_layer_config=3),
        "transformer_layer_config=3 in config.json; expected a mapping",
    ),
    "broken sizes": (
        lambda c, _: c["transformer_layer_config"].update(num_attention_heads="four"),
        "the layers in config.json .*num_attention_heads",
    ),
    "heads": (
        lambda c, _: c["transformer_layer_config"].update(num_key_value_heads=3),
        "num_key_value_heads=3 in config.json; expected one of 1, 2, 4",
    ),
    "layers of another kind": (
        lambda c, _: c["transformer_layer_config"].update(model_type="gemma2"),
        "model_type='gemma2' in config.json; expected one of llama, qwen2, qwen3",
    ),
    "positions": (
        lambda c, _: c["transformer_layer_config"].update(partial_rotary_factor=0.5),
        r"partial_rotary_factor=0\.5 in config.json; expected 1\.0",
    ),
    "windows": (
        lambda c, _: c["transformer_layer_config"].update(
            model_type="qwen3", layer_types=["sliding_attention"], use_sliding_window=True, sliding_window=0
        ),
        r"the layers in config.json \(sliding_window=0; expected a number of tokens\)",
    ),
    "vocabulary": (
        lambda c, _: c["transformer_layer_config"].update(vocab_size=60),
        "vocab_size=60 in config.json; expected 64",
    ),
    "the target's width": (lambda c, _: c.update(target_hidden_size=48), "target_hidden_size=48 in config.json"),
    "proposals": (
        lambda c, _: c["speculators_config"].update(proposal_methods=[{"speculative_tokens": 0}]),
        "speculative_tokens=0 in config.json; expected an integer, 1 or more",
    ),
    "proposals that are none": (
        lambda c, _: c["speculators_config"].update(proposal_methods="greedy"),
        "proposal_methods='greedy' in config.json; expected a list of mappings",
    ),
    "scaled logits": (lambda c, _: c.update(logit_scale=0.5), r"logit_scale=0\.5 in config.json; expected 1\.0"),
}


@pytest.mark.parametrize("how", list(EAGLE3_MISFITS))
def test_what_does_not_fit_is_refused_by_name(how: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    change, message = EAGLE3_MISFITS[how]
    config, tensors = speculators("eagle3", **VLLM, draft_vocab_size=len(KEPT)), eagle3_tensors(KEPT)
    change(config, tensors)
    folder = written(tmp_path / "d", config, tensors)
    with pytest.raises(ConfigError, match=message) as refused:
        load_drafter(folder, target)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


FLAT = {"architectures": ["LlamaForCausalLMEagle3"]}
MEDUSA = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1}
BLOCK = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN), "lm_heads.0.weight": torch.zeros(2, HIDDEN)}
ZLAB = llama_config(architectures=["DFlashDraftModel"], block_size=4, target_layer_ids=[1, 3])
DEEPSPEC = ZLAB | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 17}
DRAFT_BLOCK = {"block_size": 4, "mask_token_id": 17, "aux_hidden_state_layer_ids": [2, 4]}
EAGLE1 = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), "layers.0.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            llama_config(**FLAT, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}),
            {},
            r"\[1, 2, 6\]; expected a list of the target's layers, 0 to 5",
        ),
        (
            llama_config(**FLAT, eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
            {},
            r"=\[2, 3, 5\] in config.json; expected No",
        ),
        (llama_config(**FLAT), {"layers.0.x": torch.zeros(1)}, "no tensor "),
        (llama_config(), {"midlayer.x": torch.zeros(1)}, "no tensor "),
        (speculators("peagle", mask_token_id=64), {}, "mask_token_id=64 in config.json; expected an integer, 0 to 63"),
        (speculators("peagle", mask_token_id=1), {}, r"no tensor mask_hidden; expected float \[1, 1, 96\]"),
        (
            speculators("peagle", mask_token_id=1, speculators_config={}),
            {},
            "speculative_tokens=None in config.json; expected an integer, 1 or more",
        ),
        (
            speculators("peagle", mask_token_id=1),
            {"mask_hidden": torch.zeros(HIDDEN)},
            r"tensor mask_hidden is float \[32\]; expected float \[1, 1, 96\]",
        ),
        (speculators("dflash", **DRAFT_BLOCK, sample_from_anchor=1.5), {}, "sample_from_anchor=1.5 in config.json"),
        (speculators("dspark", **DRAFT_BLOCK) | {"draft_vocab_size": 65}, {}, "draft_vocab_size=65 in config.json"),
        (
            speculators("dflash", **DRAFT_BLOCK) | {"draft_vocab_size": 8},
            dflash_tensors(),
            r"no tensor lm_head\.weight; expected float \[8, 32\]",
        ),
        (
            speculators("dflash", **DRAFT_BLOCK) | {"block_size": 1},
            {},
            "block_size=1 in config.json; expected an integer",
        ),
        (speculators("dflash", **DRAFT_BLOCK) | {"mask_token_id": None}, {}, "mask_token_id=None in config.json"),
        (
            speculators("dflash", **DRAFT_BLOCK, markov_head_type="x"),
            {},
            "markov_head_type='x' in config.json; expected",
        ),
        (
            speculators("dflash", **DRAFT_BLOCK) | {"aux_hidden_state_layer_ids": None},
            {},
            "aux_hidden_state_layer_ids=None; expected a list of the target's layers",
        ),
        (
            speculators("dflash", **DRAFT_BLOCK),
            dflash_tensors() | {"lm_head.weight": torch.zeros(VOCAB - 1, HIDDEN)},
            r"tensor lm_head\.weight is float \[63, 32\]; expected float \[64, 32\]",
        ),
        (ZLAB | {"dflash_config": {"causal": True}}, {}, "causal=True in config.json; expected False"),
        (ZLAB | {"dflash_config": [1]}, {}, r"dflash_config=\[1\] in config.json; expected a mapping"),
        (ZLAB | {"num_target_layers": 7}, {}, "num_target_layers=7 in config.json; expected 6"),
        (ZLAB | {"sliding_window": 5, "layer_types": ["sliding_attention"]}, {}, "layers with a window of 5 tokens"),
        (
            ZLAB | {"target_layer_ids": [6]},
            {},
            r"target_layer_ids=\[6\]; expected a list of the target's layers, 0 to 5",
        ),
        (ZLAB, {}, "mask_token_id=None in config.json"),
        (
            ZLAB | {"mask_token_id": 1},
            dflash_tensors() | {"prefix_gru.x": torch.ones(1)},
            "unexpected tensor prefix_gru.x",
        ),
        (
            ZLAB | {"dflash_config": {"projector_type": "domino"}},
            {},
            "projector_type='domino' in config.json; expected one of None, dflash",
        ),
        (ZLAB | {"output_multiplier": 0.5}, {}, "output_multiplier=0.5 in config.json; expected one of None, 1.0"),
        (ZLAB | {"dflash_config": {"input_embedding_scale": 8.0}}, {}, "input_embedding_scale=8.0 in config.json"),
        (ZLAB | {"dflash_config": {"attention_value_scale": 0.7}}, {}, "attention_value_scale=0.7 in config.json"),
        (ZLAB | {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping=30.0 in config.json"),
        (
            ZLAB | {"rope_is_neox_style": False},
            {},
            "rope_is_neox_style=False in config.json; expected",
        ),
        (ZLAB | {"dflash_config": {"use_swa": True}}, {}, "use_swa=True in config.json; expected one of None, False"),
        (ZLAB | {"dflash_config": {"conv_kernel_size": 3}}, {}, "conv_kernel_size=3 in config.json; expected"),
        (ZLAB | {"dflash_config": {"selector_rank": 256}}, {}, "selector_rank=256 in config.json; expected"),
        (ZLAB | {"is_causal": True}, {}, "is_causal=True in config.json; expected False"),
        (
            ZLAB | {"dflash_config": {"training_mode": "vp_drafter"}},
            {},
            "training_mode='vp_drafter' in config.json .it continues the drafts of another drafter",
        ),
        (ZLAB | {"dflash_config": {"loss_type": "vp_drafter"}}, {}, "loss_type='vp_drafter' in config.json .it cont"),
        (ZLAB | {"architectures": ["DominoDraftModel"]}, {}, "a DominoDraftModel .a recurrent network corrects"),
        (ZLAB | {"architectures": ["DFlash2DraftModel"]}, {}, "a DFlash2DraftModel .its layers have convolutions"),
        (
            llama_config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
            {},
            "a Eagle3DeepseekV2ForCausalLM .its layer has latent attention",
        ),
        (
            DEEPSPEC | {"markov_head_type": "lstm"},
            {},
            "markov_head_type='lstm' in config.json; expected one of vanilla",
        ),
        (DEEPSPEC | {"dflash_config": {"projector_type": "domino"}}, {}, "projector_type='domino' in config.json; exp"),
        (llama_config(architectures=["PEagleDraftModel"]), {}, "a PEagleDraftModel .SpecForge's config.json does not"),
        (ZLAB | {"architectures": ["QwenDFlareDraftModel"]}, {}, "a QwenDFlareDraftModel .its layers mix the target's"),
        (DEEPSPEC | {"target_layer_ids": [-1]}, {}, r"target_layer_ids=\[-1\]; expected a list of the target's layers"),
        (
            DEEPSPEC | {"target_layer_ids": [1, 3], "markov_head_type": "gated"},
            dflash_tensors() | {"markov_head.markov_w1.weight": torch.ones(VOCAB, 5)},
            r"no tensor markov_w2.weight; expected float \[64, 5\]",
        ),
        (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, {}, "a Gemma4DSparkModel .its layers scale embeddings"),
        (DEEPSPEC | {"architectures": ["Gemma4Eagle3Model"]}, {}, "a Gemma4Eagle3Model .its layers scale embeddings"),
        (
            DEEPSPEC | {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 2},
            {},
            "num_hidden_layers=2 in config.json; expected 1",
        ),
        (speculators("mtp", num_nextn_predict_layers=2), {}, "num_nextn_predict_layers=2 in config.json; expected 1"),
        (speculators("mtp"), {}, r"no tensor mtp_layers\.0\.token_layernorm\.weight; expected float \[32\]"),
        (llama_config(), EAGLE1, r"no tensor layers\.0\.self_attn\.q_proj\.weight; expected float \[32, 32\]"),
        (llama_config(bias=True), EAGLE1, r"no tensor fc\.bias; expected float \[32\]"),
        (
            llama_config(),
            {**EAGLE1, "fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            r"tensor fc\.weight is float \[32, 32\]; expected float \[32, 64\]",
        ),
        (MEDUSA | {"hidden_size": 16}, BLOCK, "hidden_size=16 in config.json; expected 32"),
        (MEDUSA | {"vocab_size": 65}, BLOCK, "vocab_size=65 in config.json; expected 64"),
        (MEDUSA | {"num_heads": 0}, BLOCK, "num_heads=0 in config.json; expected an integer, 1 or more"),
        (MEDUSA, BLOCK, r"tensor lm_heads\.0\.weight is float \[2, 32\]; expected float \[64, 32\]"),
        (MEDUSA | {"truncated_vocab_size": 2}, BLOCK, r"no tensor token_map; expected int \[2\]"),
        (
            MEDUSA | {"truncated_vocab_size": 2},
            {**BLOCK, "token_map": torch.tensor([3])},
            r"tensor token_map is int \[1\]; expected int \[2\]",
        ),
        (
            MEDUSA | {"truncated_vocab_size": 2},
            {**BLOCK, "token_map": torch.tensor([3, 64])},
            "token_map has repeated or unknown tokens; expected distinct ids below 64",
        ),
        (
            MEDUSA | {"truncated_vocab_size": 2},
            {**BLOCK, "token_map": torch.tensor([3, 3])},
            "token_map has repeated or unknown tokens; expected distinct ids below 64",
        ),
        (MEDUSA | {"medusa_fc_bias": True}, BLOCK, r"no tensor blocks\.0\.layers\.0\.bias; expected float \[32\]"),
        (
            MEDUSA | {"medusa_fc_bias": False},
            {**BLOCK, "blocks.0.layers.0.bias": torch.zeros(HIDDEN)},
            "medusa_fc_bias=False in config.json; expected True",
        ),
        ({"medusa_num_heads": 1}, {"0.0.linear.weight": torch.zeros(32, 32)}, r"no tensor 0\.0\.linear\.bias"),
    ],
)
def test_what_does_not_fit_in_the_other_layouts(
    config: dict[str, Any], tensors: Tensors, message: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    folder = written(tmp_path / "d", config, tensors or {"x": torch.zeros(1)})
    with pytest.raises(ConfigError, match=message) as refused:
        load_drafter(folder, target)
    assert str(folder) in str(refused.value)


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
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_drafter(folder, target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in the folder"):
        load_drafter(folder, target)
