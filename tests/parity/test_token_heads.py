"""Hydra heads and IBM's MLP speculators: the logits that their code describes, and what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from parity.published_files import (
    DRAFTED,
    EPS,
    HIDDEN,
    PROMPT,
    VOCAB,
    Tensors,
    causal_attention,
    embedded,
    hidden_states,
    layer_shapes,
    mlp,
    random_tensors,
    rms,
    six_layers,
    written,
)
from parity.test_round_trips import ours
from recording import decoded_logits
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith import ConfigError, load_drafter

Folder = tuple[dict[str, Any], Tensors]
LAYERS, HEADS, INNER = 3, 3, 20
PREFIX = "prefix_embeding_layer."


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return six_layers()


def hydra(prefix: bool, layers: int = LAYERS) -> Folder:
    """Blocks that the repository's code makes of one module are stored once for each use; a dropout takes an index.

    The target's embeddings are an attribute of its class, and so in the file.
    """
    shapes, first, step = {}, int(prefix), 2 if prefix else 1
    for k in range(HEADS):
        size = (k + 2) * HIDDEN
        for part in ("linear", "res_connection"):
            shapes |= {f"hydra_mlp.{k}.{first}.{part}.weight": (HIDDEN, size)}
            shapes |= {f"hydra_mlp.{k}.{first}.{part}.bias": (HIDDEN,)}
        if layers > 1:
            block = f"hydra_mlp.{k}.{first + step}.linear"
            shapes |= {f"{block}.weight": (HIDDEN, HIDDEN), f"{block}.bias": (HIDDEN,)}
        head = f"hydra_lm_head.{k}.1" if prefix else f"hydra_lm_head.{k}"
        shapes |= {f"{head}.weight": (VOCAB, HIDDEN), f"{head}.bias": (VOCAB,)}
    if prefix:
        shapes |= {f"{PREFIX}{name}": shape for name, shape in layer_shapes().items()}
        shapes |= {f"{PREFIX}norm.weight": (HIDDEN,)}
    tensors = random_tensors(shapes)
    for k in range(HEADS):
        for place in range(2, layers):
            for part in ("weight", "bias"):
                block = tensors[f"hydra_mlp.{k}.{first + step}.linear.{part}"]
                tensors[f"hydra_mlp.{k}.{first + step * place}.linear.{part}"] = block.clone()
    tensors["input_embed_fn.weight"] = six_layers().get_input_embeddings().weight.clone()
    config = {"hydra_num_heads": HEADS, "hydra_num_layers": layers, "grounded_heads": True, "hidden_state_offset": 0}
    return config | {"hydra_head_arch": "prefix-mlp" if prefix else "mlp"}, tensors


def hydra_logits(w: Tensors, target: LlamaForCausalLM, prefix: bool, layers: int = LAYERS) -> Tensor:
    states, first, step = hidden_states(target, [-1]), int(prefix), 2 if prefix else 1
    if prefix:
        inside = {name.removeprefix(PREFIX): value for name, value in w.items() if name.startswith(PREFIX)}
        x = states + causal_attention(inside, rms(states, inside["layers.0.input_layernorm.weight"]))
        x = x + mlp(inside, rms(x, inside["layers.0.post_attention_layernorm.weight"]))
        states = rms(x, inside["norm.weight"])
    rows, silu = [], torch.nn.functional.silu
    for k in range(HEADS):

        def linear(name: str, x: Tensor) -> Tensor:
            return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

        x = torch.cat([states[-1], *embedded(target, DRAFTED[: k + 1])])
        h = linear(f"hydra_mlp.{k}.{first}.res_connection", x) + silu(linear(f"hydra_mlp.{k}.{first}.linear", x))
        for place in range(1, layers):
            h = h + silu(linear(f"hydra_mlp.{k}.{first + step * place}.linear", h))
        rows.append(linear(f"hydra_lm_head.{k}.1" if prefix else f"hydra_lm_head.{k}", h))
    return torch.stack(rows)


def speculator(tied: bool, scaled: bool, inner: int = INNER) -> Folder:
    """Tied weights are stored for every step; the projection of the target's state is another one."""
    shapes = {f"speculator.{name}.{k}.weight": (VOCAB, inner) for name in ("emb", "head") for k in range(HEADS)}
    shapes |= {f"speculator.ln.{k}.{part}": (inner,) for k in range(HEADS) for part in ("weight", "bias")}
    shapes |= {f"speculator.proj.{k}.weight": (inner, inner if k else HIDDEN) for k in range(HEADS)}
    tensors = random_tensors(shapes)
    for name in list(tensors) if tied else ():
        first = 1 if ".proj." in name and ".0." not in name else 0
        tensors[name] = tensors[re.sub(r"\.\d\.", f".{first}.", name)].clone()
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN}
    config |= {"inner_dim": inner, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scaled, "n_predict": HEADS}
    return config | {"top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5}, tensors


def speculator_logits(w: Tensors, target: LlamaForCausalLM, tied: bool, scaled: bool) -> Tensor:
    w = {name.removeprefix("speculator."): value for name, value in w.items()}
    state, inner, rows = hidden_states(target, [-1])[-1], w["emb.0.weight"].shape[1], []
    weight = 0.5 ** (0.5 / HEADS)
    ratio = math.sqrt((1 - weight**2) * (inner / 2)) / weight
    if scaled:
        state = rms(state, torch.ones(1)) / 2**0.5
    for k in range(HEADS):
        at = 0 if tied else k
        state = w[f"proj.{min(k, 1) if tied else k}.weight"] @ state + ratio * w[f"emb.{at}.weight"][DRAFTED[k]]
        state = rms(state, w[f"ln.{at}.weight"]) + w[f"ln.{at}.bias"]
        state = state * 0.5 * (1 + torch.erf(state / 2**0.5))
        rows.append(w[f"head.{at}.weight"] @ state)
    return torch.stack(rows)


def differs(folder: Folder, target: LlamaForCausalLM, reference: Any, tmp_path: Path) -> float:
    """Return the largest difference between the logits of decoding and the reference, in float64."""
    assert EPS == 1e-6  # of the speculators' norms too
    wide = six_layers().double()
    drafter = load_drafter(written(tmp_path / "theirs", *folder), target).double()
    drafter.attach(wide)
    weights = {name: value.double() for name, value in folder[1].items()}
    return float((decoded_logits(drafter, wide, PROMPT, DRAFTED)[:HEADS] - reference(weights, wide)).abs().max())


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("prefix", [False, True], ids=["heads", "Hydra++"])
def test_hydra(prefix: bool, layers: int, tmp_path: Path, target: LlamaForCausalLM) -> None:
    folder = hydra(prefix, layers)
    assert differs(folder, target, lambda w, of: hydra_logits(w, of, prefix, layers), tmp_path) < 1e-12


@pytest.mark.parametrize("scaled", [False, True], ids=["raw", "scaled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("inner", [INNER, HIDDEN])
def test_mlp_speculator(tied: bool, scaled: bool, inner: int, tmp_path: Path, target: LlamaForCausalLM) -> None:
    folder = speculator(tied, scaled, inner)
    assert differs(folder, target, lambda w, of: speculator_logits(w, of, tied, scaled), tmp_path) < 1e-12


def test_copies_of_shared_weights_and_unused_embeddings_are_skipped(tmp_path: Path, target: LlamaForCausalLM) -> None:
    config, tensors = speculator(True, True)
    once = {name: value for name, value in tensors.items() if ".0." in name or ".proj.1." in name}
    one = ours((config, once), target, tmp_path / "once").state_dict()
    other = ours((config, tensors), target, tmp_path / "copied").state_dict()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    config, tensors = hydra(True)
    unused = {f"{PREFIX}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    del tensors["input_embed_fn.weight"]
    ours((config, tensors | unused), target, tmp_path / "hydra")


HYDRA, SPECULATOR = hydra(False), speculator(True, False)
REFUSED: list[tuple[Folder, dict[str, Any], Tensors, str]] = [
    (HYDRA, {"grounded_heads": False}, {}, "grounded_heads=False in config.json; expected True"),
    (HYDRA, {"hidden_state_offset": 1}, {}, "hidden_state_offset=1 in config.json; expected 0"),
    (HYDRA, {"hydra_head_arch": "eagle-attn"}, {}, "hydra_head_arch='eagle-attn' .*; expected one of mlp, prefix-mlp"),
    (HYDRA, {"hydra_num_heads": 0}, {}, "hydra_num_heads=0 in config.json; expected an integer, 1 or more"),
    (HYDRA, {"hydra_num_heads": 2}, {}, "unexpected tensor hydra_lm_head.2.bias"),
    (HYDRA, {"hydra_num_layers": 1000}, {}, "hydra_num_layers=1000 in config.json; expected an integer, 1 to 31"),
    (
        HYDRA,
        {},
        {"hydra_mlp.0.2.linear.bias": torch.ones(HIDDEN)},
        "hydra_mlp.0.2.linear.bias differs from hydra_mlp.0.1.linear.bias; expected one tensor",
    ),
    (
        HYDRA,
        {},
        {"input_embed_fn.weight": torch.zeros(VOCAB, HIDDEN)},
        r"input_embed_fn.weight \[64, 32\] is not the target's .*; expected the same: drafters .* with embeddings of",
    ),
    (SPECULATOR, {"emb_dim": 16}, {}, "emb_dim=16 in config.json; expected 32"),
    (SPECULATOR, {"vocab_size": 65}, {}, "vocab_size=65 in config.json; expected 64"),
    (SPECULATOR, {"tie_weights": 1.5}, {}, "tie_weights=1.5 in config.json; expected one of False, True"),
    (SPECULATOR, {"n_predict": 1}, {}, "n_predict=1 in config.json; expected an integer, 2 to 1024"),
    (SPECULATOR, {"inner_dim": 21}, {}, r"tensor emb.0.weight is float \[64, 20\]; expected float \[64, 21\]"),
    (
        SPECULATOR,
        {},
        {"speculator.emb.1.weight": torch.ones(VOCAB, INNER)},
        "tensor emb.1.weight differs from emb.0.weight; expected one tensor",
    ),
]


@pytest.mark.parametrize(("folder", "changes", "others", "message"), REFUSED, ids=[case[3][:40] for case in REFUSED])
def test_what_does_not_fit_is_refused(
    folder: Folder, changes: dict[str, Any], others: Tensors, message: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    config, tensors = folder
    with pytest.raises(ConfigError, match=message):
        load_drafter(written(tmp_path / "d", config | changes, tensors | others), target)


def test_a_targets_own_sizes_are_not_those_of_the_config_class(tmp_path: Path) -> None:
    """A key that is missing from config.json has the value of IBM's class, here emb_dim=4096."""
    config, tensors = speculator(True, False)
    del config["emb_dim"]
    with pytest.raises(ConfigError, match=r"emb_dim=4096 in config\.json; expected 32"):
        load_drafter(written(tmp_path / "d", config, tensors), make_llama())
