"""Tiny random models of every class of the installed transformers, from its default config and a table of overrides."""

from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB = 61
MOST_PARAMETERS = 2_000_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.25,
    "init_std": 0.25, "ffn_dim": 48, "d_ff": 48, "d_kv": 8, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_decoder_layers": 2,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "embedding_size": 16, "type_vocab_size": 1, "attention_window": 8, "is_decoder": True,
    "sliding_window": 8, "attention_chunk_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_chunk_size": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "index_topk": 6, "index_head_dim": 16,
    "index_n_heads": 16, "rotary_dim": 4, "num_experts_per_token": 2, "num_expert_group": 1,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_encoder_layers": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "floor_scale": 4, "attn_scale": 1.0, "log_scaling_n_floor": 4, "local_attention": 8,
    "max_window_layers": 1,
    "use_sliding_window": True,
}  # fmt: skip
"""Passed to every config that has an attribute of that name; texts reach every length at which attention changes."""
IDS = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 2}


def _dims(**more: Any) -> dict[str, Any]:
    """Return sizes of a nested config."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**{key: SIZES[key] for key in (*keys, "num_key_value_heads", "head_dim")}, **IDS, **more}


MLA = {"num_key_value_heads": 4, "head_dim": 8}
"""Latent attention has as many key heads as query heads, and rotates heads of `qk_rope_head_dim`."""
HEADS = {"head_dim": 8}
GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
    "head_dim": 8,
}
INKLING_2 = {"unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
INKLING_2 |= {"swa_head_dim": 8}
ZAMBA = ["linear_attention", "hybrid", "linear_attention"]
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "axk2": MLA,
    "blt": {
        "patcher_config": _dims(vocab_size=260), "encoder_config": _dims(vocab_size=260, hidden_size_global=32),
        "decoder_config": _dims(vocab_size=260, hidden_size_global=32), "global_config": _dims(),
        "encoder_hash_byte_group_vocab": 32, "encoder_hash_byte_group_size": [3], "vocab_size": 260,
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4, "position_bias_num_buckets": 8,
               "position_bias_max_distance": 12},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
             "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_attention_heads": 4, "num_key_value_heads": 4, "per_layer_config": {}, "head_dim": 16},
    "encoder-decoder": {"encoder": _dims(model_type="bert"), "decoder": _dims(
        model_type="bert", is_decoder=True, add_cross_attention=True)},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4, "intermediate_size": [48] * 4,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": {**GEMMA_4, "hidden_size_per_layer_input": 0},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "kimi_linear": MLA,
    "bailing_hybrid": MLA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "inkling2_text": INKLING_2,
    "inkling2_loop_text": {**INKLING_2, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
                           "loop_layer_index_end": 2, "loop_num_passes": 2},
    "jamba": {"layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": MLA,
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4},
    "minicpm3": MLA,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
                           "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
                           "index_local_blocks": 1},
    "ministral": HEADS,
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"layer_types": None, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "pronunciation_vocab_size": 8,
                 "shape_vocab_size": 8},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8,
                 "feed_forward_size": 48, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4,
                 "num_hidden_layers": 2, "attn_layers": ["local", "lsh"]},
    "prophetnet": {"num_hidden_layers": None},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "t5gemma": {"encoder": _dims(sliding_window=8, query_pre_attn_scalar=8), "decoder": _dims(
        sliding_window=8, query_pre_attn_scalar=8)},
    "xlnet": {"max_position_embeddings": None, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "d_head": 8},
    "xlstm": {"v_head_dim": None},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {"num_hidden_layers": 3, "layer_types": None, "layers_block_type": ZAMBA,
              "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {"num_hidden_layers": 3, "layer_types": None, "layers_block_type": ZAMBA,
               "mamba_headdim": 8, "n_mamba_heads": 8, "adapter_rank": 4, "chunk_size": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By model type, what the config needs besides; a value of None leaves the default."""
FLOAT32 = ("fsmt", "inkling2_loop_text", "inkling2_text", "xglm", "xlnet")
"""Families whose code fails in float64."""


def model_classes() -> dict[str, type[PreTrainedModel]]:
    """Return every class with an lm_head of the installed transformers that generates text from text, by its name."""
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()]
    classes = {}
    for name in names:
        kind = getattr(transformers, name)
        parts = getattr(kind.config_class, "sub_configs", {})
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            parts = [part for part in parts if "vision" in part]
        if not any("vision" in part or "audio" in part for part in parts):
            classes[name] = kind
    return classes


def tiny_config(kind: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return a config of a model class with small sizes."""
    make = kind.config_class
    assert make is not None
    default = make()
    given = {**tiny_values(default), **IDS, **OVERRIDES.get(default.model_type, {})}
    return make(**{key: value for key, value in given.items() if value is not None or key in IDS})


def tiny_values(default: PreTrainedConfig, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """Return those of `sizes` that a config has, and one layer of each kind."""
    default.allow_global_per_layer_attribute_access = True  # Gemma 4 has sizes that differ between layers
    values = {}
    for key, value in sizes.items():
        try:
            own = getattr(default, key, None)
        except (ValueError, AttributeError):  # differs between layers
            continue
        if isinstance(own, (list, tuple)) and not isinstance(value, list):
            values[key] = [value] * len(own)
        elif own is not None:
            values[key] = float(value) if isinstance(own, float) else value
    for key in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(default, key, None) or []))
        if len(kinds) > 1:  # the last is a full one where families require that
            values[key] = sorted(kinds, key="full_attention".__eq__)
            values["num_hidden_layers"] = len(kinds)
    return values


def build(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random model in float64 whose texts depend on their prompts and are not repetitive at once."""
    dtype = torch.float32 if config.model_type in FLOAT32 else torch.float64
    config._experts_implementation = "eager"  # others change their order of summation with the number of tokens
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{kind.__name__} has {count:,} parameters; expected overrides that make it tiny")
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that a fresh model has at 0 or 1 would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif not parameter.any():  # a projector of images that a fresh model has at 0
                parameter.normal_(std=0.1)
        # Padding, which these models write like any other token, is embedded as zeros: an indexer's scores would be
        # ties, which are broken by chance. Embeddings near zero, as RWKV's, would write the same after all prompts.
        embedding = model.get_input_embeddings().weight
        (embedding if embedding.std() < 0.01 else embedding[IDS["pad_token_id"]]).normal_(std=0.25)
    # Without forced tokens, beams and other settings of some families' defaults.
    model.generation_config = GenerationConfig(**{key: value for key, value in IDS.items() if value is not None})
    return model
