"""MTP modules in the files of targets: logits of the plain formula and of transformers' MtpModel; bit-equal files."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import spread
from parity.published_files import (
    DRAFTED,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PROMPT,
    VOCAB,
    random_tensors,
    speculators,
    written,
)
from recording import Planned, decoded_logits, planned_rounds
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from draftsmith import ConfigError, load_drafter
from draftsmith.distill.layerless import load_without_layers
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.layers import layer_config
from draftsmith.heads.mtp import Mtp
from draftsmith.hub.export import export_drafter, import_from
from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.recipe import parse_recipe

HEAD, DEPTH = 16, 4
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": DEPTH}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "initializer_range": 0.2}
SIZES |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
FULL = {"layer_types": ["full_attention"] * DEPTH, "rope_parameters": HALF | {"mrope_section": [2, 1, 1]}}
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "first_k_dense_replace": DEPTH}

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMo": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "DeepSeek's names": ("qwen3", {}),
    "GLM-4.5": ("glm4_moe", {"rope_parameters": HALF, "use_qk_norm": True, "attention_bias": True, **ROUTED}),
    "Qwen3.5": ("qwen3_5_text", FULL),
}
ROOTS = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
PREFIXES = {"MiMo": "model.mtp_layers.0.", "Qwen3.5": "mtp."}
THEIRS = {"MiMo": ROOTS, "Qwen3.5": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")}


def make_target(
    name: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny target whose files contain a module, and the module's tensors by the names of a list of layers."""
    kind, changes = TARGETS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes)).to(dtype)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.weight.data += 0.1 * torch.randn_like(module.weight)
    model.save_pretrained(folder)
    inner, outer, gated = HEADS * HEAD, KV_HEADS * HEAD, 2 if name == "Qwen3.5" else 1
    shapes: dict[str, tuple[int, ...]] = {f"{root}.weight": (HIDDEN,) for root in ROOTS[:3]}
    shapes |= {"input_proj.weight": (HIDDEN, 2 * HIDDEN), "layers.0.self_attn.o_proj.weight": (HIDDEN, inner)}
    shapes |= {"layers.0.self_attn.q_proj.weight": (gated * inner, HIDDEN)}
    shapes |= {f"layers.0.self_attn.{part}_proj.weight": (outer, HIDDEN) for part in "kv"}
    shapes |= {f"layers.0.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
    shapes |= {"layers.0.mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= {f"layers.0.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    if name != "MiMo":
        shapes |= {f"layers.0.self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}
    if name in ("MiMo", "GLM-4.5"):
        sizes = zip("qkv", (inner, outer, outer), strict=True)
        shapes |= {f"layers.0.self_attn.{part}_proj.bias": (size,) for part, size in sizes}
    module = {part: value.to(dtype) for part, value in random_tensors(shapes, 3).items()}
    write(folder, {theirs(name, part): value for part, value in module.items()})
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False), module


def theirs(name: str, part: str) -> str:
    """The target's name of a tensor of the module."""
    prefix = PREFIXES.get(name, f"model.layers.{DEPTH}.")
    if part.startswith("layers.0."):
        return prefix + (part if name == "Qwen3.5" else part.removeprefix("layers.0."))
    root, _, suffix = part.rpartition(".")
    own = THEIRS.get(name, ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
    return f"{prefix}{dict(zip(ROOTS, own, strict=True))[root]}.{suffix}"


def write(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Add tensors to the folder's file, or take them out."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt", "kept": "too"})


def attended(q_hTd: Tensor, k_hTd: Tensor, v_gTd: Tensor) -> Tensor:
    """Causal attention, [T, heads * d]."""
    later_TT = torch.ones(q_hTd.shape[1], q_hTd.shape[1], dtype=torch.bool).triu(1)
    weights_hTT = (q_hTd @ k_hTd.transpose(1, 2) / HEAD**0.5).masked_fill(later_TT, -torch.inf).softmax(-1)
    return (weights_hTT @ v_gTd.repeat_interleave(HEADS // KV_HEADS, 0)).transpose(0, 1).flatten(1)


def reference(name: str, w: dict[str, Tensor], target: PreTrainedModel, tokens: list[int], states: Tensor) -> Tensor:
    """The module's output [T, H] by the plain formula; `tokens[t]` comes after the position of `states[t]`."""
    centred, part = name == "Qwen3.5", 0.5 if name in ("GLM-4.5", "Qwen3.5") else 1.0
    embeds, eps = target.get_input_embeddings().weight[torch.tensor(tokens)], target.config.rms_norm_eps

    def rms(x: Tensor, part: str) -> Tensor:
        weight = w[f"{part}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight if centred else weight)

    both = [rms(embeds, "token_layernorm"), rms(states, "hidden_layernorm")]
    x = torch.cat(both[::-1] if name == "MiMo" else both, -1) @ w["input_proj.weight"].T
    h = rms(x, "layers.0.input_layernorm")

    def heads(p: str) -> Tensor:
        y = h @ w[f"layers.0.self_attn.{p}_proj.weight"].T + w.get(f"layers.0.self_attn.{p}_proj.bias", torch.zeros(1))
        return y.unflatten(-1, (KV_HEADS if p in "kv" else HEADS, -1)).transpose(0, 1)

    q, k, v = (heads(p) for p in "qkv")
    q, gate = q[..., :HEAD], q[..., HEAD:]
    theta = target.config.rope_parameters["rope_theta"]
    turned = int(part * HEAD)
    # Angles in float32, as transformers has them whatever the dtype.
    rates = 1.0 / theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angles = (torch.arange(len(tokens)).float()[:, None] * rates).repeat(1, 2)

    def placed(y: Tensor, p: str) -> Tensor:
        if f"layers.0.self_attn.{p}_norm.weight" in w:
            y = rms(y, f"layers.0.self_attn.{p}_norm")
        first, rest = y[..., :turned], y[..., turned:]
        halves = torch.cat([-first[..., turned // 2 :], first[..., : turned // 2]], -1)
        return torch.cat([first * angles.cos().to(y) + halves * angles.sin().to(y), rest], -1)

    q, k = placed(q, "q"), placed(k, "k").repeat_interleave(HEADS // KV_HEADS, 0)
    out = attended(q, k, v)
    if gate.numel():
        out = out * gate.transpose(0, 1).flatten(1).sigmoid()
    x = x + out @ w["layers.0.self_attn.o_proj.weight"].T
    h = rms(x, "layers.0.post_attention_layernorm")
    up = torch.nn.functional.silu(h @ w["layers.0.mlp.gate_proj.weight"].T) * (h @ w["layers.0.mlp.up_proj.weight"].T)
    return rms(x + up @ w["layers.0.mlp.down_proj.weight"].T, "final_layernorm")


Formula = Callable[[dict[str, Tensor], PreTrainedModel, list[int], Tensor], Tensor]


def assert_formula(target: PreTrainedModel, module: dict[str, Tensor], formula: Formula, tolerance: float) -> None:
    """Decode in float64, several steps deep, with the target's states at first and the module's own after."""
    drafter = load_drafter("native-mtp", target).double()
    target, w = target.double(), {part: value.double() for part, value in module.items()}
    states = target(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0]
    tokens, logits = [*PROMPT[1:], DRAFTED[0]], []
    for token in DRAFTED[1:]:
        out = formula(w, target, tokens, states)
        logits.append(target.lm_head(out[-1]))
        tokens, states = [*tokens, token], torch.cat([states, out[-1:]])
    ours = decoded_logits(drafter, target, PROMPT, DRAFTED)
    assert (ours - torch.stack(logits)).abs().max() < tolerance * ours.abs().max()


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    target, module = make_target(name, tmp_path / "t")
    assert_formula(target, module, partial(reference, name), 1e-12)


def test_heads_that_do_not_divide_the_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's config refuses them; Qwen3.6-27B has 24 at width 5,120."""
    assert HIDDEN % 6
    monkeypatch.setitem(globals(), "HEADS", 6)
    monkeypatch.setitem(SIZES, "num_attention_heads", 6)
    test_logits_are_those_of_the_formula("Qwen3.5", tmp_path)
    target, _ = make_target("Qwen3.5", tmp_path / "u")
    drafter = load_drafter("native-mtp", target)
    save_drafter(drafter, tmp_path / "d", target=describe_target(target, None, "t"), recipe=None, draft_length=3)
    load_drafter(tmp_path / "d", target)
    own = layer_config(target, 1)  # of new drafters, which engines read with Llama's config
    assert own.num_attention_heads == 4
    LlamaConfig(**own.to_diff_dict())


def test_only_files_with_the_module_are_written(tmp_path: Path) -> None:
    target, module = make_target("MiMo", tmp_path / "t")
    own = {theirs("MiMo", part): value for part, value in module.items()}
    write(tmp_path / "t", dict.fromkeys(own))
    save_file(own, tmp_path / "t" / "mtp.safetensors")
    drafter = load_drafter("native-mtp", target)
    result = export_drafter(drafter, target, "native", tmp_path / "out", target_name="org/target")
    assert sorted(file.name for file in result.folder.iterdir()) == ["README.md", "mtp.safetensors"]
    assert '"method": "mtp", "draft_sample_method": "probabilistic", "num_speculative_tokens"' in result.usage
    assert "cp " in result.usage
    # With a draft vocabulary the module is the same.
    few = Mtp.from_target(target, init="native", draft_vocabulary=[3, 9, 20])
    listed = export_drafter(few, target, "native", tmp_path / "few", target_name="org/target")
    assert listed.tensors == result.tensors
    assert any("full lm_head" in note for note in listed.serving.notes)


@pytest.mark.parametrize("name", ["MiMo", "DeepSeek's names"])
def test_a_target_without_layers_has_its_own_module(name: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    target, _ = make_target(name, tmp_path / "t")
    tiny_tokenizer.save_pretrained(tmp_path / "t")
    bare = load_without_layers(str(tmp_path / "t"), modules=True).model
    expected, found = (Mtp.from_target(it, init="native").state_dict() for it in (target, bare))
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_import_saves_the_targets_own_module(tmp_path: Path, tiny_tokenizer: Any) -> None:
    target, module = make_target("DeepSeek's names", tmp_path / "t")
    tiny_tokenizer.save_pretrained(tmp_path / "t")
    assert import_from("native-mtp", str(tmp_path / "t"), tmp_path / "ours")[0].type == "mtp"
    again = load_drafter(tmp_path / "ours", target)
    assert torch.equal(again.body.layers[0].mlp.up_proj.weight, module["layers.0.mlp.up_proj.weight"])
    own = {"model.layers.4.embed_tokens.weight": target.get_input_embeddings().weight.clone()}
    own |= {"model.layers.4.shared_head.head.weight": target.lm_head.weight.clone()}
    write(tmp_path / "t", own)
    load_drafter("native-mtp", target)


# Modules whose layer is one of the target's own class: experts, latent attention.

MIXED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
DEEP = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEXT = {"num_experts": 4, "shared_expert_intermediate_size": 16, "rope_parameters": HALF, **LINEAR}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # DeepSeek's attention has another scale then
OWN_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": ("glm4_moe", {"rope_parameters": HALF, "use_qk_norm": True, "attention_bias": True, **MIXED, **DEEP}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**MIXED, **DEEP, **LATENT, "num_key_value_heads": HEADS, "head_dim": 8, "rope_parameters": YARN},
    ),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        {**MIXED, **DEEP, **LATENT, "num_key_value_heads": HEADS, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "Qwen3-Next": ("qwen3_next", {**MIXED, **NEXT, "layer_types": ["linear_attention", "full_attention"] * 2}),
}


def make_mixed(name: str, folder: Path, modules: int = 1) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny target with modules like its last layer, and the modules' tensors by their names in the files.

    Matrices of experts are stored one by one.
    """
    kind, changes = OWN_LAYERS[name]
    torch.manual_seed(1)
    several = {"num_nextn_predict_layers": modules} if modules > 1 else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes | several))
    for part, value in model.named_parameters():
        value.data += 0.1 * torch.randn_like(value) if value.ndim == 1 else 0.2 * torch.randn_like(value)
        assert part
    model.save_pretrained(folder)
    stored, last = load_file(folder / "model.safetensors"), f"model.layers.{DEPTH - 1}."
    layer = {part.removeprefix(last): value for part, value in stored.items() if part.startswith(last)}
    assert any("experts.3.up_proj" in part for part in layer)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(modules):
        prefix, inner = ("mtp.", "layers.0.") if name == "Qwen3-Next" else (f"model.layers.{DEPTH + number}.", "")
        shapes |= {prefix + inner + part: tuple(value.shape) for part, value in layer.items()}
        names = THEIRS["Qwen3.5"] if name == "Qwen3-Next" else ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        shapes |= {f"{prefix}{root}.weight": (HIDDEN,) for root in names if root not in ("fc", "eh_proj")}
        shapes |= {f"{prefix}{names[-1]}.weight": (HIDDEN, 2 * HIDDEN)}
    module = random_tensors(shapes, 3)
    write(folder, dict(module))
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")  # others take no float64
    return model.eval().requires_grad_(False), module


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers has another MtpModel")
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_transformers_loads_the_same_module(name: str, tmp_path: Path) -> None:
    """One step of the MtpModel that transformers itself reads from the target's files."""
    target, _ = make_mixed(name, tmp_path / "t")
    drafter = load_drafter("native-mtp", target)
    model = transformers_modules(target, 1)
    states = target(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1]
    ids, places = torch.tensor([[*PROMPT[1:], DRAFTED[0]]]), torch.arange(len(PROMPT))[None]
    with torch.no_grad():
        theirs_TV = target.lm_head(model.forward_layer(0, states, places, None, input_ids=ids))[0]
    ours = decoded_logits(drafter, target, PROMPT, DRAFTED)[0]
    assert (ours - theirs_TV[-1]).abs().max() < 1e-5 * ours.abs().max()


def transformers_modules(target: PreTrainedModel, modules: int) -> MtpModel:
    """The modules that transformers itself reads from the target's files."""
    target.config.num_mtp_layers, target.config.mtp_layer_types = modules, ["full_attention"] * modules
    target.config.mtp_mlp_layer_types = ["sparse"] * modules
    # The patterns of transformers have the number of layers of the published targets.
    target._keys_to_ignore_on_load_unexpected = [
        r"^mtp.*",
        *(rf"model\.layers\.{DEPTH + k}\..*" for k in range(modules)),
    ]
    return MtpModel.from_pretrained(target).eval()


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers has another MtpModel")
@torch.no_grad()
@pytest.mark.parametrize(("name", "siblings"), spread(["DeepSeek-V3", "GLM-4.5"], [False, True]))
def test_three_modules_draft_as_those_of_transformers(name: str, siblings: bool, tmp_path: Path) -> None:
    """In three rounds of three texts at once: module k drafts token k, after any number of accepted ones."""
    target, _ = make_mixed(name, tmp_path / "t", modules=3)
    drafter = load_drafter("native-mtp", target).double()
    model, target = transformers_modules(target, 3).double(), target.double()
    assert drafter.max_draft_length == 3
    prompts = [PROMPT[:2], PROMPT, PROMPT[1:5]]
    wholes = [
        target.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False, eos_token_id=None) for p in prompts
    ]
    plans = [[0, 2, 3], [3, 1, 0], [1, 0, 2]]
    policy = Planned([whole[0].tolist() for whole in wholes], plans, 3, siblings=siblings)
    recorded = planned_rounds(drafter, target, prompts, policy)
    assert {len(path) for _, path, _ in recorded} == {0, 1, 2}
    for committed, path, logits_V in recorded:
        states = target(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states[-1]
        for k in range(len(path) + 1):
            ids, places = [*committed, *path][k + 1 :][: len(committed) - 1], torch.arange(k + 1, k + len(committed))
            states = model.forward_layer(k, states, places[None], None, input_ids=torch.tensor([ids]))
        theirs_V = target.lm_head(states[0, -1])
        assert (logits_V - theirs_V).abs().max() < 1e-6 * theirs_V.abs().max()  # rotations are in float32


@pytest.mark.parametrize(("name", "modules"), [*((name, 1) for name in OWN_LAYERS), ("DeepSeek-V3", 3)])
def test_layers_of_the_targets_own_class_train_as_they_decode(name: str, modules: int, tmp_path: Path) -> None:
    """The training-time test gives the logits of decoding, and gradients reach every parameter."""
    target, _ = make_mixed(name, tmp_path / "t", modules)
    drafter = load_drafter("native-mtp", target).double()
    target = target.double()
    tokens = [*PROMPT, *DRAFTED]
    ids = torch.tensor([tokens])
    hidden = target(ids, output_hidden_states=True).hidden_states[-1]
    mask = torch.ones_like(ids)
    for parameter in drafter.parameters():
        parameter.requires_grad_(True)
    unrolled = drafter.unroll(TeacherSignals(ids, mask, hidden, mask.bool(), features_BTF=hidden))
    logits = torch.stack([entry.head(entry.states_ND[len(PROMPT) - 1]) for entry in unrolled])
    with torch.no_grad():
        decoded = decoded_logits(drafter, target, PROMPT, DRAFTED)
    assert (logits - decoded[: len(unrolled)]).abs().max() < 1e-5 * decoded.abs().max()
    sum(entry.head(entry.states_ND).square().sum() for entry in unrolled).backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())


# Ernie 4.5: a dense layer that rotates neighbouring pairs; the target's own last norm follows it.

ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}


def make_ernie(folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny Ernie 4.5 with experts whose files contain a module, and its tensors by their names there."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", **SIZES | ERNIE))
    for part, value in model.named_parameters():
        value.data += 0.1 * torch.randn_like(value) if "norm" in part else 0.0
    model.save_pretrained(folder)
    first = "model.layers.0."
    layer = {k.removeprefix(first): v for k, v in load_file(folder / "model.safetensors").items() if first in k}
    shapes: dict[str, tuple[int, ...]] = {f"model.mtp_block.0.{part}": tuple(v.shape) for part, v in layer.items()}
    shapes |= {f"model.mtp_{part}_norm.0.weight": (HIDDEN,) for part in ("emb", "hidden")}
    shapes |= {"model.mtp_linear_proj.0.weight": (HIDDEN, 2 * HIDDEN)}
    module = random_tensors(shapes, 3)
    write(folder, dict(module))
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    return model.eval().requires_grad_(False), module


def ernie_reference(w: dict[str, Tensor], target: PreTrainedModel, tokens: list[int], states: Tensor) -> Tensor:
    """The module's output [T, H] by the plain formula; `tokens[t]` comes after the position of `states[t]`."""

    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps) * gain

    def block(part: str) -> Tensor:
        return w[f"model.mtp_block.0.{part}.weight"]

    embeds = rms(target.get_input_embeddings().weight[torch.tensor(tokens)], w["model.mtp_emb_norm.0.weight"])
    both = torch.cat([embeds, rms(states, w["model.mtp_hidden_norm.0.weight"])], -1)
    x = both @ w["model.mtp_linear_proj.0.weight"].T
    h = rms(x, block("input_layernorm"))
    q, k, v = (
        (h @ block(f"self_attn.{p}_proj").T).unflatten(-1, (HEADS if p == "q" else KV_HEADS, HEAD)).transpose(0, 1)
        for p in "qkv"
    )
    rates = 1.0 / target.config.rope_parameters["rope_theta"] ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angles = torch.arange(len(tokens)).float()[:, None] * rates
    turn = torch.complex(angles.cos().double(), angles.sin().double())

    def placed(y: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    q, k = placed(q), placed(k).repeat_interleave(HEADS // KV_HEADS, 0)
    out = attended(q, k, v)
    x = x + out @ block("self_attn.o_proj").T
    h = rms(x, block("post_attention_layernorm"))
    up = torch.nn.functional.silu(h @ block("mlp.gate_proj").T) * (h @ block("mlp.up_proj").T)
    return rms(x + up @ block("mlp.down_proj").T, target.model.norm.weight)


def test_ernie_is_the_formula_of_its_source(tmp_path: Path) -> None:
    """Rotations and norms of transformers' class compute in float32."""
    target, module = make_ernie(tmp_path / "t")
    assert_formula(target, module, ernie_reference, 1e-6)


def made(name: str, folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """Return a tiny target whose files contain a module, and the names of the module's tensors there."""
    if name == "Ernie 4.5":
        target, module = make_ernie(folder)
        return target, {*module}
    if name.endswith(", 3 modules"):
        target, module = make_mixed(name.removesuffix(", 3 modules"), folder, 3)
        return target, {*module}
    target, module = (make_mixed if name in OWN_LAYERS else make_target)(name.removesuffix(", dense"), folder)
    return target, {part if name in OWN_LAYERS else theirs(name.removesuffix(", dense"), part) for part in module}


@pytest.mark.parametrize(
    "name",
    ["MiMo", "DeepSeek's names", "Qwen3.5", "GLM-4.5, dense", *OWN_LAYERS, "Ernie 4.5", "DeepSeek-V3, 3 modules"],
)
def test_files_come_back_and_tuned_ones_hold_the_next_module(name: str, tmp_path: Path) -> None:
    """Read, saved as ours, loaded and written: the same file. With other weights, the module's tensors alone change."""
    target, module = made(name, tmp_path / "t")
    described = describe_target(target, None, "tiny")
    drafter = load_drafter("native-mtp", target)
    save_drafter(drafter, tmp_path / "ours", target=described, recipe=None, draft_length=3)
    again = load_drafter(tmp_path / "ours", target)
    out = export_drafter(again, target, "native", tmp_path / "out", target_name="org/target").folder
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "model.safetensors"]
    before, after = load_file(tmp_path / "t" / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[part].dtype == value.dtype and torch.equal(after[part], value) for part, value in before.items())
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "kept": "too"}
    for part, parameter in again.named_parameters():
        if name != "Ernie 4.5" or part != "body.final_layernorm.weight":  # which is the target's last norm
            parameter += 0.1 * torch.randn(parameter.shape)
    tuned = export_drafter(again, target, "native", tmp_path / "tuned", target_name="org/target").folder
    changed = load_file(tuned / "model.safetensors")
    kept = {part for part in module if part.endswith("e_score_correction_bias")}  # a buffer, which is not trained
    assert {part for part, value in before.items() if not torch.equal(value, changed[part])} == module - kept
    shutil.copy(tuned / "model.safetensors", tmp_path / "t" / "model.safetensors")
    served = load_drafter("native-mtp", target)
    assert all(torch.equal(value, served.state_dict()[part]) for part, value in again.state_dict().items())


def test_modules_of_other_shapes_or_norms_are_not_written(tmp_path: Path) -> None:
    target, _ = make_ernie(tmp_path / "t")
    drafter = load_drafter("native-mtp", target)
    fresh = type(drafter).from_target(target, init="native")
    assert [part for part, weight in fresh.named_parameters() if not weight.requires_grad] == [
        "body.final_layernorm.weight"
    ]
    drafter.body.final_layernorm.weight += 1
    with pytest.raises(ConfigError, match="norm after its layer is not the target's last norm; expected a module of"):
        export_drafter(drafter, target, "native", tmp_path / "1", target_name="org/target")
    plain = type(drafter).from_target(target)
    with pytest.raises(ConfigError, match="another shape than the target's module; expected drafter"):
        export_drafter(plain, target, "native", tmp_path / "2", target_name="org/target")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN_LAYERS, "Ernie 4.5", "DeepSeek-V3, 3 modules"])
def test_memory_counts_the_layer_that_the_files_have(name: str, tmp_path: Path) -> None:
    """The estimate reads no files; a published module has experts where its target has, and Ernie's has none."""
    target, _ = made(name, tmp_path)
    drafter = load_drafter("native-mtp", target)
    values = {"name": "m", "output": "m", "drafter": {"type": "mtp", "init": "native"}}
    estimate = estimate_memory(parse_recipe(values, "test"), target.config)
    assert estimate.drafter == sum(value.nbytes for value in [*drafter.parameters(), *drafter.buffers()])


PLACE = f"model.layers.{DEPTH}."
REFUSED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "experts": ({f"{PLACE}mlp.experts.0.up_proj.weight": torch.zeros(1)}, "1 matrices of experts; expected gate, up"),
    "router": ({f"{PLACE}mlp.gate.weight": torch.zeros(1)}, "unexpected tensor mlp.gate.weight; expected none"),
    "latent attention": (
        {f"{PLACE}self_attn.kv_a_proj_with_mqa.weight": torch.zeros(1)},
        "unexpected tensor self_attn",
    ),
    "another tensor": ({f"{PLACE}extra.weight": torch.zeros(1)}, "unexpected tensor extra.weight; expected none"),
    "a missing norm": ({f"{PLACE}hnorm.weight": None}, r"tensor hnorm.weight is missing; expected \[32\]"),
    "a missing projection": ({f"{PLACE}eh_proj.weight": None}, "holds none of model.mtp_layers.0.input_proj"),
    "a shape": ({f"{PLACE}enorm.weight": torch.zeros(3)}, r"tensor enorm.weight is \[3\]; expected \[32\]"),
    "own embeddings": ({f"{PLACE}embed_tokens.weight": torch.zeros(3)}, "embed_tokens.weight is not the target's"),
    "own lm_head": ({f"{PLACE}shared_head.head.weight": torch.zeros(3)}, "shared_head.head.weight is not the target's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_cannot_be_represented_are_refused(name: str, tmp_path: Path) -> None:
    target, _ = make_target("DeepSeek's names", tmp_path / "t")
    changes, message = REFUSED[name]
    write(tmp_path / "t", changes)
    with pytest.raises(ConfigError, match=message):
        load_drafter("native-mtp", target)


def test_several_modules_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    target, _ = make_mixed("DeepSeek-V3", tmp_path / "t", modules=2)
    with pytest.raises(ConfigError, match=r"drafter.num_modules=3; expected at most the 2 of the target's checkpoint"):
        Mtp.from_target(target, init="native", num_modules=3)
    target.config.num_nextn_predict_layers = 3
    missing = rf"lacks model.layers.{DEPTH + 2}.eh_proj.weight of module 2; expected 3 modules .*, or num_modules=2"
    with pytest.raises(ConfigError, match=missing):
        load_drafter("native-mtp", target)
    first = Mtp.from_target(target, init="native", num_modules=1)  # which then drafts every token
    assert first.max_draft_length is None
    tensors = load_file(tmp_path / "t" / "model.safetensors")
    own = export_drafter(first, target, "native", tmp_path / "1", target_name="org/target").folder
    written = load_file(own / "model.safetensors")
    assert all(torch.equal(value, written[part]) for part, value in tensors.items())
    target.config.num_nextn_predict_layers = 2
    write(tmp_path / "t", {f"model.layers.{DEPTH + 1}.mlp.gate.weight": None})
    with pytest.raises(ConfigError, match=r"tensor mlp.gate.weight is missing; expected \[4, 32\]"):
        load_drafter("native-mtp", target)
    target.config.num_nextn_predict_layers = "2"
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers='2' in the target's config; expected 0 to 64"):
        load_drafter("native-mtp", target)
    target, _ = make_target("Qwen3.5", tmp_path / "q")
    target.config.num_nextn_predict_layers = 2
    with pytest.raises(ConfigError, match=r"2 modules .* with the names mtp\.\*; expected one module"):
        load_drafter("native-mtp", target)


def test_targets_without_a_known_module_are_refused(tmp_path: Path) -> None:
    target, _ = make_target("Qwen3.5", tmp_path / "t")
    write(tmp_path / "t", {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="two layers after one projection"):
        load_drafter("native-mtp", target)
    target.config._name_or_path = "nobody/nothing"
    with pytest.raises(ConfigError, match="files of 'nobody/nothing' are not on this machine; expected a target"):
        load_drafter("native-mtp", target)
    target.config.model_type = "gemma3_text"
    with pytest.raises(ConfigError, match=r"model_type='gemma3_text' \(unknown\); expected one of llama, mimo"):
        load_drafter("native-mtp", target)


def speculators_folder(native: TrainableDrafter, target: PreTrainedModel, folder: Path) -> Path:
    """A module in the layout of the speculators package, whose `input_proj` reads [embedding; state]."""
    tensors = {f"mtp_layers.0.{name.removeprefix('layers.0.')}": v for name, v in native.body.state_dict().items()}
    state, embedding = tensors["mtp_layers.0.input_proj.weight"].chunk(2, 1)
    tensors["mtp_layers.0.input_proj.weight"] = torch.cat([embedding, state], 1)
    config = speculators("mtp", num_nextn_predict_layers=1, transformer_layer_config=target.config.to_diff_dict())
    return written(folder, config, tensors)


@torch.no_grad()
@pytest.mark.parametrize("name", ["DeepSeek's names", "Qwen3.5", "Qwen3-Next"])
def test_modules_of_qwen3s_types_are_read_in_the_speculators_layout(name: str, tmp_path: Path) -> None:
    """The types that the package has: with norms of heads, gated, with experts."""
    target, _ = (make_mixed if name in OWN_LAYERS else make_target)(name, tmp_path / "t")
    native = load_drafter("native-mtp", target)
    for parameter in native.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    drafter = load_drafter(speculators_folder(native, target, tmp_path / "theirs"), target)
    assert drafter.options() == native.options()
    assert all(torch.equal(value, native.state_dict()[part]) for part, value in drafter.state_dict().items())
    described = describe_target(target, None, "t")
    save_drafter(drafter, tmp_path / "ours", target=described, recipe=None, draft_length=3)
    ours = load_drafter(tmp_path / "ours", target).state_dict()
    assert all(torch.equal(value, ours[part]) for part, value in native.state_dict().items())


def test_modules_of_speculators_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target, _ = make_target("Qwen3.5", tmp_path / "t")
    folder = speculators_folder(load_drafter("native-mtp", target), target, tmp_path / "d")
    other, _ = make_mixed("Qwen3-Next", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"model_type='qwen3_5_text' in config\.json; expected qwen3_next"):
        load_drafter(folder, other)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp_layers.0.final_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^drafter=.*/d: tensor final_layernorm.weight is missing; expected \[32\]"):
        load_drafter(folder, target)
