"""Values of a transformers model's config that architectures store in different ways."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.errors import ConfigError


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of the model's text decoder, which for most models is the model's config."""
    return model.config.get_text_config(decoder=True)


def layer_value(config: PreTrainedConfig, name: str, layer: int = 0) -> Any:
    """Return a config's value for one layer, None if it has none; layers of Gemma 3n and 4 differ."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    value = getattr(config, name, None)
    return value[layer] if isinstance(value, list | tuple) else value


def context_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a model of this config can read; None when the config states no limit."""
    if getattr(config, "relative_attention_num_buckets", None):
        return None  # relative positions: T5's n_positions is the length that it was trained with, not a limit
    decoder = config.get_text_config(decoder=True)
    for key in ("max_position_embeddings", "n_positions"):
        limit = getattr(decoder, key, None)
        if limit and limit > 0:  # -1: none
            return int(limit)
    return None


def start_token(model: PreTrainedModel) -> int:
    """Return the first token of an encoder-decoder model's decoder; ConfigError when its configs name none."""
    for config in (getattr(model, "generation_config", None), model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    raise ConfigError("decoder_start_token_id=None; expected the config of the encoder-decoder target to name one")
