"""Drafter folders in the layouts of other projects, and the computation that each layout describes, in plain torch.

Nothing of `draftsmith.heads` is used here: norms, rotary positions and attention are plain formulas.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import make_llama
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, EPS, THETA = 32, 4, 2, 8, 48, 64, 1e-6, 10_000.0
PROMPT, DRAFTED = [5, 9, 33, 2, 11, 9, 8], [23, 60, 31, 4]
"""The tokens that the target has read, then the last committed token and the draft after it."""
CLOSE = 1e-12
"""In float64, at logits of the order of 10. Rotations compute in float32, here as in transformers."""
KEPT = [1, 5, 8, 13, 23, 31, 40, 60]
"""A draft vocabulary, with the EOS token of `make_tokenizer`."""
Tensors = dict[str, Tensor]
VLLM = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "norm_before_residual": False}


def six_layers(depth: int = 6) -> LlamaForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER}
    return make_llama(num_hidden_layers=depth, **sizes).requires_grad_(False)


# The reference, in plain torch.


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def rotated(x_Thd: Tensor, positions: list[int]) -> Tensor:
    """Rotary positions, halves of a head paired."""
    frequency = 1.0 / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
    angle_T1d = (torch.tensor(positions)[:, None] * frequency)[:, None]
    first, second = x_Thd.chunk(2, -1)
    cos, sin = angle_T1d.cos(), angle_T1d.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD))


def attended(q_Thd: Tensor, k_Shd: Tensor, v_Shd: Tensor, visible_TS: Tensor, sinks_h: Tensor | None = None) -> Tensor:
    out = []
    for head in range(HEADS):
        k, v = k_Shd[:, head // (HEADS // KV_HEADS)], v_Shd[:, head // (HEADS // KV_HEADS)]
        weights = ((q_Thd[:, head] @ k.T) / HEAD**0.5).masked_fill(~visible_TS, -torch.inf).exp()
        sink = 0 if sinks_h is None else sinks_h[head].exp()
        out.append(weights / (weights.sum(-1, keepdim=True) + sink) @ v)
    return torch.cat(out, -1)


def block_states(w: Tensors, context: Tensor, block: Tensor, seen: list[Tensor]) -> Tensor:
    """Return the states of a DFlash block; `seen`: for each layer what its positions see of features and block."""
    context, n, size = rms(context @ w["fc.weight"].T, w["hidden_norm.weight"]), len(context), len(block)
    for layer, visible in enumerate(seen):
        name, read = f"layers.{layer}", rms(block, w[f"layers.{layer}.input_layernorm.weight"])
        x = convolved(w, f"{name}.attention_conv", 0, read, read)
        both, attn = torch.cat([context, x]), f"{name}.self_attn"
        q = rms(heads_of(x @ w[f"{attn}.q_proj.weight"].T), w[f"{attn}.q_norm.weight"])
        k = rms(heads_of(both @ w[f"{attn}.k_proj.weight"].T), w[f"{attn}.k_norm.weight"])
        v = heads_of(both @ w[f"{attn}.v_proj.weight"].T)
        q, k = rotated(q, list(range(n, n + size))), rotated(k, list(range(n + size)))
        out = attended(q, k, v, visible, w.get(f"{attn}.attention_sink_bias"))
        block = block + convolved(w, f"{name}.attention_conv", 1, read, out @ w[f"{attn}.o_proj.weight"].T)
        read = rms(block, w[f"{name}.post_attention_layernorm.weight"])
        out = mlp(w, convolved(w, f"{name}.mlp_conv", 0, read, read), f"{name}.mlp")
        block = block + convolved(w, f"{name}.mlp_conv", 1, read, out)
    return rms(block, w["norm.weight"])


def convolved(w: Tensors, name: str, side: int, read: Tensor, x: Tensor) -> Tensor:
    """Return DFlash 2's convolution before (0) or after (1) a sublayer that reads `read`; `x` for DFlash."""
    if f"{name}.base_kernel" not in w:
        return x
    base = w[f"{name}.base_kernel"][side]
    delta = (read @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, len(base), -1)[:, side]
    group = HIDDEN // delta.shape[-1]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for tap in range(min(t + 1, len(base))):
            for c in range(HIDDEN):
                out[t, c] += (base[tap, c] + delta[t, tap, c // group]) * x[t - tap, c]
    return out


def causal_attention(w: Tensors, x: Tensor, name: str = "layers.0.self_attn", window: int = 10**6) -> Tensor:
    T, positions = x.shape[0], list(range(x.shape[0]))

    def projected(part: str) -> Tensor:
        return heads_of(x @ w[f"{name}.{part}_proj.weight"].T + w.get(f"{name}.{part}_proj.bias", torch.zeros(1)))

    def normed(part: str) -> Tensor:
        gain = w.get(f"{name}.{part}_norm.weight")
        return projected(part) if gain is None else rms(projected(part), gain)

    q, k = (rotated(normed(part), positions) for part in "qk")
    seen = attended(q, k, projected("v"), torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window))
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
    """Return logits after committed and draft tokens; `step`: (embeddings, states) to (states, logits).

    The whole sequence is read again each time.
    """
    tokens, logits = [*PROMPT[1:], DRAFTED[0]], []
    for token in DRAFTED[1:]:
        out, scores = step(embedded(target, tokens), states)
        logits.append(scores[-1])
        tokens, states = [*tokens, token], torch.cat([states, out[-1:]])
    return torch.stack(logits)


def eagle3_step(
    w: Tensors, *, residual_normed: bool, window: int = 10**6
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def step(embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(states, w["layers.0.hidden_norm.weight"])
        x = torch.cat([rms(embeds, w["layers.0.input_layernorm.weight"]), normed], -1)
        h = (normed if residual_normed else states) + causal_attention(w, x, window=window)
        h = h + mlp(w, rms(h, w["layers.0.post_attention_layernorm.weight"]))
        if "layers.1.input_layernorm.weight" in w:
            h = h + causal_attention(w, rms(h, w["layers.1.input_layernorm.weight"]), "layers.1.self_attn")
            h = h + mlp(w, rms(h, w["layers.1.post_attention_layernorm.weight"]), "layers.1.mlp")
        logits_D = rms(h, w["norm.weight"]) @ w["lm_head.weight"].T
        if "d2t" not in w:
            return h, logits_D
        logits_V = logits_D.new_full((h.shape[0], VOCAB), -torch.inf)
        for row in range(len(w["d2t"])):
            logits_V[:, row + int(w["d2t"][row])] = logits_D[:, row]
        return h, logits_V

    return step


# Folders of other projects.


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and "norm" in name
        else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(width: int = HIDDEN, layer: int = 0) -> dict[str, tuple[int, ...]]:
    inner, outer = HEADS * HEAD, KV_HEADS * HEAD
    shapes: dict[str, tuple[int, ...]] = {"layers.0.input_layernorm.weight": (HIDDEN,)}
    shapes |= {"layers.0.post_attention_layernorm.weight": (HIDDEN,)}
    shapes |= {"layers.0.self_attn.q_proj.weight": (inner, width), "layers.0.self_attn.k_proj.weight": (outer, width)}
    shapes |= {"layers.0.self_attn.v_proj.weight": (outer, width), "layers.0.self_attn.o_proj.weight": (HIDDEN, inner)}
    shapes |= {"layers.0.mlp.gate_proj.weight": (INNER, HIDDEN), "layers.0.mlp.up_proj.weight": (INNER, HIDDEN)}
    shapes |= {"layers.0.mlp.down_proj.weight": (HIDDEN, INNER)}
    return {name.replace(".0.", f".{layer}."): shape for name, shape in shapes.items()}


def doubled(tensors: Tensors) -> Tensors:
    """Return the tensors with floats in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def eagle3_tensors(draft_vocabulary: list[int] | None = None, features: int = 3) -> Tensors:
    rows = VOCAB if draft_vocabulary is None else len(draft_vocabulary)
    shapes = layer_shapes(2 * HIDDEN) | {"layers.0.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    shapes |= {"fc.weight": (HIDDEN, features * HIDDEN), "lm_head.weight": (rows, HIDDEN)}
    tensors = random_tensors(shapes)
    return tensors if draft_vocabulary is None else tensors | vocabulary_maps(draft_vocabulary)


def dflash_tensors(depth: int = 1) -> Tensors:
    """Return layers that read features of two of the target's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(depth):
        norms = {f"layers.{layer}.self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}
        shapes |= layer_shapes(layer=layer) | norms
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    return random_tensors(shapes)


def dflash2_tensors(taps: int = 3, group: int = 8, rank: int = 5) -> Tensors:
    """Return the tensors that DFlash 2 has besides those of DFlash."""
    shapes: dict[str, tuple[int, ...]] = {}
    for conv in ("attention_conv", "mlp_conv"):
        shapes[f"layers.0.{conv}.base_kernel"] = (2, taps, HIDDEN)
        shapes[f"layers.0.{conv}.kernel_projection.weight"] = (2 * taps * HIDDEN // group, HIDDEN)
    shapes |= {f"candidate_selector.{side}_codebook": (VOCAB, rank) for side in ("predecessor", "successor")}
    return random_tensors(shapes | {"candidate_selector.hidden_projection.weight": (rank, HIDDEN)}, 9)


LILICORR = {"candidate_topk": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 6}
LILICORR |= {"vector_eps": 1e-4, "logit_scale": 7.0}


NUMBERED = {"feature_norm": "feature_mlp.0", "feature_mlp.up_proj": "feature_mlp.1"}
NUMBERED |= {"feature_mlp.down_proj": "feature_mlp.3", ".mlp.up_proj": ".mlp.0", ".mlp.down_proj": ".mlp.2"}
"""Names in LiLiCorr's head, and those of its first exports (the table of SGLang 0.5.23)."""


def numbered(name: str) -> str:
    """Return the name of a tensor in the first exports of LiLiCorr."""
    for part, other in NUMBERED.items() if name.startswith("lilicorr.") else ():
        name = name.replace(part, other)
    return name


def lilicorr_tensors(block: int = 4, hidden_size: int = 16) -> Tensors:
    """Return the head of LiLiCorr, for a block of this size."""
    H, inner, (F, heads, k) = hidden_size, int(1.5 * hidden_size), (6, 2, 4)
    linears = {"token_proj": (H, HIDDEN), "pass_hidden_proj": (H, HIDDEN), "context_proj": (H, HIDDEN)}
    linears |= {"feature_mlp.up_proj": (H, 5), "feature_mlp.down_proj": (H, H), "factor_input_proj": (H, 3 * H)}
    linears |= {"out_head": (F, H), "in_head": (F, H), "anchor_out_head": (F, H)}
    for i in range(2):
        linears |= {
            f"layers.{i}.mlp.up_proj": (inner, H),
            f"layers.{i}.mlp.down_proj": (H, inner),
            f"layers.{i}.attn.out_proj": (H, H),
        }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _) in linears.items()}
    for i in range(2):
        shapes |= {f"layers.{i}.attn.in_proj_weight": (3 * H, H), f"layers.{i}.attn.in_proj_bias": (3 * H,)}
        shapes |= {f"layers.{i}.{part}_norm.weight": (H,) for part in ("attn", "mlp")}
    shapes |= {"output_norm.weight": (H,), "anchor_norm.weight": (H,), "slot_embedding": (1, 1, block - 1, 1, H)}
    shapes |= {"feature_norm.weight": (5,), "feature_norm.bias": (5,), "rank_embedding": (1, 1, 1, k, H)}
    shapes |= {"relative_slot_bias": (heads, 2 * block - 1), "same_slot_bias": (heads,)}
    return random_tensors({f"lilicorr.{name}": shape for name, shape in shapes.items()}, 11)


def vocabulary_maps(draft_vocabulary: list[int]) -> Tensors:
    """Return the offset of each row, and the mask of the tokens that have one."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[draft_vocabulary] = True
    return {"d2t": torch.tensor(draft_vocabulary) - torch.arange(len(draft_vocabulary)), "t2d": mask}


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
