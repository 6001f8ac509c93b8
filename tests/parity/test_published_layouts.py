"""Drafters in other projects' layouts give the logits that the layout describes (fp64, 1e-12)."""

from pathlib import Path

import pytest
import torch
from parity import published_files
from parity.published_files import (
    DRAFTED,
    HEAD,
    HEADS,
    HIDDEN,
    KEPT,
    PROMPT,
    VLLM,
    VOCAB,
    Tensors,
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
from recording import decoded_logits
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith import ConfigError, load_drafter
from draftsmith.heads.checkpoint import describe_target, save_drafter


@pytest.fixture
def target() -> LlamaForCausalLM:
    return six_layers().double()


# EAGLE-3.


@pytest.mark.parametrize("vocabulary", [None, KEPT], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("residual_normed", [False, True])
def test_eagle3_of_vllm(
    vocabulary: list[int] | None, residual_normed: bool, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    tensors = eagle3_tensors(vocabulary)
    size = VOCAB if vocabulary is None else len(vocabulary)
    config = speculators("eagle3", **VLLM, draft_vocab_size=size) | {"norm_before_residual": residual_normed}
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    assert drafter.draft_length_hint == 3
    states = hidden_states(target, [2, 3, 5]) @ tensors["fc.weight"].T
    reference = stepwise(target, states, eagle3_step(tensors, residual_normed=residual_normed))
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_eagle3_with_a_sliding_window(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """The default of the speculators package; a token is in its own window."""
    tensors = eagle3_tensors(KEPT)
    config = speculators("eagle3", **VLLM, draft_vocab_size=len(KEPT))
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 3}
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    states = hidden_states(target, [2, 3, 5]) @ tensors["fc.weight"].T
    step = eagle3_step(tensors, residual_normed=False, window=3)
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), stepwise(target, states, step))


def test_eagle3_of_deepspec(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Five features, ids that count blocks, norms of queries and keys, stored embeddings."""
    norms = {f"layers.0.self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}
    tensors = eagle3_tensors(features=5) | random_tensors(norms, 7)
    config = llama_config(model_type="qwen3", architectures=["Qwen3Eagle3Model"], target_layer_ids=[0, 1, 2, 3, 4])
    stored = {"embed_tokens.weight": target.get_input_embeddings().weight}
    drafter = load_drafter(written(tmp_path / "d", config, tensors | stored), target)
    tensors = doubled(tensors)
    states = hidden_states(target, [1, 2, 3, 4, 5]) @ tensors["fc.weight"].T
    step = eagle3_step(tensors, residual_normed=False)
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), stepwise(target, states, step))


def test_a_missing_norm_before_residual_means_true_in_vllms_layout(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = eagle3_tensors()
    config = speculators("eagle3", **VLLM)
    del config["norm_before_residual"]
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    states = hidden_states(target, [2, 3, 5]) @ tensors["fc.weight"].T
    assert close(
        decoded_logits(drafter, target, PROMPT, DRAFTED),
        stepwise(target, states, eagle3_step(tensors, residual_normed=True)),
    )


def test_the_norms_of_eagle31(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """A norm for each feature before fc; normed states are fed back and read by the lm_head."""
    tensors = eagle3_tensors() | random_tensors({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, seed=1)
    config = speculators("eagle3", **VLLM, fc_norm=True, norm_output=True)
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    parts = hidden_states(target, [2, 3, 5]).chunk(3, -1)
    normed = torch.cat([rms(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    plain = eagle3_step(tensors, residual_normed=False)

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        out, logits = plain(embeds, states)
        return rms(out, tensors["norm.weight"]), logits

    reference = stepwise(target, normed @ tensors["fc.weight"].T, step)
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_sglang_and_vllm_folders_are_one_drafter_and_ids_differ_by_one(
    tmp_path: Path, target: LlamaForCausalLM
) -> None:
    """`midlayer`, ids that count blocks, and embeddings equal to the target's."""
    tensors = eagle3_tensors(KEPT)
    flat = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    flat["embed_tokens.weight"] = target.get_input_embeddings().weight
    config = llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(KEPT))
    vllm = written(tmp_path / "vllm", speculators("eagle3", **VLLM, draft_vocab_size=len(KEPT)), tensors)

    def logits(ids: list[int]) -> Tensor:
        ours = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        return decoded_logits(load_drafter(written(tmp_path / "sglang", ours, flat), target), target, PROMPT, DRAFTED)

    wanted = decoded_logits(load_drafter(vllm, target), target, PROMPT, DRAFTED)
    assert torch.equal(logits([1, 2, 4]), wanted)
    assert not close(logits([2, 3, 5]), wanted), "the trap: the same numbers mean other layers"


def test_automodels_eagle3_is_the_repositorys_without_ids(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Names below `model.`, and the target's number of layers beside the one that is there."""
    tensors = eagle3_tensors(KEPT)
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight
    flat = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    config = llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(KEPT))
    theirs = config | {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 6, "parallel_drafting": False}
    outer = ("lm_head.weight", "d2t", "t2d")
    named = {name if name in outer else f"model.{name}": value for name, value in tensors.items()}
    drafters = [load_drafter(written(tmp_path / "d", *one), target) for one in ((config, flat), (theirs, named))]
    wanted, logits = (decoded_logits(one, target, PROMPT, DRAFTED) for one in drafters)
    assert torch.equal(logits, wanted)
    with pytest.raises(ConfigError, match=r"parallel_drafting=True in config\.json; expected False"):
        load_drafter(written(tmp_path / "d", theirs | {"parallel_drafting": True}, named), target)


def test_the_layers_own_sizes_positions_and_epsilon_count(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them as the target has it or as a Llama has it by default; two layers; a norm before fc, ids left out."""
    for name, value in {"HEAD": 16, "INNER": 40, "EPS": 1e-2, "THETA": 50.0}.items():
        monkeypatch.setattr(published_files, name, value)
    second = {name.replace(".0.", ".1."): value for name, value in random_tensors(layer_shapes(), seed=5).items()}
    tensors = eagle3_tensors() | second | random_tensors({"input_norm.weight": (3 * HIDDEN,)}, seed=1)
    config = speculators("eagle3", norm_before_residual=False, norm_before_fc=True)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    tensors = doubled(tensors)
    second = doubled(second)
    normed = rms(hidden_states(target, [2, 3, 3]), tensors["input_norm.weight"])
    headless = doubled({**tensors, "norm.weight": torch.ones(HIDDEN), "lm_head.weight": torch.eye(HIDDEN)})
    first = eagle3_step(headless, residual_normed=False)

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = first(embeds, states)
        h = h + causal_attention(second, rms(h, second["layers.1.input_layernorm.weight"]), "layers.1.self_attn")
        h = h + mlp(second, rms(h, second["layers.1.post_attention_layernorm.weight"]), "layers.1.mlp")
        return h, rms(h, tensors["norm.weight"]) @ tensors["lm_head.weight"].T

    reference = stepwise(target, normed @ tensors["fc.weight"].T, step)
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_rows_of_a_draft_vocabulary_need_not_be_sorted(tmp_path: Path, target: LlamaForCausalLM) -> None:
    def logits(folder: str, tokens: list[int], tensors: Tensors) -> Tensor:
        config = speculators("eagle3", **VLLM, draft_vocab_size=len(tokens))
        drafter = load_drafter(written(tmp_path / folder, config, tensors), target)
        assert (drafter.draft_vocabulary is None) == (len(tokens) == VOCAB)
        return decoded_logits(drafter, target, PROMPT, DRAFTED)

    order = [4, 0, 7, 2, 1, 6, 3, 5]
    sorted_rows, tokens = eagle3_tensors(KEPT), [KEPT[row] for row in order]
    mixed = {**sorted_rows, "lm_head.weight": sorted_rows["lm_head.weight"][order]}
    mixed["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    assert torch.equal(logits("mixed", tokens, mixed), logits("sorted", KEPT, sorted_rows))
    one_map = {name: value for name, value in sorted_rows.items() if name != "t2d"}
    assert torch.equal(logits("d2t alone", KEPT, one_map), logits("both maps", KEPT, sorted_rows))
    everything = eagle3_tensors(list(range(VOCAB)))
    bare = {name: value for name, value in everything.items() if name not in ("d2t", "t2d")}
    assert torch.equal(logits("mapped", [*range(VOCAB)], everything), logits("bare", [*range(VOCAB)], bare))


def test_mrope_of_a_text_drafter_is_the_default_rotation(tmp_path: Path, target: LlamaForCausalLM) -> None:
    logits = []
    for name, scaling in (("plain", None), ("mrope", {"type": "mrope", "mrope_section": [2, 1, 1]})):
        layers = {**speculators("eagle3", **VLLM)["transformer_layer_config"], "rope_scaling": scaling}
        config = speculators("eagle3", **VLLM, transformer_layer_config=layers)
        drafter = load_drafter(written(tmp_path / name, config, eagle3_tensors()), target)
        logits.append(decoded_logits(drafter, target, PROMPT, DRAFTED))
    assert torch.equal(*logits)


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


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_what_was_read_is_saved_as_ours(kind: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Options of the layout included."""
    tensors = eagle3_tensors(KEPT) | random_tensors({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, seed=1)
    config = speculators(kind, **VLLM, fc_norm=True, draft_vocab_size=len(KEPT)) | {"norm_before_residual": True}
    if kind == "peagle":
        tensors |= random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=2)
        config["mask_token_id"] = 17
    drafter = load_drafter(written(tmp_path / "theirs", config, tensors), target)
    tensors = doubled(tensors)
    made_for = describe_target(target, None, "tiny")
    save_drafter(drafter, tmp_path / "ours", target=made_for, recipe=None, draft_length=3)
    again = load_drafter(tmp_path / "ours", target)
    ours, theirs = (decoded_logits(one, target, PROMPT, DRAFTED) for one in (again, drafter))
    assert torch.equal(ours, theirs)


def test_tensors_may_lie_in_several_files(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = eagle3_tensors()
    folder = written(tmp_path / "d", speculators("eagle3", **VLLM), tensors)
    wanted = load_drafter(folder, target).state_dict()
    written(folder, speculators("eagle3", **VLLM), {name: value for name, value in tensors.items() if "mlp" in name})
    save_file({name: value for name, value in tensors.items() if "mlp" not in name}, folder / "rest.safetensors")
    found = load_drafter(folder, target).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
