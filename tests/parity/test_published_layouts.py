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


# The others.


def test_peagle(tmp_path: Path, target: LlamaForCausalLM) -> None:
    tensors = eagle3_tensors() | random_tensors({"mask_hidden": (1, 1, 3 * HIDDEN)}, seed=2)
    config = speculators("peagle", **VLLM, mask_token_id=17)
    drafter = load_drafter(written(tmp_path / "d", config, tensors), target)
    features = torch.cat([hidden_states(target, [2, 3, 5]), tensors["mask_hidden"][0].expand(2, -1)])
    states = features @ tensors["fc.weight"].T
    embeds = embedded(target, [*PROMPT[1:], DRAFTED[0], 17, 17])
    reference = eagle3_step(tensors, residual_normed=False)(embeds, states)[1][-3:]
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


@pytest.mark.parametrize("rank", [0, 5], ids=["dflash", "dspark"])
def test_dflash(rank: int, tmp_path: Path, target: LlamaForCausalLM) -> None:
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
        w |= random_tensors({"confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}, 4)
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
    reference = rms(h, w["norm.weight"])[1:] @ target.lm_head.weight.T
    if rank:
        before = w["markov_head.markov_w1.weight"][torch.tensor(DRAFTED[:3])]
        reference = reference + before @ w["markov_head.markov_w2.weight"].T
    assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), reference)


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


@pytest.mark.parametrize("variant", ["plain", "one lm_head", "token map"])
def test_medusa_of_vllm(variant: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    order = [40, 3, 60, 23, 5, 31]  # a map need not be sorted
    rows = len(order) if variant == "token map" else VOCAB
    count = 1 if variant == "one lm_head" else 3
    shapes = {f"medusa_heads.blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN) for i in range(3) for j in range(2)}
    shapes |= {f"medusa_heads.lm_heads.{i}.weight": (rows, HIDDEN) for i in range(count)}
    shapes |= {f"medusa_heads.blocks.{i}.layers.{j}.bias": (HIDDEN,) for i in range(3) for j in range(2)}
    w = random_tensors(shapes)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "original_lm_head": count == 1}
    config["truncated_vocab_size"] = rows
    stored = w | ({"token_map": torch.tensor(order)} if variant == "token map" else {})
    drafter = load_drafter(written(tmp_path / "d", config, stored), target)
    blocks = [
        [tuple(w[f"medusa_heads.blocks.{i}.layers.{j}.{part}"] for part in ("weight", "bias")) for j in range(2)]
        for i in range(3)
    ]
    reference = medusa_reference(
        target, blocks, [w[f"medusa_heads.lm_heads.{min(i, count - 1)}.weight"] for i in range(3)]
    )
    if variant == "token map":
        whole = torch.full((3, VOCAB), -torch.inf)
        whole[:, order] = reference
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


def _changed(config: dict[str, Any], tensors: Tensors, how: str) -> tuple[dict[str, Any], Tensors]:
    match how:
        case "missing":
            del tensors["layers.0.hidden_norm.weight"]
        case "unknown":
            tensors["layers.0.self_attn.sink"] = torch.zeros(3)
        case "shape":
            tensors["fc.weight"] = torch.zeros(HIDDEN, HIDDEN)
        case "embeddings":
            tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
        case "maps":
            tensors["t2d"] = tensors["t2d"].roll(1)
        case "ids":
            config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 7]
        case "kind":
            config["speculators_model_type"] = "eagle4"
        case "layers":
            del config["transformer_layer_config"]
        case "vocabulary":
            config["transformer_layer_config"]["vocab_size"] = 60
    return config, tensors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"no tensor layers\.0\.hidden_norm\.weight; expected float \[32\]"),
        ("unknown", r"unexpected tensor layers\.0\.self_attn\.sink \[3\]"),
        ("shape", r"tensor fc\.weight is float \[32, 32\]; expected float \[32, 96\]"),
        ("embeddings", r"tensor embed_tokens\.weight \[64, 32\] is not the target's"),
        ("maps", "d2t and t2d name different tokens"),
        ("ids", r"layer_ids=\[2, 3, 7\]; expected a list of the target's layers, 1 to 6"),
        ("kind", "speculators_model_type='eagle4' in config.json; expected one of dflash, dspark, eagle3, mtp, peagle"),
        ("layers", "hidden_size=4096 in config.json; expected 32"),
        ("vocabulary", "vocab_size=60 in config.json; expected 64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(how: str, message: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    config = speculators("eagle3", **VLLM, draft_vocab_size=len(KEPT))
    folder = written(tmp_path / "d", *_changed(config, eagle3_tensors(KEPT), how))
    with pytest.raises(ConfigError, match=message):
        load_drafter(folder, target)


def test_other_targets_and_files_are_refused(tmp_path: Path, target: LlamaForCausalLM) -> None:
    folder = written(tmp_path / "d", speculators("eagle3", **VLLM), eagle3_tensors())
    with pytest.raises(ConfigError, match="hidden_size=32 in config.json; expected 16"):
        load_drafter(folder, make_llama(num_hidden_layers=6, hidden_size=16))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_drafter(folder, target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in the folder"):
        load_drafter(folder, target)
    config = speculators(
        "dflash", block_size=4, mask_token_id=1, aux_hidden_state_layer_ids=[2], sample_from_anchor=True
    )
    with pytest.raises(ConfigError, match="sample_from_anchor=True in config.json"):
        load_drafter(written(tmp_path / "f", config, {"x": torch.zeros(1)}), target)
