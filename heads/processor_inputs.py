"""The tensors of a processor besides token ids: pixels, sizes of images, kinds of tokens. Audio has such tensors too.

A target reads them with its prompt; all tokens after the prompt are text.
"""

import hashlib
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint

# Shapes: T tokens of the prompt, A axes of positions.

ProcessorInputs = Mapping[str, Tensor]
"""Arguments of the model's forward pass for one prompt, a batch of one."""
_OF_TEXT = ("input_ids", "attention_mask")
_OF_RUNS = ("inputs_embeds", "position_ids", "cache", "past_key_values", "labels", "logits_to_keep", "use_cache")


def inputs_for(model: PreTrainedModel, given: ProcessorInputs) -> dict[str, Tensor]:
    """Return the tensors on the device and in the dtype of `model`, without token ids and their mask.

    Raises:
        ConfigError: for a tensor that the model's forward pass does not take.
    """
    accepted = inspect.signature(model.forward).parameters
    parameter, placed = next(model.parameters()), {}
    for name, value in given.items():
        if name in _OF_TEXT:
            continue
        if name not in accepted or name in _OF_RUNS or not isinstance(value, Tensor):
            kind = model.config.model_type
            raise ConfigError(f"inputs[{name!r}] with model_type={kind!r}; expected tensors of its own processor")
        dtype = parameter.dtype if value.is_floating_point() else None
        placed[name] = value.to(parameter.device, dtype)
    return placed


def extended(inputs: ProcessorInputs, prompt: int, total: int) -> dict[str, Tensor]:
    """Return the tensors for a text of `total` tokens that begins with the prompt: kinds of tokens are 0 after it."""

    def longer(value: Tensor) -> Tensor:
        by_token = value.shape == (1, prompt) and not value.is_floating_point()
        return torch.nn.functional.pad(value, (0, total - prompt)) if by_token else value

    return {name: longer(value) for name, value in inputs.items()}


def prompt_positions(model: PreTrainedModel, ids_1T: Tensor, inputs: ProcessorInputs) -> tuple[Tensor | None, int]:
    """Return positions [A, 1, T] of a prompt's tokens, and the shift of the text after it.

    Models with several axes of positions (M-RoPE; Qwen2-VL, arXiv:2409.12191, section 2.1) give the tokens of an image
    fewer positions than tokens. The position of a token after the prompt is its index plus the shift. (None, 0) for
    models whose positions are indices.
    """
    locate = getattr(model.base_model, "get_rope_index", None)
    if locate is None or not inputs:
        return None, 0
    accepted = inspect.signature(locate).parameters
    given = {"attention_mask": torch.ones_like(ids_1T), **inputs}
    arguments = {name: value for name, value in given.items() if name in accepted}
    positions_A1T, shift_11 = locate(input_ids=ids_1T, **arguments)
    return positions_A1T, int(shift_11)


def inputs_fingerprint(inputs: ProcessorInputs | None) -> str | None:
    """Return a fingerprint of the tensors' names and numbers."""
    if not inputs:
        return None
    contents = {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in inputs.items()}
    return fingerprint({name: hashlib.sha256(content).hexdigest() for name, content in contents.items()})
