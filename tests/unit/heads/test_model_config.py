"""Limits and start tokens that configs state in different ways."""

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, T5Config, T5ForConditionalGeneration

from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import context_limit, start_token


@pytest.mark.parametrize(
    ("config", "limit"),
    [(LlamaConfig(max_position_embeddings=48), 48), (GPT2Config(n_positions=32), 32), (T5Config(n_positions=16), None)],
    ids=["llama", "gpt2", "t5"],
)
def test_the_context_limit_is_the_number_of_positions(config: PreTrainedConfig, limit: int | None) -> None:
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
