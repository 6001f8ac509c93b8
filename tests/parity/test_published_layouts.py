"""Drafters in other projects' layouts: loaded, they say what the layout's description says, written out here by itself.

Nothing of `draftsmith.heads` is used for the reference: norms, rotary positions and attention are plain formulas.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from recording import decoded_logits
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith import load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.parallel_eagle import Line

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, EPS, THETA = 32, 4, 2, 8, 48, 64, 1e-6, 10_000.0
PROMPT, DRAFTED = [5, 9, 33, 2, 11, 9, 8], [23, 60, 31, 4]
"""What the target has read, then the token that it committed last and the draft behind it."""
CLOSE = 1e-5
KEPT = [3, 5, 8, 13, 23, 31, 40, 60]
Tensors = dict[str, Tensor]


@pytest.fixture
def target() -> LlamaForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER}
    return make_llama(num_hidden_layers=6, **sizes).requires_grad_(False)


# The reference, in plain torch.


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def rotated(x_Thd: Tensor, positions: list[int]) -> Tensor:
    """Rotary positions, halves of a head paired."""
    frequency = THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
    angle_T1d = (torch.tensor(positions)[:, None] * frequency)[:, None]
    first, second = x_Thd.chunk(2, -1)
    cos, sin = angle_T1d.cos(), angle_T1d.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD))


def attended(q_Thd: Tensor, k_Shd: Tensor, v_Shd: Tensor, visible_TS: Tensor) -> Tensor:
    out = []
    for head in range(HEADS):
        k, v = k_Shd[:, head // (HEADS // KV_HEADS)], v_Shd[:, head // (HEADS // KV_HEADS)]
        scores = (q_Thd[:, head] @ k.T) / HEAD**0.5
        out.append(scores.masked_fill(~visible_TS, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, -1)


def causal_attention(w: Tensors, x: Tensor, name: str = "layers.0.self_attn") -> Tensor:
    T, positions = x.shape[0], list(range(x.shape[0]))

    def projected(part: str) -> Tensor:
        return heads_of(x @ w[f"{name}.{part}_proj.weight"].T + w.get(f"{name}.{part}_proj.bias", torch.zeros(1)))

    q, k = (rotated(projected(part), positions) for part in "qk")
    seen = attended(q, k, projected("v"), torch.ones(T, T, dtype=torch.bool).tril())
    return seen @ w[f"{name}.o_proj.weight"].T


def mlp(w: Tensors, x: Tensor, name: str = "layers.0.mlp") -> Tensor:
    gate = torch.nn.functional.silu(x @ w[f"{name}.gate_proj.weight"].T)
    return (gate * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T


def hidden_states(target: LlamaForCausalLM, layers: list[int]) -> Tensor:
    """[T, len(layers) * H] of the prompt; -1: the final state."""
    states = target(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1)


def embedded(target: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    return target.get_input_embeddings().weight[torch.tensor(tokens)]


def stepwise(
    target: LlamaForCausalLM, states: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Logits behind the committed tokens and behind each draft token; `step`: (embeddings, states) to (states, logits).

    The whole sequence is read again each time.
    """
    tokens, logits = [*PROMPT[1:], DRAFTED[0]], []
    for token in DRAFTED[1:]:
        out, scores = step(embedded(target, tokens), states)
        logits.append(scores[-1])
        tokens, states = [*tokens, token], torch.cat([states, out[-1:]])
    return torch.stack(logits)


def eagle3_step(w: Tensors, *, residual_normed: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(states, w["layers.0.hidden_norm.weight"])
        x = torch.cat([rms(embeds, w["layers.0.input_layernorm.weight"]), normed], -1)
        h = (normed if residual_normed else states) + causal_attention(w, x)
        h = h + mlp(w, rms(h, w["layers.0.post_attention_layernorm.weight"]))
        logits_D = rms(h, w["norm.weight"]) @ w["lm_head.weight"].T
        if "d2t" not in w:
            return h, logits_D
        logits_V = torch.full((h.shape[0], VOCAB), -torch.inf)
        for row in range(len(w["d2t"])):
            logits_V[:, row + int(w["d2t"][row])] = logits_D[:, row]
        return h, logits_V

    return step


# What others write.


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and "norm" in name
        else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(width: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    inner, outer = HEADS * HEAD, KV_HEADS * HEAD
    return {
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (inner, width),
        "layers.0.self_attn.k_proj.weight": (outer, width),
        "layers.0.self_attn.v_proj.weight": (outer, width),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, inner),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }


def eagle3_tensors(draft_vocabulary: list[int] | None = None, features: int = 3) -> Tensors:
    rows = VOCAB if draft_vocabulary is None else len(draft_vocabulary)
    shapes = layer_shapes(2 * HIDDEN) | {"layers.0.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    shapes |= {"fc.weight": (HIDDEN, features * HIDDEN), "lm_head.weight": (rows, HIDDEN)}
    tensors = random_tensors(shapes)
    if draft_vocabulary is not None:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[draft_vocabulary] = True
        tensors |= {"d2t": torch.tensor(draft_vocabulary) - torch.arange(rows), "t2d": mask}
    return tensors


def llama_config(**changes: Any) -> dict[str, Any]:
    config = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB}
    config |= {"rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 128, "hidden_act": "silu"}
    return config | {"tie_word_embeddings": False} | changes


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}]
    config = {"speculators_model_type": kind, "speculators_version": "0.3.0", "target_hidden_size": HIDDEN}
    config["speculators_config"] = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": methods}
    layer = llama_config()
    return config | {"transformer_layer_config": layer, "draft_vocab_size": VOCAB} | changes


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def close(ours: Tensor, reference: Tensor) -> bool:
    same_holes = torch.equal(ours.isinf(), reference.isinf())
    return same_holes and bool((ours - reference).nan_to_num(0.0).abs().max() < CLOSE)


# EAGLE-3.

VLLM = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "norm_before_residual": False}


@pytest.mark.parametrize("vocabulary", [None, KEPT], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("residual_normed", [False, True])
def test_eagle3_of_vllm(
    vocabulary: list[int] | None, residual_normed: bool, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    tensors = eagle3_tensors(vocabulary)
    size = VOCAB if vocabulary is None else len(vocabulary)
    config = speculators("eagle3", **VLLM, draft_vocab_size=size) | {"norm_before_residual": residual_normed}
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    assert drafter.draft_length_hint == 3
    states = hidden_states(target, [2, 3, 5]) @ tensors["fc.weight"].T
    reference = stepwise(target, states, eagle3_step(tensors, residual_normed=residual_normed))
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_a_missing_norm_before_residual_means_true_in_vllms_layout(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = eagle3_tensors()
    config = speculators("eagle3", **VLLM)
    del config["norm_before_residual"]
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    states = hidden_states(target, [2, 3, 5]) @ tensors["fc.weight"].T
    assert close(
        decoded_logits(drafter, target, PROMPT, DRAFTED),
        stepwise(target, states, eagle3_step(tensors, residual_normed=True)),
    )


def test_the_norms_of_eagle31(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """A norm for each feature before fc; what is fed back is normed, and the lm_head reads it as it is."""
    tensors = eagle3_tensors() | random_tensors({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, seed=1)
    config = speculators("eagle3", **VLLM, fc_norm=True, norm_output=True)
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
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
    """`midlayer`, ids that count blocks; embeddings beside it that are the target's."""
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


def test_the_layers_own_sizes_positions_and_epsilon_count(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them as the target has it or as a Llama has it by default; two layers; a norm before fc, ids left out."""
    for name, value in {"HEAD": 16, "INNER": 40, "EPS": 1e-2, "THETA": 50.0}.items():
        monkeypatch.setitem(globals(), name, value)
    second = {name.replace(".0.", ".1."): value for name, value in random_tensors(layer_shapes(), seed=5).items()}
    tensors = eagle3_tensors() | second | random_tensors({"input_norm.weight": (3 * HIDDEN,)}, seed=1)
    config = speculators("eagle3", norm_before_residual=False, norm_before_fc=True)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    normed = rms(hidden_states(target, [2, 3, 3]), tensors["input_norm.weight"])
    headless = {**tensors, "norm.weight": torch.ones(HIDDEN), "lm_head.weight": torch.eye(HIDDEN)}
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
    everything = eagle3_tensors(list(range(VOCAB)))
    bare = {name: value for name, value in everything.items() if name not in ("d2t", "t2d")}
    assert torch.equal(logits("mapped", [*range(VOCAB)], everything), logits("bare", [*range(VOCAB)], bare))


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
    features = torch.cat([hidden_states(target, [2, 3, 5]), tensors["mask_hidden"][0].expand(2, -1)])
    states = features @ tensors["fc.weight"].T
    embeds = embedded(target, [*PROMPT[1:], DRAFTED[0], 17, 17])
    reference = eagle3_step(tensors, residual_normed=bool(residual_normed))(embeds, states)[1][-3:]
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


@pytest.mark.parametrize("sees", [True, False], ids=["sure of the token before", "sure of the state alone"])
@pytest.mark.parametrize("rank", [0, 5], ids=["dflash", "dspark"])
def test_dflash(rank: int, sees: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Keys and values of projected features, a bidirectional block of the anchor and masks, the target's lm_head."""
    shapes = layer_shapes() | {"layers.0.self_attn.q_norm.weight": (HEAD,), "layers.0.self_attn.k_norm.weight": (HEAD,)}
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    w = random_tensors(shapes)
    config = speculators("dspark" if rank else "dflash", block_size=4, mask_token_id=17, markov_rank=rank)
    config |= {"aux_hidden_state_layer_ids": [2, 4], "enable_confidence_head": bool(rank)}
    config["sample_from_anchor"] = False
    if rank:
        w |= random_tensors(
            {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (VOCAB, rank)}, 3
        )
        w |= random_tensors(
            {"confidence_head.proj.weight": (1, HIDDEN + rank * sees), "confidence_head.proj.bias": (1,)}, 4
        )
    drafter = load_drafter(written(tmp_path / "d", config, w), target)
    n, name = len(PROMPT), "layers.0.self_attn"
    context = rms(hidden_states(target, [2, 4]) @ w["fc.weight"].T, w["hidden_norm.weight"])
    block = embedded(target, [DRAFTED[0], 17, 17, 17])
    x = rms(block, w["layers.0.input_layernorm.weight"])
    both = torch.cat([context, x])
    q = rotated(rms(heads_of(x @ w[f"{name}.q_proj.weight"].T), w[f"{name}.q_norm.weight"]), list(range(n, n + 4)))
    k = rotated(rms(heads_of(both @ w[f"{name}.k_proj.weight"].T), w[f"{name}.k_norm.weight"]), list(range(n + 4)))
    v = heads_of(both @ w[f"{name}.v_proj.weight"].T)
    h = block + attended(q, k, v, torch.ones(4, n + 4, dtype=torch.bool)) @ w[f"{name}.o_proj.weight"].T
    h = h + mlp(w, rms(h, w["layers.0.post_attention_layernorm.weight"]))
    states = rms(h, w["norm.weight"])[1:]
    reference = states @ target.lm_head.weight.T
    if rank:
        before = w["markov_head.markov_w1.weight"][torch.tensor(DRAFTED[:3])]
        reference = reference + before @ w["markov_head.markov_w2.weight"].T
        read = torch.cat([states, before], -1) if sees else states
        sure = read @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    with torch.no_grad():
        assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)
        chances = drafter.chances([Line(DRAFTED[1:])], [[0, 1]])
    assert chances is None if not rank else torch.allclose(torch.tensor(chances[0]), sure[1:].sigmoid(), atol=CLOSE)


def test_mtp(tmp_path: Path, target: LlamaForCausalLM) -> None:
    shapes = {name.removeprefix("layers.0."): shape for name, shape in layer_shapes().items()}
    norms = ("final_layernorm", "hidden_layernorm", "token_layernorm")
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms} | {"input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"self_attn.{part}_proj.bias": (size * HEAD,) for part, size in zip("qkv", (HEADS, 2, 2), strict=True)}
    w = random_tensors(shapes)
    config = speculators("mtp", num_nextn_predict_layers=1)
    drafter = load_drafter(written(tmp_path / "d", config, {f"mtp_layers.0.{n}": v for n, v in w.items()}), target)

    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [rms(states, w["hidden_layernorm.weight"]), rms(embeds, w["token_layernorm.weight"])]
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
    # Without a last norm states and logits grow; smaller weights keep the fp32 sums comparable.
    w = {name: value if "norm" in name else value / 2 for name, value in random_tensors(shapes).items()}
    folder = tmp_path / "d"
    embeddings = {"embed_tokens.weight": target.get_input_embeddings().weight}
    drafter = load_drafter(written(folder, llama_config(bias=biased), w | embeddings), target)

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
    drafter = load_drafter(written(tmp_path / "d", config, stored), target)
    blocks = [
        [tuple(w[f"medusa_heads.blocks.{i}.layers.{j}.{part}"] for part in ("weight", "bias")) for j in range(2)]
        for i in range(3)
    ]
    reference = medusa_reference(
        target, blocks, [w[f"medusa_heads.lm_heads.{min(i, count - 1)}.weight"] for i in range(3)]
    )
    if mapped:
        whole = torch.full((3, VOCAB), -torch.inf)
        whole[:, order] = reference if rows < VOCAB else reference[:, order]
        reference = whole
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


def test_medusa_of_the_original(tmp_path: Path, target: LlamaForCausalLM) -> None:
    shapes = {f"{i}.0.linear.{part}": size for i in range(3) for part, size in (("weight", (32, 32)), ("bias", (32,)))}
    w = random_tensors(shapes | {f"{i}.1.weight": (VOCAB, HIDDEN) for i in range(3)})
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    drafter = load_drafter(written(tmp_path / "d", config, w), target)
    blocks = [[(w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"])] for i in range(3)]
    reference = medusa_reference(target, blocks, [w[f"{i}.1.weight"] for i in range(3)])
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


# What is refused.

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
            model_type="qwen3", layer_types=["sliding_attention"], use_sliding_window=True, sliding_window=4
        ),
        "layer_types={'sliding_attention'} in config.json",
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
        (speculators("dflash", **DRAFT_BLOCK, sample_from_anchor=True), {}, "sample_from_anchor=True in config.json"),
        (speculators("dspark", **DRAFT_BLOCK), {}, "sample_from_anchor=True in config.json; expected False"),
        (speculators("dflash", **DRAFT_BLOCK) | {"draft_vocab_size": 8}, {}, "draft_vocab_size=8 in config.json"),
        (
            speculators("dflash", **DRAFT_BLOCK) | {"block_size": 1},
            {},
            "block_size=1 in config.json; expected an integer",
        ),
        (speculators("dflash", **DRAFT_BLOCK) | {"mask_token_id": None}, {}, "mask_token_id=None in config.json"),
        (speculators("dflash", **DRAFT_BLOCK, markov_head_type="rnn"), {}, "markov_head_type='rnn' in config.json"),
        (
            speculators("dflash", **DRAFT_BLOCK) | {"aux_hidden_state_layer_ids": None},
            {},
            "aux_hidden_state_layer_ids=None; expected a list of the target's layers",
        ),
        (
            speculators("dflash", **DRAFT_BLOCK),
            {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)},
            r"tensor lm_head\.weight \[64, 32\] is not the target's .* an lm_head of their own",
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


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_what_was_read_is_saved_as_ours(kind: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Options of the layout included."""
    tensors = eagle3_tensors(KEPT) | random_tensors({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, seed=1)
    config = speculators(kind, **VLLM, fc_norm=True, draft_vocab_size=len(KEPT)) | {"norm_before_residual": True}
    if kind == "peagle":
        tensors |= random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=2)
        config["mask_token_id"] = 17
    drafter = load_drafter(written(tmp_path / "theirs", config, tensors), target)
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
