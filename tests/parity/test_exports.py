"""Exports have the names, shapes, dtypes and keys of their format; read again they are the same drafter, bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from parity.published_files import DRAFTED, HEAD, HEADS, HIDDEN, INNER, KEPT, KV_HEADS, PROMPT, VOCAB
from recording import decoded_logits
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from draftsmith import load_drafter
from draftsmith.heads import HEADS as TYPES
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.formats.registry import LAYOUTS
from draftsmith.hub.export import Exported, export_drafter

A, K, H, V, M, D = HEADS * HEAD, KV_HEADS * HEAD, HIDDEN, VOCAB, INNER, len(KEPT)
Shapes = dict[str, tuple[int, ...]]


def eight_layers() -> LlamaForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER}
    return make_llama(num_hidden_layers=8, **sizes).requires_grad_(False)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return eight_layers()


@torch.no_grad()
def made(kind: str, target: LlamaForCausalLM, **options: Any) -> TrainableDrafter:
    torch.manual_seed(3)
    drafter = TYPES[kind].from_target(target, **options).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    drafter.draft_length_hint = min(4, drafter.max_draft_length or 4)
    return drafter


def exported(
    drafter: TrainableDrafter, target: LlamaForCausalLM, format: str, out: Path, dtype: str | None = None
) -> Exported:
    return export_drafter(drafter, target, format, out, target_name="org/target", dtype=dtype)


# The table, from the layouts' descriptions.


def layer(name: str, width: int, input_norm: bool = True) -> Shapes:
    shapes: Shapes = {"self_attn.q_proj": (A, width), "self_attn.k_proj": (K, width), "self_attn.v_proj": (K, width)}
    shapes |= {"self_attn.o_proj": (H, A), "mlp.gate_proj": (M, H), "mlp.up_proj": (M, H), "mlp.down_proj": (H, M)}
    shapes |= {"post_attention_layernorm": (H,)} | ({"input_layernorm": (H,)} if input_norm else {})
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def eagle3(name: str, rows: int, features: int = 3) -> Shapes:
    shapes = layer(name, 2 * H) | {f"{name}.hidden_norm.weight": (H,), "norm.weight": (H,), "lm_head.weight": (rows, H)}
    shapes |= {"fc.weight": (H, features * H)}
    return shapes if rows == V else shapes | {"d2t": (rows,), "t2d": (V,)}


def block(name: str) -> Shapes:
    return layer(name, H) | {f"{name}.self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}


DFLASH = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)} | block("layers.0")
EMBEDDINGS = {"embed_tokens.weight": (V, H)}
EAGLE1 = layer("layers.0", H, input_norm=False) | {"fc.weight": (H, 2 * H), "fc.bias": (H,)}
BLOCKS = {f"blocks.{k}.layers.{j}.{part}": (H, H)[: 2 if part == "weight" else 1] for k in range(3) for j in range(2)
          for part in ("weight", "bias")}  # fmt: skip
ORIGINAL = {f"{k}.0.linear.{part}": (H, H)[: 2 if part == "weight" else 1] for k in range(3)
            for part in ("weight", "bias")} | {f"{k}.1.weight": (V, H) for k in range(3)}  # fmt: skip
NORMS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
VERIFIER = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
FLAT = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": V}
FLAT |= {"tie_word_embeddings": False, "hidden_size": H, "head_dim": HEAD, "num_key_value_heads": KV_HEADS}
LAYER = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": V, "hidden_size": H, "intermediate_size": M}
LAYER |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "rms_norm_eps": 1e-6}
LAYER |= {"rope_theta": 10_000.0, "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 128}


def speculators(kind: str, architecture: str, tokens: int = 4, **changes: Any) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    own = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal], "verifier": VERIFIER}
    config = {"speculators_model_type": kind, "architectures": [architecture], "speculators_config": own}
    config |= {"tie_word_embeddings": False, "target_hidden_size": H, "dtype": "float32"}
    return config | {"transformer_layer_config": LAYER} | changes


IDS = "eagle_aux_hidden_state_layer_ids"
WRITTEN: dict[str, tuple[str, dict[str, Any], str, Shapes, dict[str, Any]]] = {
    "eagle3, vllm": (
        "eagle3",
        {},
        "vllm",
        eagle3("layers.0", V),
        speculators("eagle3", "Eagle3DraftModel", draft_vocab_size=V, **{IDS: [2, 4, 5]}, **NORMS),
    ),
    "eagle3 of 8 tokens, vllm": (
        "eagle3",
        {"draft_vocabulary": KEPT, "norm_before_residual": True},
        "vllm",
        eagle3("layers.0", D),
        speculators("eagle3", "Eagle3DraftModel", draft_vocab_size=D, **NORMS | {"norm_before_residual": True}),
    ),
    "eagle3.1, vllm": (
        "eagle3",
        {"fc_norm": True, "norm_output": True, "layers": [1, 8]},
        "vllm",
        eagle3("layers.0", V, 2) | {f"fc_norm.{k}.weight": (H,) for k in range(2)},
        speculators("eagle3", "Eagle3DraftModel", **{IDS: [1, 8]}, **NORMS | {"fc_norm": True, "norm_output": True}),
    ),
    "eagle3, norm before fc, two layers, vllm": (
        "eagle3",
        {"norm_before_fc": True, "num_hidden_layers": 2},
        "vllm",
        eagle3("layers.0", V) | layer("layers.1", H) | {"input_norm.weight": (3 * H,)},
        speculators(
            "eagle3",
            "Eagle3DraftModel",
            **NORMS | {"norm_before_fc": True},
            transformer_layer_config={"num_hidden_layers": 2},
        ),
    ),
    "eagle3, sglang": (
        "eagle3",
        {"layers": [1, 4, 7]},
        "sglang",
        eagle3("midlayer", V),
        FLAT | {"draft_vocab_size": V, "eagle_config": {IDS: [0, 3, 6], "use_aux_hidden_state": True}},
    ),
    "eagle3 of 8 tokens, sglang": (
        "eagle3",
        {"draft_vocabulary": KEPT, "fc_norm": True},
        "sglang",
        eagle3("midlayer", D) | {f"fc_norm.{k}.weight": (H,) for k in range(3)},
        FLAT | {"draft_vocab_size": D, "fc_norm": True, "norm_output": False, "target_hidden_size": H},
    ),
    "eagle3, eagle": (
        "eagle3",
        {"draft_vocabulary": KEPT},
        "eagle",
        eagle3("midlayer", D),
        FLAT | {"draft_vocab_size": D, "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}},
    ),
    "eagle, eagle": (
        "eagle",
        {},
        "eagle",
        EAGLE1 | EMBEDDINGS,
        FLAT | {"architectures": ["LlamaForCausalLM"], "bias": True},
    ),
    "hass, sglang": (
        "hass",
        {},
        "sglang",
        EAGLE1,
        FLAT | {"architectures": ["LlamaForCausalLMEagle"], "bias": True},
    ),
    "peagle, vllm": (
        "peagle",
        {"num_tokens": 3, "mask_token": 17, "draft_vocabulary": KEPT},
        "vllm",
        eagle3("layers.0", D) | {"mask_hidden": (1, 1, 3 * H)},
        speculators("peagle", "PEagleDraftModel", 3, mask_token_id=17, draft_vocab_size=D, **{IDS: [2, 4, 5]}),
    ),
    "dflash, vllm": (
        "dflash",
        {"block_size": 4, "layers": [2, 8], "num_hidden_layers": 1},
        "vllm",
        DFLASH | EMBEDDINGS,
        speculators(
            "dflash",
            "DFlashDraftModel",
            3,
            block_size=4,
            mask_token_id=V - 1,
            aux_hidden_state_layer_ids=[2, 8],
            sample_from_anchor=False,
            transformer_layer_config=LAYER | {"model_type": "qwen3"},
        ),
    ),
    "dspark, vllm": (
        "dflash",
        {"block_size": 4, "layers": [2, 8], "num_hidden_layers": 1, "markov_rank": 5, "confidence_head": True},
        "vllm",
        DFLASH
        | EMBEDDINGS
        | {"markov_head.markov_w1.weight": (V, 5), "markov_head.markov_w2.weight": (V, 5)}
        | {"confidence_head.proj.weight": (1, H + 5), "confidence_head.proj.bias": (1,)},
        speculators(
            "dspark",
            "DSparkDraftModel",
            3,
            markov_rank=5,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            sample_from_anchor=False,
            transformer_layer_config=LAYER | {"model_type": "qwen3"},
        ),
    ),
    "dspark of 8 tokens from the anchor, vllm": (
        "dflash",
        {
            "block_size": 3,
            "sample_from_anchor": True,
            "draft_vocabulary": KEPT,
            "layers": [2, 8],
            "num_hidden_layers": 1,
            "markov_rank": 5,
        },
        "vllm",
        DFLASH
        | EMBEDDINGS
        | {"lm_head.weight": (D, H), "d2t": (D,), "t2d": (V,)}
        | {"markov_head.markov_w1.weight": (V, 5), "markov_head.markov_w2.weight": (D, 5)},
        speculators(
            "dspark",
            "DSparkDraftModel",
            3,
            block_size=3,
            draft_vocab_size=D,
            enable_confidence_head=False,
            sample_from_anchor=True,
            transformer_layer_config=LAYER | {"model_type": "qwen3"},
        ),
    ),
    "medusa, vllm": (
        "medusa",
        {"num_layers": 2},
        "vllm",
        BLOCKS | {f"lm_heads.{k}.weight": (V, H) for k in range(3)},
        {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V, "num_heads": 3}
        | {"num_hidden_layers": 2, "truncated_vocab_size": V, "medusa_fc_bias": True, "original_lm_head": False},
    ),
    "medusa of 8 tokens and one lm_head, vllm": (
        "medusa",
        {"num_layers": 2, "draft_vocabulary": KEPT, "shared_lm_head": True},
        "vllm",
        BLOCKS | {"lm_heads.0.weight": (D, H), "token_map": (D,)},
        {"truncated_vocab_size": D, "vocab_size": V, "original_lm_head": True},
    ),
    "medusa, medusa": (
        "medusa",
        {},
        "medusa",
        ORIGINAL,
        {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"},
    ),
}


def within(wanted: Any, found: Any) -> bool:
    """Return whether all expected keys and values are present, in nested mappings too."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and within(wanted[key], found[key]) for key in wanted)
    return wanted == found and isinstance(wanted, bool) == isinstance(found, bool)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Names, shapes, dtypes and keys; then, read again, the same weights and logits."""
    kind, options, format, shapes, keys = WRITTEN[name]
    drafter = made(kind, target, **options)
    out = exported(drafter, target, format, tmp_path / "out").folder
    (file,) = out.glob("*.safetensors")
    assert file.name == ("medusa_lm_head.safetensors" if format == "medusa" else "model.safetensors")
    tensors = load_file(file)
    assert {part: tuple(value.shape) for part, value in tensors.items()} == shapes
    kinds = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}
    assert all(value.dtype == kinds.get(part, torch.float32) for part, value in tensors.items())
    config = json.loads((out / "config.json").read_text())
    wrong = {key: config.get(key) for key in keys if not within(keys[key], config.get(key))}
    assert not wrong, wrong
    assert "draftsmith" not in config
    again = load_drafter(out, target)
    assert type(again) is (TYPES["eagle"] if kind == "hass" else type(drafter))
    assert again.draft_length_hint in (None, drafter.draft_length_hint)
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert set(ours) == set(theirs)
    solved = {"mask_hidden"} if kind == "peagle" else set()
    for part in set(ours) - solved:
        assert torch.equal(ours[part], theirs[part]), part
    with torch.no_grad():
        one, other = (decoded_logits(each, target, PROMPT, DRAFTED) for each in (drafter, again))
    # The mask state is solved for, so it is equal to fp32 precision; everything else is the same computation.
    assert torch.equal(one, other) if not solved else torch.allclose(one, other, atol=1e-5)


def test_offsets_masks_and_maps(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = load_file(
        exported(made("eagle3", target, draft_vocabulary=KEPT), target, "vllm", tmp_path / "a").folder
        / "model.safetensors"
    )
    assert [row + int(tensors["d2t"][row]) for row in range(D)] == KEPT
    assert tensors["t2d"].nonzero()[:, 0].tolist() == KEPT
    medusa = exported(made("medusa", target, draft_vocabulary=KEPT), target, "vllm", tmp_path / "b").folder
    assert load_file(medusa / "model.safetensors")["token_map"].tolist() == KEPT


def test_every_layout_is_tested() -> None:
    """A line in LAYOUTS is a line in the table; draft models and the formats below have tests of their own."""
    tested = {(format, kind) for kind, _, format, _, _ in WRITTEN.values()} | {("eagle", "hass"), ("sglang", "eagle")}
    tested |= {("sglang", "dflash")}  # in test_round_trips.py
    listed = {(format, kind) for format, layout in LAYOUTS.items() for kind in layout if kind != "draft_model"}
    assert {pair for pair in listed if pair[0] not in ("transformers", "gguf", "native")} == tested
    assert set(LAYOUTS["transformers"]) == set(TYPES)


# In other dtypes.


@pytest.mark.parametrize(
    "name",
    [
        "eagle3 of 8 tokens, vllm",
        "peagle, vllm",
        "dspark, vllm",
        "dspark of 8 tokens from the anchor, vllm",
        "medusa, vllm",
    ],
)
def test_in_half_precision(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Floats are rounded to the dtype, and d2t stays an integer."""
    kind, options, format, shapes, _ = WRITTEN[name]
    drafter = made(kind, target, **options)
    before = {part: value.clone() for part, value in drafter.state_dict().items()}
    out = exported(drafter, target, format, tmp_path / "out", dtype="bfloat16").folder
    assert all(torch.equal(value, drafter.state_dict()[part]) for part, value in before.items()), "left as it was"
    tensors = load_file(out / "model.safetensors")
    whole = {"d2t": torch.int64, "t2d": torch.bool, "mask_hidden": torch.float32}
    assert {part: value.dtype for part, value in tensors.items()} == {
        part: whole.get(part, torch.bfloat16) for part in shapes
    }
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_drafter(out, target).state_dict()
    for part, value in drafter.state_dict().items():
        rounded = value.bfloat16().float() if value.is_floating_point() else value
        if part == "mask_hidden":  # it is solved for with the rounded fc, and not rounded itself
            assert torch.allclose(again["body.fc.weight"] @ again[part], value, atol=1e-5)
        else:
            assert torch.equal(again[part], rounded)


# Notes and commands.


def test_the_readme_says_how_to_start_it(tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("peagle", target, num_tokens=3)
    drafter.target_quality = {"kl": 0.01}
    made_of = export_drafter(drafter, target, "vllm", tmp_path / "peagle", target_name="org/target", revision="abc")
    text = (made_of.folder / "README.md").read_text()
    plan = '{"method": "eagle3", "parallel_drafting": true, "draft_sample_method": "probabilistic", '
    plan += '"model": "peagle", "num_speculative_tokens": 3}'
    assert f"vllm serve org/target --speculative-config '{plan}'" in text
    for words in ("at revision `abc`", "`norm_before_residual` is written", "Serve that target, not the original"):
        assert words in text
    assert made_of.adapted
    assert str(made_of.folder) in made_of.usage
    sglang = exported(made("eagle3", target), target, "sglang", tmp_path / "sglang")
    for words in ("EAGLE3", "--speculative-num-steps 4", "--speculative-num-draft-tokens 5", "[1, 3, 4]"):
        assert words in (sglang.folder / "README.md").read_text()
    assert not sglang.adapted
