"""Tiny random vision-language models in float64, and prompts with random images as tensors of a processor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import make_tokenizer
from PIL import Image
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlavaProcessor,
    PreTrainedModel,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

VOCAB, IMAGE = 61, 60
"""Size of the vocabulary, and the placeholder of an image's embeddings."""
IDS = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.25, **IDS,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2, "initializer_range": 0.25,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "embed_dim": 16, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
    "out_hidden_size": 32, "initializer_range": 0.25,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 58}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": MROPE},
                 "vision_config": {**QWEN_VISION, "hidden_size": 32, "mlp_ratio": 2}, **QWEN},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": MROPE},
                   "vision_config": {**QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [1]}, **QWEN},
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": MROPE},
                 "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
                 **QWEN},
    "qwen3_5": {"text_config": {**TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
                                "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                                "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
                "vision_config": {**QWEN_VISION, "num_position_embeddings": 16}, **QWEN},
    "gemma3": {"text_config": {**TEXT, "sliding_window": 12, "query_pre_attn_scalar": 8,
                               "layer_types": ["sliding_attention", "full_attention"]},
               "vision_config": VISION, "image_token_index": IMAGE, "mm_tokens_per_image": 4},
    "llava": {"text_config": {**TEXT, "model_type": "llama"},
              "vision_config": {**VISION, "model_type": "clip_vision_model"},
              "image_token_index": IMAGE, "image_seq_length": 16},
    "idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "image_token_id": IMAGE,
                 "scale_factor": 2},
    "smolvlm": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION, "image_token_id": IMAGE,
                "scale_factor": 2},
}  # fmt: skip
FAMILIES = (*_FAMILIES,)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt, and the tensors of its images."""

    ids: list[int]
    inputs: dict[str, Tensor]

    def whole(self) -> dict[str, Tensor]:
        """Return the arguments of the model for this prompt."""
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.inputs}


def build(family: str, seed: int = 0, *, image: int = IMAGE, **text: Any) -> PreTrainedModel:
    """Return a random model in float64; `image` is its placeholder, `text` are sizes of its language model."""
    values = {**_FAMILIES[family], "text_config": {**_FAMILIES[family]["text_config"], **text}}
    values |= {key: image for key in ("image_token_id", "image_token_index") if key in values}
    config = CONFIG_MAPPING[family](**values)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that a fresh model has at 0 or 1 would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(bos_token_id=2, pad_token_id=0)
    return model


def prompt(
    family: str, seed: int, before: list[int], after: list[int], *, grid: tuple[int, int] = (4, 6), image: int = IMAGE
) -> ImagePrompt:
    """Return text, one random image and text; `grid`: patches of the image, for families that take any size."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family.startswith("qwen"):
        height, width = grid
        tokens = height * width // 4
        inputs = {"pixel_values": noise(height * width, 24), "image_grid_thw": torch.tensor([[1, height, width]])}
    else:
        tokens = 16 if family == "llava" else 4
        shape = (1, 1, 3, 8, 8) if family in ("idefics3", "smolvlm") else (1, 3, 8, 8)
        inputs = {"pixel_values": noise(*shape)}
    ids = [*before, *[image] * tokens, *after]
    kinds = torch.tensor([[int(token == image) for token in ids]])
    if family.startswith("qwen"):
        inputs["mm_token_type_ids"] = kinds
    elif family.startswith("gemma"):
        inputs["token_type_ids"] = kinds
    return ImagePrompt(ids, inputs)


def two_images(family: str, seed: int, after: list[int]) -> ImagePrompt:
    """Return a prompt of two images of different sizes, each after a token, and text."""
    first, second = prompt(family, seed, [3], []), prompt(family, seed + 1, [4], after, grid=(6, 4))
    by_image = 1 if family in ("idefics3", "smolvlm") else 0
    axis = {"mm_token_type_ids": 1, "token_type_ids": 1, "pixel_values": by_image}
    joined = {name: torch.cat([value, second.inputs[name]], axis.get(name, 0)) for name, value in first.inputs.items()}
    return ImagePrompt(first.ids + second.ids, joined)


TEMPLATE = (
    "{% for m in messages %}{{ 'z' if m.role == 'assistant' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}z{% endif %}"
)


def save_target(folder: Path, *, seed: int = 2, processor: bool = True, **text: Any) -> Path:
    """Save a LLaVA with a tokenizer of characters, and a processor that makes 16 tokens of each image."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = tokenizer.convert_tokens_to_ids("<image>")
    model = build("llava", seed, image=image, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, **text).float()
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if processor:
        size = {"height": 8, "width": 8}
        images = LlavaImageProcessorPil(size=size, crop_size=size)
        options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        LlavaProcessor(images, tokenizer, patch_size=2, chat_template=TEMPLATE, **options).save_pretrained(folder)
    return folder


def save_image(file: Path, seed: int = 0) -> str:
    """Save a small random image; return its name."""
    pixels = torch.randint(256, (10, 14, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)
    return file.name
