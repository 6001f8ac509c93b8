"""Limits and start tokens that configs state in different ways."""

from copy import deepcopy

import pytest
from conftest import make_t5
from transformers import AutoConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config, T5Config

from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import context_limit, start_token, with_older_names


def yarn(original: int = 64, factor: float = 4.0) -> dict:
    values = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "yarn", "rope_theta": 1e4, **values}


def scaled(kind: str, factor: float = 4.0) -> dict:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": factor}


BY_LAYER = {"full_attention": yarn(), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
LIMITS: dict[str, tuple[PreTrainedConfig, int | None]] = {
    "llama": (LlamaConfig(max_position_embeddings=48), 48),
    "gpt2": (GPT2Config(n_positions=32), 32),
    "t5": (T5Config(n_positions=16), None),
    # Scaled rotation reads its factor times the original positions; Qwen advises to add YaRN to config.json, where
    # `max_position_embeddings` stays as it is.
    "as the original": (Qwen3Config(max_position_embeddings=64, rope_parameters=yarn()), 256),
    "a little more": (Qwen3Config(max_position_embeddings=80, rope_parameters=yarn()), 256),
    "all of it": (Qwen3Config(max_position_embeddings=300, rope_parameters=yarn()), 300),
    "linear": (Qwen3Config(max_position_embeddings=64, rope_parameters={**yarn(), "rope_type": "linear"}), 256),
    "no original": (LlamaConfig(max_position_embeddings=64, rope_parameters=scaled("linear")), 256),
    "dynamic": (LlamaConfig(max_position_embeddings=64, rope_parameters=scaled("dynamic")), 256),
    "no type": (LlamaConfig(max_position_embeddings=64, rope_parameters=scaled("default")), 64),
    "by type of layer": (Gemma3TextConfig(max_position_embeddings=64, rope_parameters=BY_LAYER), 256),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_context_limit_is_the_number_of_positions(name: str) -> None:
    config, limit = LIMITS[name]
    assert context_limit(config) == limit


def test_the_generation_config_names_the_start_token_first() -> None:
    model = make_t5(1)
    assert start_token(model) == 0
    model.generation_config.decoder_start_token_id = 5
    assert start_token(model) == 5
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match="decoder_start_token_id=None"):
        start_token(model)


BASE = {"rope_type": "default", "rope_theta": 500.0}
FACTORS = {"short_factor": [1.5] * 4, "long_factor": [2.5] * 4, "original_max_position_embeddings": 32}
LOCAL = {"sliding_attention": BASE, "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}}
ROTARY = {
    "llama": yarn() | {"rope_theta": 500.0},
    "glm4": BASE | {"partial_rotary_factor": 0.25},
    "gpt_neox": BASE | {"partial_rotary_factor": 0.5},
    "gemma3_text": LOCAL,
    "phi3": {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 1.0, **FACTORS},
    "gemma3": LOCAL,
    "gemma4_text": LOCAL,
}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_values_have_their_older_names_too(kind: str) -> None:
    """transformers converts these names: it reads the same values from them alone, and from both."""
    rope, sizes = ROTARY[kind], {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    sizes |= {"head_dim": 8, "original_max_position_embeddings": 32} if kind == "phi3" else {"head_dim": 8}
    values = deepcopy({**sizes, "rope_parameters": rope})
    config = AutoConfig.for_model(kind, **({"text_config": values} if kind == "gemma3" else values))
    named = with_older_names(config.to_dict())
    read = [AutoConfig.for_model(**deepcopy(named))]
    if kind != "gemma4_text":  # a type that has no older names
        del (named["text_config"] if kind == "gemma3" else named)["rope_parameters"]
        read.append(AutoConfig.for_model(**deepcopy(named)))
    for each in read:
        found = each.get_text_config().rope_parameters
        assert {key: value for key, value in found.items() if key != "type"} == rope
