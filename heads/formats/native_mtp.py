"""Multi-token prediction modules inside the files of targets: read as a drafter, and written back.

    target                 prefix of the module   norms of embedding, state, output                  projection reads
    MiMo                   model.mtp_layers.K.    token_, hidden_ and final_layernorm                [state; embedding]
    DeepSeek-V3, GLM-4     model.layers.DEPTH+K.  enorm, hnorm, shared_head.norm                     [embedding; state]
    Qwen3-Next, Qwen3.5    mtp.                   pre_fc_norm_embedding, pre_fc_norm_hidden, norm    [embedding; state]
    Ernie 4.5              model.mtp_*            emb_norm.0, hidden_norm.0, the target's last norm  [embedding; state]

Module K = 0 reads the output of the target's last norm, module K > 0 that of the module before it; embeddings and
lm_head are the target's. The last two layouts have one module. Qwen3-Next's and Qwen3.5's
attention is gated, the gains of their norms are 1 + weight, and they rotate a part of each head, as GLM-4.5 does. A
layer with experts or latent attention (DeepSeek-V3, full-size GLM-4.5, Qwen3-Next) is one of the target's own class, as
is Ernie's, which rotates neighbouring pairs.
Sources: MtpModel in transformers 5.23 (modeling_layers.py, conversion_mapping.py) and vLLM's mimo_mtp.py,
deepseek_mtp.py, qwen3_next_mtp.py; for Ernie PaddleFormers 00915cc and FastDeploy 0667220 (ernie4_5_mtp.py).
"""

import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.formats.common import SAMPLED, Serving, Source, full_lm_head, vllm_command
from draftsmith.heads.layers import last_norm_is_centred, layer_config
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import text_config
from draftsmith.heads.mtp_network import OPTIONS, MtpNetwork

# Shapes: H hidden size.


@dataclass(frozen=True)
class Layout:
    """Names of a module's tensors."""

    prefixes: tuple[str, ...]
    """Of all names; `{module}` is the module's number, `{layer}` that number plus the target's number of layers."""
    names: dict[str, str]
    """Ours and theirs, without the decoder layer's; without `final_layernorm`, the target's last norm is used."""
    layer: str = ""
    """Prefix of the decoder layer's tensors after that of the module."""
    embedding_first: bool = True
    """The projection reads [embedding; state]; ours reads [state; embedding]."""

    def theirs(self, name: str) -> str:
        """Return the name in the module of one of our tensors."""
        if name.startswith("layers.0."):
            return self.layer + name.removeprefix("layers.0.")
        part, _, suffix = name.rpartition(".")
        return f"{self.names[part]}.{suffix}"

    def stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights by their names in the module, without a norm that is the target's."""
        own = self.names.keys()
        return {self.theirs(n): w for n, w in weights.items() if n != LAST_NORM or "final_layernorm" in own}


LAST_NORM = "final_layernorm.weight"
MOST_MODULES = 64
OWN = "the target's own MTP module: "
"""Prefix of error messages."""


def _names(token: str, hidden: str, projection: str, last: str | None) -> dict[str, str]:
    names = {"token_layernorm": token, "hidden_layernorm": hidden, "input_proj": projection}
    return names if last is None else names | {"final_layernorm": last}


LAYOUTS = (
    Layout(
        ("model.mtp_layers.{module}.", "mtp_layers.{module}."),
        _names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        embedding_first=False,
    ),
    Layout(
        ("model.layers.{layer}.", "model.language_model.layers.{layer}."),
        _names("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ),
    Layout(
        ("mtp.", "model.mtp."), _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), layer="layers.0."
    ),
    Layout(("model.mtp_",), _names("emb_norm.0", "hidden_norm.0", "linear_proj.0", None), layer="block.0."),
)
SHARED = {"embed_tokens.weight": "get_input_embeddings", "shared_head.head.weight": "get_output_embeddings"}
"""Tensors of a module that must be the target's own."""
UNREAD = {"layers.1.": "two layers after one projection"}
"""Beginnings of names in the module that no drafter here has, and what they show."""
EXPERTS, LATENT = ("mlp.experts.", "mlp.gate."), ("self_attn.kv_a_proj_with_mqa.",)
"""Beginnings of names in layers that are built from the target's own class."""
EXPERT = re.compile(r"(.*mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
TARGETS = ("llama", "mimo", "mistral", "qwen2", "qwen3", "qwen3_next", "qwen3_5", "qwen3_5_text", "glm4_moe")
TARGETS += ("glm4_moe_lite", "deepseek_v3", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose modules have the conventions above, and rotate the halves of a head."""
PAIRS = ("ernie4_5", "ernie4_5_moe")
"""The same, but neighbouring pairs of a head are rotated, as the target's own class does."""


SPECULATORS = Layout(("mtp_layers.0.",), _names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
"""In files of the speculators package; not in those of targets, where these names are MiMo's."""


Module = tuple[str, dict[str, Tensor]]
"""Prefix of a module's tensors, and these by their names after it."""


def read_native(
    target: PreTrainedModel, modules: int | None = None
) -> tuple[LlamaConfig, dict[str, bool], list[dict[str, Tensor]]]:
    """Return config, options and the weights of the modules in the target's files, by the names of `MtpNetwork`.

    `modules`: read only this number of them; None: all, see `stated_modules`.

    Raises:
        ConfigError: for a target without such modules, and for modules that `MtpNetwork` cannot represent.
    """
    layout, found = _find(target, modules)
    body, options, first = represented(target, layout, found[0][1])
    weights = [first]
    for number, (_, tensors) in enumerate(found[1:], 1):
        own, also, values = represented(target, layout, tensors)
        if (own.to_dict(), also) != (body.to_dict(), options):
            raise _refusal(f"module {number} has another layer than module 0", "modules of one shape")
        weights.append(values)
    return body, options, weights


def stated_modules(target: PreTrainedModel) -> int:
    """Return the number of modules that the target's config states; one where it states none."""
    count = getattr(text_config(target), "num_nextn_predict_layers", None)
    if count is not None and (type(count) is not int or not 0 <= count <= MOST_MODULES):
        raise _refusal(f"num_nextn_predict_layers={count!r} in the target's config", f"0 to {MOST_MODULES}")
    return count or 1


def represented(
    target: PreTrainedModel, layout: Layout, tensors: dict[str, Tensor]
) -> tuple[LlamaConfig, dict[str, bool], dict[str, Tensor]]:
    """Return a module as `read_native` returns it, from tensors that have been read."""
    for name, of in SHARED.items():
        tensor, own = tensors.pop(name, None), weight_of(getattr(target, of)()).detach().cpu()
        if tensor is not None and not any(torch.equal(tensor.to(d), own.to(d)) for d in (own.dtype, tensor.dtype)):
            raise _refusal(f"{name} is not the target's", "a module that shares embeddings and lm_head")
    body, options = _shape(target, layout, tensors)
    tensors = _stacked(tensors)
    with torch.device("meta"):
        shapes = {name: list(value.shape) for name, value in MtpNetwork(body, **options).state_dict().items()}
    weights: dict[str, Tensor | None] = {}
    if "target_norm" in options:
        weights[LAST_NORM] = weight_of(target.get_decoder().get_submodule("norm")).detach().cpu()
    weights |= {name: tensors.pop(layout.theirs(name), None) for name in shapes if name not in weights}
    for name in sorted(tensors):
        raise _refusal(f"unexpected tensor {name}", "none of that name")
    for name, value in weights.items():
        if value is None or list(value.shape) != shapes[name]:
            found = "missing" if value is None else list(value.shape)
            raise _refusal(f"tensor {layout.theirs(name)} is {found}", f"{shapes[name]}")
    return body, options, _swapped(layout, {name: value for name, value in weights.items() if value is not None})


def _find(target: PreTrainedModel, modules: int | None = None) -> tuple[Layout, list[Module]]:
    """Return the layout and the modules in the target's files."""
    kind, stated = text_config(target).model_type, stated_modules(target)
    if kind not in TARGETS + PAIRS:
        raise _refusal(f"model_type={kind!r} (unknown)", f"one of {', '.join(TARGETS + PAIRS)}")
    if modules is not None and modules > stated:
        raise ConfigError.of("drafter.num_modules", modules, f"at most the {stated} of the target's checkpoint")
    folder, depth, count = _folder(target), text_config(target).num_hidden_layers, modules or stated

    def prefixes(pattern: str) -> list[str]:
        return [pattern.format(module=number, layer=depth + number) for number in range(count)]

    tried = []
    for layout in LAYOUTS:
        projection = layout.names["input_proj"]
        for first, *others in map(prefixes, layout.prefixes):
            tried.append(first + projection)
            found = [(first, _tensors(folder, first))]
            if f"{projection}.weight" not in found[0][1]:
                continue
            if first in others:
                stated_as = f"{count} modules (num_nextn_predict_layers) with the names {first}*"
                raise _refusal(stated_as, "one module: the names have no number, or drafter.num_modules=1")
            for number, prefix in enumerate(others, 1):
                found.append((prefix, _tensors(folder, prefix)))
                if f"{projection}.weight" not in found[-1][1]:
                    problem = f"{folder} lacks {prefix}{projection}.weight of module {number}"
                    raise _refusal(problem, f"{count} modules (num_nextn_predict_layers), or num_modules={number}")
            return layout, found
    raise _refusal(f"{folder} holds none of {', '.join(tried)}", "a target with an MTP module, or drafter.init=random")


def _tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors with this prefix, by their names after it."""
    return {
        name.removeprefix(prefix): tensors.get_tensor(name)
        for _, tensors in _files(folder)
        for name in tensors.keys()  # noqa: SIM118 - not a dict
        if name.startswith(prefix)
    }


def _folder(target: PreTrainedModel) -> Path:
    """Return the folder of the target's files, which may be in the cache of the Hub."""
    name = target.config._name_or_path
    if name and Path(name).is_dir():
        return Path(name)
    try:
        return Path(
            snapshot_download(name, revision=getattr(target.config, "_commit_hash", None), local_files_only=True)
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        raise _refusal(f"the files of {name!r} are not on this machine", "a target loaded from a folder") from error


def _files(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the folder's safetensors files, open."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                yield file, tensors
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read ({error}); expected whole safetensors weights") from error


def _shape(target: PreTrainedModel, layout: Layout, tensors: dict[str, Tensor]) -> tuple[LlamaConfig, dict[str, bool]]:
    """Return config and options of the module's layer: Llama's or, with experts or latent attention, the target's."""
    for name in sorted(tensors):
        for start, problem in UNREAD.items():
            if name.startswith((start, layout.layer + start)):
                raise _refusal(f"its layer has {problem} ({name})", "one layer")
    text = text_config(target)
    sparse, latent = (
        any(name.startswith(tuple(layout.layer + start for start in starts)) for name in tensors)
        for starts in (EXPERTS, LATENT)
    )
    if sparse or latent or text.model_type in PAIRS:
        known = {"centred": bool(last_norm_is_centred(target)), "target_norm": "final_layernorm" not in layout.names}
        return _own_layer(text, sparse), {name: True for name, value in known.items() if value}
    if text.hidden_act != "silu":
        raise _refusal(f"hidden_act={text.hidden_act!r}", "silu")

    def rows(name: str) -> int:
        value = tensors.get(f"{layout.layer}{name}.weight")
        return 0 if value is None else value.shape[0]

    bias = f"{layout.layer}self_attn.q_proj.bias" in tensors
    heads, width = text.num_attention_heads, rows("mlp.gate_proj") or None
    body = layer_config(target, 1, attention_bias=bias, intermediate_size=width, num_attention_heads=heads)
    rope = text.rope_parameters or {}
    part = rope.get("full_attention", rope).get("partial_rotary_factor", 1.0)
    body.rope_parameters = {k: v for k, v in (body.rope_parameters or {}).items() if not k.startswith("mrope")}
    if part != 1:
        body.rope_parameters["partial_rotary_factor"] = part
    assert body.head_dim is not None, "LlamaConfig sets it"
    gated = rows("self_attn.q_proj") == 2 * body.num_attention_heads * body.head_dim
    values = {"qk_norm": rows("self_attn.q_norm") > 0, "gated": gated, "centred": bool(last_norm_is_centred(target))}
    return body, {name: True for name, value in values.items() if value}


def expected_layer(target: PreTrainedModel) -> Any:
    """Return the config of a module's layer without its files: of the target's own class where it has experts or pairs.

    None: a Llama-like layer. Published modules have experts where their targets have, except Ernie's.
    """
    text = text_config(target)
    sparse = any(getattr(text, key, None) for key in ("n_routed_experts", "num_experts"))
    if text.model_type in PAIRS or (sparse and text.model_type in TARGETS):
        return _own_layer(text, text.model_type not in PAIRS)
    return None


def _own_layer(text: PreTrainedConfig, sparse: bool) -> Any:
    """Return the target's config for one layer with full attention, and with experts if `sparse`."""
    config = deepcopy(text)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for key, value in changes.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    return config


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the matrices of all experts in one tensor, as transformers' layers have them."""
    own = {name: match for name in tensors if (match := EXPERT.fullmatch(name))}
    if not own:
        return tensors
    base = next(iter(own.values()))[1]
    rows: dict[str, list[Tensor]] = {}
    for part in ("gate", "up", "down"):
        names = [f"{base}.{expert}.{part}_proj.weight" for expert in range(len(own) // 3)]
        rows[part] = [tensors[name] for name in names if name in tensors]
        if len(rows[part]) * 3 != len(own) or len({value.shape for value in rows[part]}) > 1:
            raise _refusal(f"{len(own)} matrices of experts", "gate, up and down of each, all experts of one size")
    stacked = {name: value for name, value in tensors.items() if name not in own}
    gate_up = [torch.cat(both) for both in zip(rows["gate"], rows["up"], strict=True)]
    return stacked | {f"{base}.gate_up_proj": torch.stack(gate_up), f"{base}.down_proj": torch.stack(rows["down"])}


def _apart(tensors: dict[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
    """Undo `_stacked` for tensors whose names are not in `stored`."""
    apart: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base, _, part = name.rpartition(".")
        if name in stored or not base.endswith("mlp.experts"):
            apart[name] = value
            continue
        for expert, matrix in enumerate(value):
            parts = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            apart |= {f"{base}.{expert}.{own}.weight": half for own, half in zip(names, parts, strict=True)}
    return apart


def _swapped(layout: Layout, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the halves of the projection in the other order where the layout has it."""
    if layout.embedding_first:
        halves = weights["input_proj.weight"].chunk(2, 1)
        weights = weights | {"input_proj.weight": torch.cat(halves[::-1], 1)}
    return weights


def write_native(source: Source[Any]) -> Serving:
    """Write the files of the target that contain its modules, with the drafter's weights in place of theirs."""
    networks = source.drafter.networks
    layout, found = _find(source.target, len(networks))
    written: dict[str, Tensor] = {}
    for network, (prefix, tensors) in zip(networks, found, strict=True):
        changed = _changed(source, network, layout, tensors)
        written |= {prefix + name: value for name, value in changed.items()}
    for file, held in _files(_folder(source.target)):
        names = list(held.keys())
        if written.keys().isdisjoint(names):
            continue
        whole = {name: held.get_tensor(name) for name in names}
        whole |= {name: written[name].to(whole[name].dtype).contiguous() for name in names if name in written}
        save_file(whole, source.folder / file.name, metadata=held.metadata())
    prefixes = ", ".join(f"{prefix}*" for prefix, _ in found)
    usage = "cp {folder}/*.safetensors TARGET_FOLDER/\n" + vllm_command(
        "TARGET_FOLDER", {"method": "mtp", **SAMPLED}, "{folder}", source.draft_length
    ).replace('"model": "{folder}", ', "")
    notes = [
        f"TARGET_FOLDER is a copy of {source.target_name}: these are its files that contain the module ({prefixes}), "
        "with every other tensor unchanged, in the dtypes of the target's files.",
        "The state is the output of the target's last norm, in every step; engines feed later steps as they see fit.",
        *full_lm_head(source),
    ]
    return Serving("vLLM, SGLang or transformers", usage, notes=notes, port=8000, model="TARGET_FOLDER")


def _changed(source: Source[Any], network: MtpNetwork, layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's weights by the names of `tensors`, those of the target's module."""
    stored = frozenset(tensors)
    body, options, weights = represented(source.target, layout, tensors)
    state = network.state_dict().items()
    own = {name: value.detach().cpu() for name, value in state if not name.startswith("vocabulary.")}
    same = {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in weights.items()}
    mine = {name: True for name in OPTIONS if source.drafter.options().get(name)}
    theirs = network.config
    rope = (theirs.rope_parameters, theirs.model_type) == (body.rope_parameters, body.model_type)
    source.require(same and mine == options and rope, "another shape than the target's module", "drafter.init=native")
    if "target_norm" in options:
        unchanged = torch.equal(own[LAST_NORM].to(weights[LAST_NORM].dtype), weights[LAST_NORM])
        source.require(unchanged, "the norm after its layer is not the target's last norm", "a module of this target")
    return _apart(layout.stored(_swapped(layout, own)), stored)


def _refusal(problem: str, expected: str) -> ConfigError:
    return ConfigError(f"{OWN}{problem}; expected {expected}")
