"""Tiny models of vision-language classes, and prompts with a random image as tensors of their processors."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from .tiny import IDS, MLA, OVERRIDES, VOCAB, model_classes, tiny_values

VISION_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 4, "image_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 32, "num_heads": 4,
    "out_hidden_size": 32, "mlp_ratio": 2, "num_position_embeddings": 16, "projection_dim": 32, "window_size": 8,
    "initializer_range": 0.25, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1],
    "encoder_hidden_size": 32, "text_hidden_size": 32, "encoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": VOCAB, "output_channels": 16,
    "mlp_dim": 48, "global_attn_indexes": [1], "num_pos_feats": 16, "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32, "resampler_n_latents": 4, "downsample_hidden_size": 32, "output_dim": 32,
}  # fmt: skip
"""Passed to every config of images, projectors and sounds that has an attribute of that name."""
TOP_SIZES: dict[str, Any] = {
    "vision_feature_layer": -1, "scale_factor": 2, "image_seq_length": 16, "mm_tokens_per_image": 4,
    "projector_hidden_size": 32, "projection_dim": 32, "alignment_intermediate_size": 64,
    "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]], "projection_hidden_size": 32, "out_hidden_size": 32,
}  # fmt: skip
"""Passed to every config of the whole that has an attribute of that name."""
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
VISION_OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32},
    "glm4v_text": SECTIONS,
    "glm4v_moe_text": {"rope_parameters": {**SECTIONS["rope_parameters"], "partial_rotary_factor": 1.0}},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "glm_ocr_text": SECTIONS,
    "llama4_vision_model": {"intermediate_size": 128},
    "mistral4": MLA,
    "mistral_large4_text": MLA,
    "paddleocr_vl_text": SECTIONS,
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 55},
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 55},
    "step3p5": {"sliding_window": 8},
}
"""By model type of the whole or of a part, what the config needs besides."""
DEFAULT_PARTS = {
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
}
"""Parts that a config has only where it names them."""
MOST_TOKENS = 64
TEXT_PARTS = ("text_config", "decoder")


def vision_classes() -> dict[str, type[PreTrainedModel]]:
    """Return every class of the installed transformers that generates text from images and text, by its name."""
    names = dict.fromkeys(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    return {name: getattr(transformers, name) for name in names if name not in model_classes()}


def vision_config(kind: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return a config of a vision-language class with small sizes, of its parts too."""
    make = kind.config_class
    assert make is not None
    default = make()
    values: dict[str, Any] = {}
    missing = DEFAULT_PARTS.get(default.model_type, {})
    for name in getattr(default, "sub_configs", {}):
        part = CONFIG_MAPPING[missing[name]]() if name in missing else getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            own = tiny_values(part) | IDS if name in TEXT_PARTS else tiny_values(part, VISION_SIZES)
            own |= _rotations(part)
            values[name] = {**own, "model_type": part.model_type, **_overrides(part)}
    if not values.keys() & {*TEXT_PARTS}:
        values |= tiny_values(default)
    values |= {**tiny_values(default, TOP_SIZES), **_special_tokens(default), **IDS}
    return make(**values | _overrides(default))


def _overrides(config: PreTrainedConfig) -> dict[str, Any]:
    return {**OVERRIDES.get(config.model_type, {}), **VISION_OVERRIDES.get(config.model_type, {})}


def _rotations(part: PreTrainedConfig) -> dict[str, Any]:
    """Return rope parameters with sections that sum to half of a head of 8."""
    rope = getattr(part, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        return {"rope_parameters": {**rope, "mrope_section": [1, 1, 2]}}
    return {}


def _special_tokens(config: PreTrainedConfig) -> dict[str, int]:
    """Return the last ids of the vocabulary for the placeholders that a config names; that of images is the last."""
    given = config.to_dict()
    names = [name for name in given if name.endswith(("_token_id", "_token_index")) and isinstance(given[name], int)]
    names = sorted(set(names) - {*IDS}, key=lambda name: (not name.startswith("image_token"), name))
    return {name: VOCAB - 1 - place for place, name in enumerate(names)}


def placeholder(model: PreTrainedModel) -> int:
    """Return the token whose embeddings are those of an image."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(model.config, name, None), int):
            return getattr(model.config, name)
    raise ValueError(f"{type(model).__name__} names no placeholder of images")


def image_prompt(
    model: PreTrainedModel, seed: int, before: list[int], after: list[int]
) -> tuple[list[int], dict[str, Tensor]]:
    """Return tokens with the placeholders of one random image, and the tensors of the image.

    Raises:
        ValueError: where no known layout of tensors gives an image that changes the logits after it.
    """
    reasons = ["it has no get_image_features"]
    if hasattr(model, "get_image_features"):
        reasons = []
        for inputs, other in zip(_layouts(model, seed), _layouts(model, seed + 100), strict=True):
            try:
                ids = [*before, *[placeholder(model)] * _count(model, inputs), *after]
                inputs, other = inputs | _kinds(model, ids), other | _kinds(model, ids)
                if not torch.allclose(_last(model, ids, inputs), _last(model, ids, other), atol=1e-6):
                    return ids, inputs
                reasons.append("its logits do not depend on the image")
            except Exception as error:  # whatever transformers raises
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:90]}")
    raise ValueError("; ".join(reasons))


def _layouts(model: PreTrainedModel, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors of an image of 8 x 8 pixels, or 8 x 12, as processors return them."""
    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    if "image_grid_thw" in taken:
        for frames in (2, 1):
            yield {"pixel_values": noise(24, 12 * frames), "image_grid_thw": torch.tensor([[1, 4, 6]])}
        yield {"pixel_values": noise(24, 3, 2, 2), "image_grid_thw": torch.tensor([[1, 4, 6]])}
        if "image_merge_sizes" in taken:
            grid = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "image_merge_sizes": torch.tensor([2])}
            yield {"pixel_values": noise(24, 12), **grid}
        return
    if "spatial_shapes" in taken:
        mask = torch.ones(1, 16, dtype=torch.long)
        yield {"pixel_values": noise(1, 16, 12), "spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": mask}
        return
    for shape in ((1, 3, 8, 8), (1, 1, 3, 8, 8), (1, 2, 3, 8, 8)):
        yield {"pixel_values": noise(*shape)}
        if "pixel_attention_mask" in taken:
            yield {"pixel_values": noise(*shape), "pixel_attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    if "image_sizes" in taken:  # of the whole image, which is 8 x 16 pixels where it is read in tiles
        yield {"pixel_values": noise(1, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])}
        yield {"pixel_values": noise(1, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16]])}
    if "image_position_ids" in taken:
        places = torch.tensor([[[column, row] for row in range(4) for column in range(4)]])
        yield {"pixel_values": noise(1, 16, 12), "image_position_ids": places}


@torch.inference_mode()
def _count(model: PreTrainedModel, inputs: dict[str, Tensor]) -> int:
    """Return the number of embeddings that an image becomes."""
    methods = [part.get_image_features for part in (model, model.base_model) if hasattr(part, "get_image_features")]
    taken = {name for method in methods for name in inspect.signature(method).parameters}
    features: Any = model.get_image_features(**{name: value for name, value in inputs.items() if name in taken})
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, (list, tuple)) else [features]
    count = sum(part.numel() for part in parts) // model.get_input_embeddings().weight.shape[1]
    if not 0 < count <= MOST_TOKENS:
        raise ValueError(f"an image of {count} tokens")
    return count


def _kinds(model: PreTrainedModel, ids: list[int]) -> dict[str, Tensor]:
    """Return the mask of the image's tokens, for models that read it."""
    taken = inspect.signature(model.forward).parameters
    kinds = torch.tensor([[int(token == placeholder(model)) for token in ids]])
    return {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in taken}


@torch.inference_mode()
def _last(model: PreTrainedModel, ids: list[int], inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits after the last token."""
    return model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1]
