"""Drafters in other projects' layouts give the logits that the layout describes (fp64, 1e-12)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import published_files
from parity import test_round_trips as layouts
from parity.published_files import (
    DRAFTED,
    HEAD,
    HEADS,
    HIDDEN,
    KEPT,
    PROMPT,
    VLLM,
    VOCAB,
    causal_attention,
    close,
    doubled,
    eagle3_step,
    eagle3_tensors,
    embedded,
    hidden_states,
    layer_shapes,
    llama_config,
    mlp,
    random_tensors,
    rms,
    six_layers,
    speculators,
    stepwise,
    written,
)
from parity.test_round_trips import Folder
from recording import decoded_logits
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith import load_drafter


@pytest.fixture
def target() -> LlamaForCausalLM:
    return six_layers().double()


# EAGLE-3.

Maker = Callable[[LlamaForCausalLM], Folder]
MISSING = object()
NORMED = {"residual_normed": True}
IN_A_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 3}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
UNSORTED = [KEPT[row] for row in (4, 0, 7, 2, 1, 6, 3, 5)]


def eagle3(vocabulary: list[int] | None = None, layer: dict[str, Any] | None = None, **changes: Any) -> Maker:
    """Return a maker of a speculators folder with other values of its config and of its layers' config."""

    def make(_: LlamaForCausalLM) -> Folder:
        size = VOCAB if vocabulary is None else len(vocabulary)
        config = speculators("eagle3", **VLLM, draft_vocab_size=size) | changes
        config["transformer_layer_config"] |= layer or {}
        tensors = eagle3_tensors(vocabulary)
        return {key: value for key, value in config.items() if value is not MISSING}, tensors

    return make


def with_one_map(target: LlamaForCausalLM) -> Folder:
    config, tensors = eagle3(KEPT)(target)
    return config, {name: value for name, value in tensors.items() if name != "t2d"}


EAGLE3: dict[str, tuple[Maker, list[int], dict[str, Any]]] = {
    "speculators": (eagle3(), [2, 3, 5], {}),
    "8 tokens": (eagle3(KEPT), [2, 3, 5], {}),
    "8 tokens, residual normed": (eagle3(KEPT, norm_before_residual=True), [2, 3, 5], NORMED),
    "a missing norm_before_residual means true": (eagle3(norm_before_residual=MISSING), [2, 3, 5], NORMED),
    "window, which holds the token itself": (eagle3(KEPT, IN_A_WINDOW), [2, 3, 5], {"window": 3}),
    "EAGLE-3.1 in a window": (layouts.speculators_eagle3_of_8_tokens_in_a_window, [2, 3, 5], {"window": 3}),
    "mrope of text is the default rotation": (eagle3(layer=MROPE), [2, 3, 5], {}),
    "rows in any order": (eagle3(UNSORTED), [2, 3, 5], {}),
    "d2t alone": (with_one_map, [2, 3, 5], {}),
    "a map of every token": (eagle3([*range(VOCAB)]), [2, 3, 5], {}),
    "DeepSpec, ids that count blocks": (layouts.deepspec_eagle3, [1, 2, 3, 4, 5], {}),
    "SGLang, ids that count blocks": (layouts.sglang_eagle3, [2, 3, 5], {}),
    "SGLang, EAGLE-3.1": (layouts.sglang_eagle31, [2, 3, 5], {}),
    "the repository, without ids": (layouts.eagle3_of_the_repository, [2, 3, 3], {}),
    "AngelSlim": (layouts.angelslim_eagle3, [2, 3, 3], {}),
    "Automodel": (layouts.automodel_eagle3, [2, 3, 3], {}),
}
"""What makes the folder, the layers whose outputs the drafter reads, and the options of its step."""


def assert_eagle3(
    folder: Folder, layers: list[int], options: dict[str, Any], place: Path, target: LlamaForCausalLM
) -> None:
    config, tensors = folder
    drafter = load_drafter(written(place, config, tensors), target)
    assert "speculators_config" not in config or drafter.draft_length_hint == 3
    assert (drafter.draft_vocabulary is None) == (config.get("draft_vocab_size", VOCAB) == VOCAB)
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in tensors}
    w = {names[name]: value for name, value in doubled(tensors).items()}
    parts = hidden_states(target, layers).chunk(len(layers), -1)
    parts = [rms(part, w[f"fc_norm.{i}.weight"]) if config.get("fc_norm") else part for i, part in enumerate(parts)]
    read = torch.cat(parts, -1)
    read = rms(read, w["input_norm.weight"]) if config.get("norm_before_fc") else read
    plain = eagle3_step(w, **{"residual_normed": False, **options})

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        out, logits = plain(embeds, states)
        return rms(out, w["norm.weight"]) if config.get("norm_output") else out, logits

    expected = stepwise(target, read @ w["fc.weight"].T, step)
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), expected)


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    make, layers, options = EAGLE3[name]
    assert_eagle3(make(target), layers, options, tmp_path / "d", target)


def test_the_layers_own_sizes_positions_and_epsilon_count(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them as the target has it or as a Llama has it by default; two layers; a norm before fc, ids left out."""
    for name, value in {"HEAD": 16, "INNER": 40, "EPS": 1e-2, "THETA": 50.0}.items():
        monkeypatch.setattr(published_files, name, value)
    tensors = eagle3_tensors() | random_tensors(layer_shapes(layer=1), 5)
    tensors |= random_tensors({"input_norm.weight": (3 * HIDDEN,)}, 1)
    config = speculators("eagle3", norm_before_residual=False, norm_before_fc=True)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    assert_eagle3((config, tensors), [2, 3, 3], {}, tmp_path / "d", target)


def test_embeddings_of_the_target_in_another_dtype_are_the_targets(tmp_path: Path, target: LlamaForCausalLM) -> None:
    config, own = speculators("eagle3", **VLLM), target.get_input_embeddings().weight.detach().clone()
    stored = eagle3_tensors() | {"embed_tokens.weight": own.bfloat16(), "rotary_emb.inv_freq": torch.ones(4)}
    load_drafter(written(tmp_path / "coarse", config, stored), target)
    stored["embed_tokens.weight"] = own
    drafter = load_drafter(written(tmp_path / "fine", config, stored), target.bfloat16())
    assert drafter.body.fc.weight.dtype == torch.bfloat16


# The others.


@pytest.mark.parametrize("residual_normed", [None, True])
def test_peagle(residual_normed: bool | None, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """A missing `norm_before_residual` means False here."""
    tensors = eagle3_tensors() | random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=2)
    config = speculators("peagle", **VLLM, mask_token_id=17) | {"norm_before_residual": residual_normed}
    if residual_normed is None:
        del config["norm_before_residual"]
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    features = torch.cat([hidden_states(target, [2, 3, 5]), tensors["mask_hidden"][0].expand(2, -1)])
    states = features @ tensors["fc.weight"].T
    embeds = embedded(target, [*PROMPT[1:], DRAFTED[0], 17, 17])
    reference = eagle3_step(tensors, residual_normed=bool(residual_normed))(embeds, states)[1][-3:]
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_mtp(tmp_path: Path, target: LlamaForCausalLM) -> None:
    shapes = {name.removeprefix("layers.0."): shape for name, shape in layer_shapes().items()}
    norms = ("final_layernorm", "hidden_layernorm", "token_layernorm")
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms} | {"input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"self_attn.{part}_proj.bias": (size * HEAD,) for part, size in zip("qkv", (HEADS, 2, 2), strict=True)}
    w = random_tensors(shapes)
    config = speculators("mtp", num_nextn_predict_layers=1)
    drafter = load_drafter(written(tmp_path / "d", config, {f"mtp_layers.0.{n}": v for n, v in w.items()}), target)
    w = doubled(w)

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [rms(embeds, w["token_layernorm.weight"]), rms(states, w["hidden_layernorm.weight"])]
        h = torch.cat(both, -1) @ w["input_proj.weight"].T
        h = h + causal_attention(w, rms(h, w["input_layernorm.weight"]), "self_attn")
        h = h + mlp(w, rms(h, w["post_attention_layernorm.weight"]), "mlp")
        out = rms(h, w["final_layernorm.weight"])
        return out, out @ target.lm_head.weight.T

    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), stepwise(target, hidden_states(target, [-1]), step))


@pytest.mark.parametrize("biased", [True, False])
def test_eagle1(biased: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """No input norm in the first layer, no final norm, the target's lm_head and embeddings."""
    shapes = {name: shape for name, shape in layer_shapes().items() if "input_layernorm" not in name}
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if biased else {})
    # Without a last norm states and logits grow; with smaller weights they stay of the order of 10.
    w = {name: value if "norm" in name else value / 2 for name, value in random_tensors(shapes).items()}
    folder = tmp_path / "d"
    embeddings = {"embed_tokens.weight": target.get_input_embeddings().weight}
    drafter = load_drafter(written(folder, llama_config(bias=biased), w | embeddings), target)
    w = doubled(w)

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([embeds, states], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(1))
        h = h + causal_attention(w, h)
        h = h + mlp(w, rms(h, w["layers.0.post_attention_layernorm.weight"]))
        return h, h @ target.lm_head.weight.T

    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), stepwise(target, hidden_states(target, [-1]), step))


def medusa_reference(
    target: LlamaForCausalLM, blocks: list[list[tuple[Tensor, Tensor]]], heads: list[Tensor]
) -> Tensor:
    state, logits = hidden_states(target, [-1])[-1], []
    for layers, head in zip(blocks, heads, strict=True):
        x = state
        for weight, bias in layers:
            x = x + torch.nn.functional.silu(weight @ x + bias)
        logits.append(head @ x)
    return torch.stack(logits)


@pytest.mark.parametrize("variant", ["plain", "one lm_head", "token map", "token map into all rows", "no biases"])
def test_medusa_of_vllm(variant: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    order = [40, 3, 60, 23, 5, 31]  # a map need not be sorted
    mapped, biased = variant.startswith("token map"), variant != "no biases"
    rows = len(order) if variant == "token map" else VOCAB
    count = 1 if variant == "one lm_head" else 3
    shapes = {f"medusa_heads.blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN) for i in range(3) for j in range(2)}
    shapes |= {f"medusa_heads.lm_heads.{i}.weight": (rows, HIDDEN) for i in range(count)}
    w = random_tensors(shapes)
    biases = random_tensors({f"medusa_heads.blocks.{i}.layers.{j}.bias": (HIDDEN,) for i in range(3) for j in range(2)})
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": biased, "original_lm_head": count == 1}
    config["truncated_vocab_size"] = len(order) if mapped else VOCAB
    stored = w | ({"token_map": torch.tensor(order)} if mapped else {}) | (biases if biased else {})
    w |= biases if biased else {name: 0 * value for name, value in biases.items()}
    drafter, w = load_drafter(written(tmp_path / "d", config, stored), target), doubled(w)
    blocks = [
        [tuple(w[f"medusa_heads.blocks.{i}.layers.{j}.{part}"] for part in ("weight", "bias")) for j in range(2)]
        for i in range(3)
    ]
    reference = medusa_reference(
        target, blocks, [w[f"medusa_heads.lm_heads.{min(i, count - 1)}.weight"] for i in range(3)]
    )
    if mapped:
        whole = reference.new_full((3, VOCAB), -torch.inf)
        whole[:, order] = reference if rows < VOCAB else reference[:, order]
        reference = whole
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_medusa_of_the_original(tmp_path: Path, target: LlamaForCausalLM) -> None:
    shapes = {f"{i}.0.linear.{part}": size for i in range(3) for part, size in (("weight", (32, 32)), ("bias", (32,)))}
    w = random_tensors(shapes | {f"{i}.1.weight": (VOCAB, HIDDEN) for i in range(3)})
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    drafter = load_drafter(written(tmp_path / "d", config, w), target)
    w = doubled(w)
    blocks = [[(w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"])] for i in range(3)]
    reference = medusa_reference(target, blocks, [w[f"{i}.1.weight"] for i in range(3)])
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_tensors_may_lie_in_several_files(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = eagle3_tensors()
    folder = written(tmp_path / "d", speculators("eagle3", **VLLM), tensors)
    wanted = load_drafter(folder, target).state_dict()
    written(folder, speculators("eagle3", **VLLM), {name: value for name, value in tensors.items() if "mlp" in name})
    save_file({name: value for name, value in tensors.items() if "mlp" not in name}, folder / "rest.safetensors")
    found = load_drafter(folder, target).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
