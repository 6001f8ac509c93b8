"""Published block drafters give the logits that their layouts describe (fp64, 1e-12)."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.published_files import (
    CLOSE,
    DRAFTED,
    HEADS,
    HIDDEN,
    KEPT,
    LILICORR,
    PROMPT,
    VOCAB,
    block_states,
    close,
    dflash2_tensors,
    dflash_tensors,
    doubled,
    embedded,
    hidden_states,
    lilicorr_tensors,
    llama_config,
    numbered,
    random_tensors,
    rms,
    six_layers,
    speculators,
    vocabulary_maps,
    written,
)
from recording import decoded_confidences, decoded_logits
from transformers import LlamaForCausalLM

from draftsmith import load_drafter


@pytest.fixture
def target() -> LlamaForCausalLM:
    return six_layers().double()


DFLASH = product([True, False], [0, 5], [1, 0], [None, KEPT[::-1]], [None, True, False])
"""Confidences that see the token before; Markov ranks; from the mask or the anchor; draft vocabularies; windows."""


@pytest.mark.parametrize(
    ("sees", "rank", "first", "kept", "causal"),
    [pytest.param(*case, marks=pytest.mark.slow if n % 5 else ()) for n, case in enumerate(DFLASH)],
)
def test_dflash(
    sees: bool,
    rank: int,
    first: int,
    kept: list[int] | None,
    causal: bool | None,
    tmp_path: Path,
    target: LlamaForCausalLM,
) -> None:
    """Keys and values of projected features, a bidirectional block of the anchor and masks.

    The lm_head is the target's or, for a draft vocabulary, the drafter's own.
    """
    w, after = dflash_tensors(), [*DRAFTED, 9]
    config = speculators("dspark" if rank else "dflash", block_size=4, mask_token_id=17, markov_rank=rank)
    config |= {"aux_hidden_state_layer_ids": [2, 4], "enable_confidence_head": bool(rank)}
    if first == 0 or rank:  # otherwise the default, false for DFlash
        config["sample_from_anchor"] = first == 0
    n, seen = len(PROMPT), torch.ones(4, len(PROMPT) + 4, dtype=torch.bool)
    if causal is not None:  # the last three features, and causal attention in the block by default
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 3}
        config["sliding_window_non_causal"] = not causal
        seen[:, : n - 3] = False
        seen[:, n:] = torch.ones(4, 4, dtype=torch.bool).tril() if causal else True
    outputs = VOCAB if kept is None else len(kept)
    if kept is not None:
        config["draft_vocab_size"] = outputs
        w |= random_tensors({"lm_head.weight": (outputs, HIDDEN)}, 5) | vocabulary_maps(kept)
    if rank:
        w |= random_tensors(
            {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (outputs, rank)}, 3
        )
        w |= random_tensors(
            {"confidence_head.proj.weight": (1, HIDDEN + rank * sees), "confidence_head.proj.bias": (1,)}, 4
        )
    drafter, w = load_drafter(written(tmp_path / "d", config, w), target), doubled(w)
    block = embedded(target, [DRAFTED[0], 17, 17, 17])
    states = block_states(w, hidden_states(target, [2, 4]), block, [seen])[first:]
    logits = states @ w.get("lm_head.weight", target.lm_head.weight).T
    if rank:
        before = w["markov_head.markov_w1.weight"][torch.tensor(after[: 4 - first])]
        logits = logits + before @ w["markov_head.markov_w2.weight"].T
        read = torch.cat([states, before], -1) if sees else states
        sure = read @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    reference = logits
    if kept is not None:
        reference = logits.new_full((len(logits), VOCAB), -torch.inf)
        reference[:, kept] = logits
    with torch.no_grad():
        assert close(decoded_logits(drafter, target, PROMPT, after[: 5 - first]), reference)
        confidences = decoded_confidences(drafter, after[1 : 4 - first])
    assert not confidences if not rank else torch.allclose(torch.stack(confidences), sure[1:].sigmoid(), atol=CLOSE)


@pytest.mark.parametrize("layout", ["DFlash2DraftModel", "Qwen3DFlash2DraftModel", "speculators"])
def test_dflash2(layout: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Convolutions within the block, and a walk over the candidates of each position by the token before it."""
    w = dflash_tensors() | dflash2_tensors()
    keys = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6, "mask_token_id": 17}
    if layout != "speculators":  # z-lab's and NeMo Automodel's class
        config = llama_config(model_type="qwen3", num_target_layers=6, layer_types=["full_attention"], is_causal=False)
        config["dflash_config"] = {**keys, "block_size": 4, "target_layer_ids": [1, 3]}
        config["architectures"] = [layout]
    else:
        config = speculators("dflash2", **keys, block_size=4, aux_hidden_state_layer_ids=[2, 4])
    drafter, w = load_drafter(written(tmp_path / "d", config, w), target), doubled(w)
    seen = torch.ones(4, len(PROMPT) + 4, dtype=torch.bool)
    states = block_states(w, hidden_states(target, [2, 4]), embedded(target, [DRAFTED[0], 17, 17, 17]), [seen])[1:]
    expected = torch.full((3, VOCAB), -torch.inf, dtype=torch.float64)
    for k, (state, before) in enumerate(zip(states, DRAFTED[:3], strict=True)):
        unary = target.lm_head.weight @ state
        context = w["candidate_selector.predecessor_codebook"][before]
        context = context * (w["candidate_selector.hidden_projection.weight"] @ state)
        for token in unary.argsort(descending=True)[:6]:
            expected[k, token] = unary[token] + w["candidate_selector.successor_codebook"][token] @ context
    with torch.no_grad():
        assert close(decoded_logits(drafter, target, PROMPT, DRAFTED), expected)


@pytest.mark.parametrize(("width", "older"), [(16, False), (0, True)], ids=["narrow", "as wide, numbered names"])
def test_lilicorr(width: int, older: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """A transformer over all candidates of the block; the scores of a token after another are a scaled cosine."""
    size = width or HIDDEN
    config = llama_config(model_type="qwen3", num_target_layers=6, architectures=["LiLiCorrDraftModel"], block_size=4)
    config["dflash_config"] = {f"lilicorr_{key}": value for key, value in LILICORR.items()}
    config["dflash_config"] |= {"lilicorr_hidden_size": width, "target_layer_ids": [1, 3], "mask_token_id": 17}
    w = dflash_tensors() | lilicorr_tensors(hidden_size=size)
    if not width:
        w = {name: value for name, value in w.items() if "token_proj" not in name}
    stored = {numbered(name): value for name, value in w.items()} if older else w
    drafter, w = load_drafter(written(tmp_path / "d", config, stored), target).double(), doubled(w)
    drafter.attach(target)
    context, block = hidden_states(target, [2, 4]), embedded(target, [DRAFTED[0], 17, 17, 17])
    states = block_states(w, context, block, [torch.ones(4, len(PROMPT) + 4, dtype=torch.bool)])[1:]
    log_probs = (states @ target.lm_head.weight.T).log_softmax(-1)
    best, tokens = log_probs.topk(4)

    def projected(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"lilicorr.{name}.weight"].T + w[f"lilicorr.{name}.bias"]

    def unit(name: str, x: torch.Tensor) -> torch.Tensor:
        return (out := projected(name, x)) / out.norm(dim=-1, keepdim=True)

    rank = (torch.arange(4) / 3).expand(3, 4).double()
    numbers = torch.stack([best, best.exp(), best - best[:, :1], rank, (rank == 0).double()], -1)
    numbers = (numbers - numbers.mean(-1, keepdim=True)) / (numbers.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    numbers = numbers * w["lilicorr.feature_norm.weight"] + w["lilicorr.feature_norm.bias"]
    embeds = target.get_input_embeddings().weight[tokens]
    x = projected("token_proj", embeds) if width else embeds
    x = x + projected("pass_hidden_proj", states)[:, None]
    x = x + projected("feature_mlp.down_proj", torch.nn.functional.silu(projected("feature_mlp.up_proj", numbers)))
    x = (x + w["lilicorr.slot_embedding"][0, 0] + w["lilicorr.rank_embedding"][0, 0]).reshape(12, size)
    for i in range(2):
        name = f"lilicorr.layers.{i}.attn"
        qkv = rms(x, w[f"lilicorr.layers.{i}.attn_norm.weight"]) @ w[f"{name}.in_proj_weight"].T
        q, k, v = (qkv + w[f"{name}.in_proj_bias"]).chunk(3, -1)
        heads = []
        for head in range(2):
            part = slice(head * size // 2, (head + 1) * size // 2)
            scores = q[:, part] @ k[:, part].T / (size // 2) ** 0.5
            for a in range(12):
                for b in range(12):
                    scores[a, b] += w["lilicorr.relative_slot_bias"][head, a // 4 - b // 4 + 3]
                    scores[a, b] += w["lilicorr.same_slot_bias"][head] if a // 4 == b // 4 else 0
            heads.append(scores.softmax(-1) @ v[:, part])
        x = x + projected(f"layers.{i}.attn.out_proj", torch.cat(heads, -1))
        read = projected(f"layers.{i}.mlp.up_proj", rms(x, w[f"lilicorr.layers.{i}.mlp_norm.weight"]))
        x = x + projected(f"layers.{i}.mlp.down_proj", torch.nn.functional.silu(read))
    x = rms(x, w["lilicorr.output_norm.weight"])
    last = rms(context[-1] @ w["fc.weight"].T, w["hidden_norm.weight"])
    last = rms(projected("context_proj", last), w["lilicorr.anchor_norm.weight"])
    x = torch.nn.functional.silu(projected("factor_input_proj", torch.cat([x, last.expand(12, -1), x * last], -1)))
    out, into = unit("out_head", x).view(3, 4, -1), unit("in_head", x).view(3, 4, -1)
    path = [DRAFTED[0], int(tokens[0, 2]), int(tokens[1, 1]), 9]
    rows = [unit("anchor_out_head", last), out[0, 2], out[1, 1]]
    expected = torch.full((3, VOCAB), -torch.inf, dtype=torch.float64)
    for t in range(3):
        expected[t, tokens[t]] = 7.0 * into[t] @ rows[t]
    with torch.no_grad():
        assert close(decoded_logits(drafter, target, PROMPT, path), expected)


WIDE, SWA, SINKS = {"use_sliding_window": True, "sliding_window": 5}, {"use_swa": True, "swa_window_size": 5}, {"sinks"}
AUTOMODEL = {"architectures": ["Qwen3DFlashDraftModel"], "is_causal": False}
MIXED = {**WIDE, "layer_types": ["sliding_attention", "full_attention"]}
ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any], set[str], tuple[bool, bool], tuple[bool, bool]]] = {
    # The keys beside and in `dflash_config`; the tensors; for both layers whether they have a window, and are causal.
    "z-lab": ({}, {}, set(), (False, False), (False, False)),
    "DeepSpec": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 5, "markov_head_type": "vanilla", "num_anchors": 512},
        {},
        {"markov_head.markov_", "embed_tokens", "lm_head"},
        (False, False),
        (False, False),
    ),
    "windows are causal": (MIXED, {}, set(), (True, False), (True, False)),
    "two-sided": (MIXED | {"is_causal": False}, {"causal": True}, set(), (True, False), (False, False)),
    "all layers causal": (MIXED | {"is_causal": True}, {}, set(), (True, False), (True, True)),
    "NVIDIA": ({"sliding_window": 5}, SWA | {"causal": False}, set(), (True, True), (False, False)),
    "NVIDIA, full and causal": ({}, {"causal": True, "attention_sink_bias": True}, SINKS, (False, False), (True, True)),
    "NVIDIA, flat DSpark": (
        {"sliding_window": 5, "attention_sink_bias": True},
        {**SWA, "causal": True, "projector_type": "dspark", "shift_label": True, "markov_rank": 5}
        | {"markov_head_type": "vanilla", "use_confidence_head": True, "attention_sink_bias": True},
        {*SINKS, "markov_", "confidence_"},
        (True, True),
        (True, True),
    ),
    "Automodel's, two-sided": (
        AUTOMODEL | WIDE | {"layer_types": ["sliding_attention"] * 2},
        {"block_size": 4},
        set(),
        (True, True),
        (False, False),
    ),
    "Automodel's JetSpec": (AUTOMODEL, {"causal": True}, set(), (False, False), (True, True)),
    "Nemotron's DSpark": (
        {"architectures": ["Qwen3DSparkModel"], "layer_types": ["sliding_attention"] * 2, "markov_rank": 5}
        | {"dspark_bonus_anchor": True, "dflash_query_causal": True, "attention_sink_bias": True},
        {**SWA, "causal": True, "sample_from_anchor": False, "attention_sink_bias": True},
        {*SINKS, "markov_head.markov_"},
        (True, True),
        (True, True),
    ),
}


@pytest.mark.parametrize(
    ("name", "size"), [(name, 4) for name in ATTENTION] + [(name, 7) for name in [*ATTENTION][2:5]]
)
def test_windows_causality_and_sinks_of_flat_layouts(
    name: str, size: int, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    """Windows count from each position, its own included, in a block that is shorter or longer than they are (NVIDIA
    refuses the latter)."""
    beside, named, parts, sliding, causal = ATTENTION[name]
    w, depth, n = dflash_tensors(2), 2, len(PROMPT)
    config = llama_config(model_type="qwen3", num_hidden_layers=2, block_size=size, num_target_layers=6)
    config |= {"layer_types": ["full_attention"] * 2, "architectures": ["DFlashDraftModel"], **beside}
    config["dflash_config"] = {"target_layer_ids": [1, 3], "mask_token_id": 17} | named
    if "sinks" in parts:
        w |= random_tensors({f"layers.{layer}.self_attn.attention_sink_bias": (HEADS,) for layer in range(2)}, 6)
    markov = next((part for part in parts if "markov_" in part), None)
    if markov is not None:
        w |= random_tensors({f"{markov}w{i}.weight": (VOCAB, 5) for i in (1, 2)}, 3)
    if "lm_head" in parts:
        w |= {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}
    if "confidence_" in parts:
        w |= random_tensors({"confidence_proj.weight": (1, HIDDEN + 5), "confidence_proj.bias": (1,)}, 4)
    drafter, w = load_drafter(written(tmp_path / "d", config, w), target), doubled(w)
    assert drafter.body.lm_head is None, "one that is stored is the target's"
    places, queries = torch.arange(n + size), torch.arange(n, n + size)[:, None]
    seen = []
    for layer in range(depth):
        visible = torch.ones(size, n + size, dtype=torch.bool)
        if sliding[layer]:
            visible &= (queries - places).abs() < 5
        seen.append(visible & (places <= queries) if causal[layer] else visible)
    block = embedded(target, [DRAFTED[0]] + [17] * (size - 1))
    first = 0 if name in ("DeepSpec", "NVIDIA, flat DSpark") else 1
    states = block_states(w, hidden_states(target, [2, 4]), block, seen)[first:]
    after = [*DRAFTED, 9, 2, 7, 1][: size - first + 1]
    logits = states @ target.lm_head.weight.T
    if markov is not None:
        before = w[f"{markov}w1.weight"][torch.tensor(after[:-1])]
        logits = logits + before @ w[f"{markov}w2.weight"].T
    assert close(decoded_logits(drafter, target, PROMPT, after), logits)
    if "confidence_" in parts:
        sure = torch.cat([states, before], -1) @ w["confidence_proj.weight"][0] + w["confidence_proj.bias"]
        assert close(torch.stack(decoded_confidences(drafter, after[1:-1])), sure[1:].sigmoid())


def test_an_lm_head_that_is_not_the_targets_is_kept(tmp_path: Path, target: LlamaForCausalLM) -> None:
    config = speculators("dflash", block_size=4, mask_token_id=17, aux_hidden_state_layer_ids=[2, 4])
    own = random_tensors({"lm_head.weight": (VOCAB, HIDDEN)}, 5)
    drafter = load_drafter(written(tmp_path / "d", config, dflash_tensors() | own), target)
    assert torch.equal(drafter.body.lm_head.weight, own["lm_head.weight"])
    assert drafter.draft_vocabulary is None
    assert decoded_logits(drafter, target, PROMPT, DRAFTED).isfinite().all()


@pytest.mark.parametrize("kind", ["gated", "rnn"])
@pytest.mark.parametrize("first", [0, 1], ids=["from the anchor", "from the mask"])
def test_gated_and_recurrent_markov_heads(first: int, kind: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """The bias of DeepSpec's source on the base logits and the states of the block, in float64."""
    config = speculators("dspark", block_size=4, mask_token_id=17, sample_from_anchor=first == 0)
    config |= {"aux_hidden_state_layer_ids": [2, 4], "enable_confidence_head": False}
    w, rank, after, wide = dflash_tensors(), 5, [*DRAFTED, 9], six_layers().double()
    shapes = {f"markov_head.markov_w{i}.weight": (VOCAB, rank) for i in (1, 2)}
    name, rows, columns = ("gate_proj", 5, HIDDEN + 5) if kind == "gated" else ("joint_proj", 15, HIDDEN + 10)
    shapes |= {f"markov_head.{name}.weight": (rows, columns), f"markov_head.{name}.bias": (rows,)}
    head = random_tensors(shapes, 3)
    drafters = []
    for part, changes in (({}, {"markov_rank": 0}), (head, {"markov_rank": rank, "markov_head_type": kind})):
        drafter = load_drafter(written(tmp_path / str(len(part)), config | changes, w | part), target).double()
        drafter.attach(wide)
        drafters.append((drafter, decoded_logits(drafter, wide, PROMPT, after[: 5 - first])))
    (plain, base), (_, biased) = drafters
    head = {key.removeprefix("markov_head."): value.double() for key, value in head.items()}
    carried, expected = torch.zeros(rank).double(), []
    for k, h in enumerate(plain._states_BKH[0]):
        e = head["markov_w1.weight"][after[k]]
        if kind == "gated":
            latent = (head["gate_proj.weight"] @ torch.cat([h, e]) + head["gate_proj.bias"]).sigmoid() * e
        else:
            joint = head["joint_proj.weight"] @ torch.cat([carried, e, h]) + head["joint_proj.bias"]
            kept, new, latent = joint[:5].sigmoid(), joint[5:10].tanh(), joint[10:].tanh()
            carried = kept * carried + (1 - kept) * new
        expected.append(base[k] + head["markov_w2.weight"] @ latent)
    assert (biased - torch.stack(expected)).abs().max() < 1e-12
