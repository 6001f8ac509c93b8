"""GGUF files for llama.cpp: draft models, EAGLE-3, DFlash and DSpark.

Names, keys and shapes are those of llama.cpp's converter, conversion/ in github.com/ggml-org/llama.cpp (0c1e57098).
Norms and biases are stored in float32 whatever the dtype, and the rows of queries and keys of Llama's architecture are
in the order of rotations of neighbouring pairs. Layer ids k are transformers' `hidden_states[k]`, the input of block k,
counted from 0. `d2t` holds the tokens themselves.
"""

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import ConfigError
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.heads.formats.common import Serving, Source
from draftsmith.heads.formats.gguf_tokenizers import tokenizer_metadata
from draftsmith.heads.formats.speculators import mask_token_of
from draftsmith.heads.layers import windows_of
from draftsmith.heads.lm_head import logits_map, weight_of
from draftsmith.heads.lora import merged_state

# Shapes: H hidden size, V vocabulary, d head size.

FILE = "drafter.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture by the `model_type` of a draft model."""
NEIGHBOURS = ("llama", "eagle3")
"""Architectures that rotate neighbouring pairs of a head; the others, like transformers, rotate its halves."""
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "norm": "output_norm"}
WHOLE |= {"fc": "fc", "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm", "confidence": "conf_proj"}
WHOLE |= {f"markov.markov_w{k}": f"markov_w{k}" for k in (1, 2)}
LAYER = {
    "hidden_norm": "attn_norm_2",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of the parts of a layer: transformers' and llama.cpp's."""
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": None}
ROPE_DEFAULTS |= {"mscale": None, "mscale_all_dim": None, "truncate": True}
"""Rotary settings that the file does not contain, with the values that llama.cpp computes with."""
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
LARGEST_DIFFERENCE = 128
"""llama.cpp refuses draft models whose vocabulary size differs by more from the target's."""
GREEDY = (
    "Drafts are the most likely tokens, of which fewer are accepted above T=0. Builds of llama.cpp that list "
    "--spec-draft-sampling (11434 does, 10434 does not) draw them: add --spec-draft-sampling probabilistic."
)
"""Note about draft models in llama.cpp; other drafters are not drawn from in any build."""


def write_draft_model(source: Source[DraftModel]) -> Serving:
    """Write a draft model with its tokenizer."""
    model = source.drafter.model
    config = model.config
    kinds = tuple(ARCHITECTURES)
    source.require(config.model_type in kinds, f"model_type={config.model_type!r}", f"one of {', '.join(kinds)}")
    sizes = source.drafter.vocab_size, source.text.vocab_size
    value = f"a vocabulary of {sizes[0]} beside the target's {sizes[1]}"
    source.require(abs(sizes[0] - sizes[1]) <= LARGEST_DIFFERENCE, value, f"at most {LARGEST_DIFFERENCE} apart")
    architecture = ARCHITECTURES[config.model_type]
    state = {name: value for name, value in merged_state(model).items() if name not in model.all_tied_weights_keys}
    metadata, tensors = _layers(source, architecture, config, state)
    _write(source, architecture, metadata, tensors)
    return _serving(source, "draft-simple", source.draft_length, [GREEDY])


def write_eagle3(source: Source[Eagle3]) -> Serving:
    """Write EAGLE-3, which shares the target's embeddings."""
    drafter, body = source.drafter, source.drafter.body
    options, count = drafter.options(), body.config.num_hidden_layers
    source.require(count == 1, f"{count} layers", "one layer, or format=vllm")
    source.require(len(drafter.needs.layers) == 3, f"features of layers {list(drafter.needs.layers)}", "three of them")
    for option in ("fc_norm", "norm_output", "qk_norm"):
        source.require(not options.get(option), f"{option}=True", "false, or another format")
    state = {name: value for name, value in body.state_dict().items() if not name.startswith("vocabulary.")}
    metadata, tensors = _head(source, "eagle3", state)
    metadata |= {"target_hidden_size": source.text.hidden_size}
    metadata |= {key: bool(options.get(key)) for key in ("norm_before_residual", "norm_before_fc")}
    _write(source, "eagle3", metadata, tensors)
    return _serving(source, "draft-eagle3", source.draft_length, [])


def write_dflash(source: Source[DFlash]) -> Serving:
    """Write DFlash, or DSpark where it has a Markov head, with embeddings only where the mask's was trained."""
    drafter, body = source.drafter, source.drafter.body
    rank, confident, anchored = drafter.options()["markov_rank"], drafter.confidence is not None, body.first == 0
    kind = drafter.options()["markov_type"]
    source.require(kind == "vanilla", f"markov_type={kind}", "vanilla, or format=sglang or transformers")
    source.require(bool(rank) or not anchored, "sample_from_anchor=True without markov_rank", "false, or markov_rank")
    source.require(bool(rank) or not confident, "a confidence head without markov_rank", "markov_rank as well")
    window = next((size for size in body.sees.windows if size is not None), None)
    source.require(window is None, f"a window of {window} tokens", "none: llama.cpp makes no layer of a block causal")
    source.require(not body.sees.causal, "causal layers", "others: llama.cpp makes no layer of a block causal")
    source.require(body.sinks(0) is None, "attention sinks", "none, or format=vllm")
    plain = drafter.transitions is drafter.markov and body.convolution.conv_kernel_size == 0
    source.require(
        plain, "convolutions or transitions other than markov_rank", "none, or format=vllm, sglang or transformers"
    )
    skipped = ("vocabulary.", "mask_embedding")
    state = {name.removeprefix("body."): value for name, value in drafter.state_dict().items()}
    metadata, tensors = _head(source, "dflash", {k: v for k, v in state.items() if not k.startswith(skipped)})
    mask_token, embeddings = mask_token_of(source)
    metadata |= {"block_size": drafter.block_size, "tokenizer.ggml.mask_token_id": mask_token}
    if rank:
        metadata |= {"sample_from_anchor": anchored, "has_confidence_head": confident}
    plain = body.lm_head is not None or logits_map(source.target).is_identity
    source.require(plain, "a target that scales or caps its logits", "another format")
    for name, value in embeddings.items():
        tensors[_name(source, f"model.{name}")] = value
        if body.lm_head is None:  # a file with embeddings has an lm_head, too
            tensors["output.weight"] = source.stored(weight_of(source.target.get_output_embeddings()))
    _write(source, "dflash", metadata, tensors)
    length = drafter.max_draft_length or drafter.block_size
    notes = [f"Blocks were trained with {drafter.block_size} positions: keep --spec-draft-n-max {length}."]
    if embeddings:
        notes.append(
            f"The mask's embedding was trained: it is row {mask_token} of `token_embd`. llama.cpp 0c1e57098 (that of "
            "llama-cpp-python 0.3.36) reads this tensor. Build 10434 has only the target's embeddings, and refuses the "
            'file ("wrong number of tensors").'
        )
    return _serving(source, "draft-dspark" if rank else "draft-dflash", length, notes)


def _head(source: Source[Any], architecture: str, state: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a drafter that reads the target's states."""
    drafter, config, layers = source.drafter, source.drafter.body.config, list(source.drafter.needs.layers)
    for key in ("attention_bias", "mlp_bias"):
        source.require(not getattr(config, key), f"{key}=True", "false, or another format")
    depth = source.text.num_hidden_layers
    fits = all(1 <= layer < depth for layer in layers)
    source.require(fits, f"features of layers {layers}", f"layers 1 to {depth - 1}, which llama.cpp reads as inputs")
    sections = (getattr(source.text, "rope_parameters", None) or {}).get("mrope_section")
    source.require(not sections, f"a target with mrope_section={sections}", "one position per token")
    source.require_plain_embeddings("another format")
    metadata, tensors = _layers(source, architecture, config, state)
    if drafter.draft_vocabulary is not None:
        tensors["d2t"] = source.stored(drafter.draft_vocabulary.tokens_D)
    return metadata | {"target_layers": layers}, tensors


def _layers(
    source: Source[Any], architecture: str, config: PreTrainedConfig, state: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a stack of layers; ConfigError for what the architecture cannot express."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    source.require(config.hidden_act == "silu", f"hidden_act={config.hidden_act!r}", "silu")
    window = next((size for size in windows_of(config) if size is not None), None)
    if config.model_type == "mistral":  # it has no types of layers
        window = config.sliding_window
    source.require(window is None, f"sliding_window={window}", "full attention, or another format")
    whole = architecture != "qwen2" or heads * head_dim == hidden
    source.require(
        whole, f"{heads} heads of size {head_dim}", f"heads that fill hidden_size={hidden} in Qwen2's layers"
    )
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": hidden,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    rope, tensors = _rope(source, architecture, config)
    for name, value in state.items():
        if architecture in NEIGHBOURS and re.search(r"\.[qk]_proj\.", name):
            value = value.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        tensors[_name(source, name)] = source.stored(value)
    return metadata | rope, tensors


def _name(source: Source[Any], name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    part, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+)", part)
    renamed = WHOLE.get(part) if layer is None else LAYER.get(layer[2])
    source.require(renamed is not None, f"tensor {name}", "those of Llama, Qwen2 and Qwen3")
    return f"{renamed}.{suffix}" if layer is None else f"blk.{layer[1]}.{renamed}.{suffix}"


def _rope(source: Source[Any], architecture: str, config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of the rotary positions.

    llama.cpp divides the default frequencies by `rope_freqs`, which its Llama has for `llama3`.
    """
    rope = config.rope_parameters
    kinds = ("default", "linear", "yarn", *(["llama3"] if architecture in NEIGHBOURS else []))
    kind = rope["rope_type"]
    source.require(kind in kinds, f"rope_type={kind!r}", f"one of {', '.join(kinds)} in {architecture}")
    for key, value in ROPE_DEFAULTS.items():
        source.require(rope.get(key, value) == value, f"{key}={rope.get(key)}", f"{value} in llama.cpp's layers")
    metadata = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default":
        return metadata, {}
    if kind != "llama3":
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            metadata |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        return metadata, {}
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float32) / len(scaled))
    return metadata, {"rope_freqs.weight": plain / scaled}


def _write(source: Source[Any], architecture: str, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the file; keys of `metadata` are the architecture's."""
    gguf = gguf_package()
    if source.tokenizer is None:
        raise ConfigError("format=gguf: no tokenizer; expected the target's, which the file contains")
    writer = gguf.GGUFWriter(str(source.folder / FILE), architecture)
    name = f"{source.drafter.type} for {source.target_name.rpartition('/')[2]}"
    general = {"type": "model", "name": name, "file_type": FILE_TYPES[source.dtype]}
    values = {f"general.{key}": value for key, value in general.items()}
    values |= {"general.quantization_version": gguf.GGML_QUANT_VERSION}
    for key, value in metadata.items():
        values[key if key.startswith("tokenizer.") else f"{architecture}.{key}"] = value
    values |= tokenizer_metadata(source.tokenizer, metadata["vocab_size"])
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        if value.is_floating_point() and value.dim() == 1:
            value = value.float()
        kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}[value.dtype]
        raw = value.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_package() -> Any:
    """Return the package gguf; ConfigError where it is not installed."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ConfigError("format=gguf needs the package gguf; expected: pip install '.[gguf]'") from error


PORT = 8080
"""Of llama-server; it is named in the command, since builds differ in their default."""


def _serving(source: Source[Any], kind: str, length: int, notes: list[str]) -> Serving:
    """Return the command that serves the export; the target is its own file where it was loaded from one."""
    target, given = shlex.quote(source.target_name), Path(source.target_name)
    own = given.suffix == ".gguf" and given.is_file()
    usage = (
        f"llama-server -m {target if own else 'TARGET.gguf'} -md {{folder}}/{FILE} --port {PORT} \\\n"
        f"  --spec-type {kind} --spec-draft-n-max {length} --metrics --alias {target}"
    )
    if not own:
        known = source.text.model_type in ARCHITECTURES
        command = (
            f"`draftsmith export {target} --target {target} --format gguf --out FOLDER` writes it as FOLDER/{FILE}"
        )
        converter = "`python convert_hf_to_gguf.py` in llama.cpp's repository makes it"
        how = f"{command}, or {converter}" if known else converter
        notes = [f"TARGET.gguf is {source.target_name} in GGUF, with the same tokenizer: {how}.", *notes]
    notes = [*notes, "Norms and biases are in float32."]
    return Serving("llama.cpp", usage, notes=notes, port=PORT, model=source.target_name)
