"""Limits and start tokens that configs state in different ways."""

import pytest
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import context_limit, start_token


def yarn(original: int = 64, factor: float = 4.0) -> dict:
    values = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "yarn", "rope_theta": 1e4, **values}


@pytest.mark.parametrize(
    ("config", "limit"),
    [(LlamaConfig(max_position_embeddings=48), 48), (GPT2Config(n_positions=32), 32), (T5Config(n_positions=16), None)],
    ids=["llama", "gpt2", "t5"],
)
def test_the_context_limit_is_the_number_of_positions(config: PreTrainedConfig, limit: int | None) -> None:
    assert context_limit(config) == limit


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Qwen3Config(max_position_embeddings=64, rope_parameters=yarn()), 256),
        (Qwen3Config(max_position_embeddings=80, rope_parameters=yarn()), 256),
        (Qwen3Config(max_position_embeddings=300, rope_parameters=yarn()), 300),
        (Qwen3Config(max_position_embeddings=64, rope_parameters={**yarn(), "rope_type": "linear"}), 64),
        (
            Gemma3TextConfig(
                max_position_embeddings=64,
                rope_parameters={
                    "full_attention": yarn(),
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
            256,
        ),
    ],
    ids=["as the original", "a little more", "all of it", "linear", "by type of layer"],
)
def test_yarn_reads_its_factor_times_the_original_positions(config: PreTrainedConfig, limit: int) -> None:
    """Qwen advises to add YaRN to config.json, where `max_position_embeddings` stays as it is."""
    assert context_limit(config) == limit


def test_the_generation_config_names_the_start_token_first() -> None:
    sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=3))
    assert start_token(model) == 3
    model.generation_config.decoder_start_token_id = 5
    assert start_token(model) == 5
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match="decoder_start_token_id=None"):
        start_token(model)
