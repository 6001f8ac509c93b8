"""Tiny random models with recurrent layers of different designs, in float64, and drafters that are right sometimes.

Also models whose caches do not roll back, and with an indexer, which chooses the tokens that attention reads.
"""

from copy import deepcopy
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.heads import DraftModel

INDEXED_TREES = Version(transformers.__version__) >= Version("5.23")
"""Whether indexed attention follows the masks that it is given; in transformers 5.17 it does not."""
VOCAB = 61
IDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.25}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
PURE = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.25}
STATES, FULL = "linear_attention", "full_attention"
KDA = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8}
KDA |= {"num_key_value_heads": 4, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
KDA |= {"num_hidden_layers": 3}
NO_LIMIT = {"time_step_min": 1e-12}
"""transformers applies a lower limit to steps of several tokens only, so that its `generate` differs from its forward
pass where the limit is reached."""

_FAMILIES: dict[str, dict[str, Any]] = {
    # The state after several tokens begins empty in Mamba 1.
    "mamba": {**PURE, "time_step_rank": 4},
    "falcon_mamba": {**PURE, "time_step_rank": 4},
    "jamba": {
        **SIZES, "num_hidden_layers": 3, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    # Mamba 2: alone, between attention layers, beside them in the same layer, and layers without any cache.
    "mamba2": {**PURE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": {**SIZES, **MAMBA_2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **SIZES, **MAMBA_2, "num_hidden_layers": 3, "layer_types": [STATES, FULL, STATES], "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        **SIZES, **NO_LIMIT, "num_hidden_layers": 3, "layers_block_type": [STATES, "hybrid", STATES],
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 8,
        "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "falcon_h1": {**SIZES, **MAMBA_2, "mamba_n_heads": 4, "mamba_d_ssm": 32, "num_hidden_layers": 2},
    "nemotron_h": {
        **SIZES, **NO_LIMIT, "num_hidden_layers": 4, "layers_block_type": [STATES, "mlp", FULL, STATES], "head_dim": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
    },
    # Gated delta rule.
    "qwen3_next": {
        **SIZES, **DELTA, **MOE, "num_hidden_layers": 3, "head_dim": 8, "layer_types": [STATES, STATES, FULL],
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {
        **SIZES, **DELTA, "num_hidden_layers": 3, "head_dim": 8, "layer_types": [STATES, STATES, FULL],
    },
    "olmo_hybrid": {
        **SIZES, **DELTA, "linear_num_key_heads": 4, "num_hidden_layers": 3, "layer_types": [STATES, STATES, FULL],
    },
    "kimi_linear": {
        **SIZES, **KDA, "layer_types": [STATES, STATES, FULL], "linear_head_dim": 8, "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **SIZES, **KDA, "layer_types": [STATES, STATES, FULL], "head_dim": 8, "n_group": 1, "topk_group": 1,
    },
    # A convolution only, and a convolution that returns queries, keys and values.
    "lfm2": {**SIZES, "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "zaya": {
        **SIZES, "num_hidden_layers": 3, "head_dim": 8, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 12,
    },
}  # fmt: skip
FAMILIES = {name: values for name, values in _FAMILIES.items() if name in CONFIG_MAPPING}
"""Those of the installed transformers, with values of their configs."""
INDEXED = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16, "n_routed_experts": 4, "n_group": 1}
INDEXED |= {"topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "q_lora_rank": 12}
_OTHERS: dict[str, dict[str, Any]] = {
    # States in a list.
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2},
    # An indexer, and compressed keys in the layers of the common cache.
    "deepseek_v32": {**SIZES, **KDA, **INDEXED},
    "deepseek_v4": {
        **SIZES, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "q_lora_rank": 12,
        "qk_rope_head_dim": 8, "o_lora_rank": 8, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 16,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}  # fmt: skip
OTHERS = {name: values for name, values in _OTHERS.items() if name in CONFIG_MAPPING}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model whose texts depend on their prompts and are not repetitive at once.

    `changes`: values of its config.
    """
    torch.manual_seed(seed)
    make: Any = CONFIG_MAPPING[family]
    config = make(**{"vocab_size": VOCAB, **IDS, **{**FAMILIES, **OTHERS}[family], **changes})
    config._experts_implementation = "eager"  # others change their order of summation with the number of tokens
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name and "dt_bias" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases of 0 or 1 would hide mistakes
            elif family in ("mamba", "falcon_mamba") and "mixer" in name and "A_log" not in name:
                parameter.mul_(3)
        if family in OTHERS:  # RWKV's are near zero; padding has zeros, for which an indexer's scores are ties
            model.get_input_embeddings().weight.normal_(std=0.25)
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def noisy(model: PreTrainedModel, scale: float = 0.06) -> DraftModel:
    """Return a draft model: `model` with noise relative to its weights."""
    draft = deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * scale * parameter.std().nan_to_num(0))
    return DraftModel(draft.eval())
