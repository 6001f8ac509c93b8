"""Tiny random vision-language models in float64, and prompts with random images as tensors of a processor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import make_tokenizer
from PIL import Image
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
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


def build(family: str, seed: int = 0, *, special: Sequence[int] = (IMAGE,), **text: Any) -> PreTrainedModel:
    """Return a random model in float64; `special`: ids of its `TOKENS`; `text`: sizes of its language model."""
    values = {**_FAMILIES[family], "text_config": {**_FAMILIES[family]["text_config"], **text}}
    values |= {key: special[0] for key in ("image_token_id", "image_token_index") if key in values}
    values |= dict(zip([*QWEN], special, strict=False)) if family.startswith("qwen") else {}
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


TOKENS = {
    "llava": ("<image>",),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", "<video>",
                *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))),
}  # fmt: skip
"""Special tokens of families with a processor here; the first is the placeholder of an image."""
NEEDS_TORCHVISION = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Families whose processors read videos too, for which transformers needs torchvision."""


def template(family: str) -> str:
    """Return a chat template: messages after each other, "z" before an answer."""
    shown = "<|vision_start|><|image_pad|><|vision_end|>" if family.startswith("qwen") else "<image>"
    return (
        "{% for m in messages %}{{ 'z' if m.role == 'assistant' }}{% for part in m.content %}"
        "{% if part.type == 'image' %}" + shown + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}z{% endif %}"
    )


def make_processor(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the family's own processor, for images of a few pixels."""
    chat: dict[str, Any] = {"chat_template": template(family)}
    if family == "llava":  # 16 tokens for each image
        size = {"height": 8, "width": 8}
        images = LlavaImageProcessorPil(size=size, crop_size=size)
        chat |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return LlavaProcessor(images, tokenizer, patch_size=2, **chat)
    sizes: dict[str, Any] = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
    area = {"shortest_edge": 16, "longest_edge": 128}  # pixels: 4 for each token
    if family == "smolvlm":  # an image of 16 pixels as four tiles and as a whole, 4 tokens each
        edges = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}}
        images = transformers.SmolVLMImageProcessor(**edges)
        videos = transformers.SmolVLMVideoProcessor(**edges)
        return transformers.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, **chat)
    images = transformers.Qwen2VLImageProcessor(**sizes, size=area)
    if family == "qwen3_vl":
        videos = transformers.Qwen3VLVideoProcessor(**sizes, size=area)
        return transformers.Qwen3VLProcessor(images, tokenizer, videos, **chat)
    videos = transformers.Qwen2VLVideoProcessor(**sizes, size=area)
    return transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, **chat)


def save_target(folder: Path, family: str = "llava", *, seed: int = 2, processor: bool = True, **text: Any) -> Path:
    """Save a model with a tokenizer of characters, and its processor."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS[family]]})
    ids = tokenizer.convert_tokens_to_ids([*TOKENS[family]])
    model = build(family, seed, special=ids, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, **text).float()
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if processor:
        make_processor(family, tokenizer).save_pretrained(folder)
    return folder


def save_image(file: Path, seed: int = 0) -> str:
    """Save a small random image; return its name."""
    pixels = torch.randint(256, (10, 14, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)
    return file.name
