"""The target's logits along texts by plain forward passes: a reference that shares no code with the decoder.

The same tokens can be read whole, one by one or in blocks. Mathematically that is one and the same; in floating point
each way adds up in another order. How far the results differ is what a near tie, or a tolerance, is measured by.
"""

import inspect

import torch
from torch import Tensor, nn

# Shapes: B texts behind one prompt, T tokens of each, V vocabulary.

BLOCK = 5
"""A verification of four draft tokens."""


@torch.inference_mode()
def read(model: nn.Module, prompt: list[int], texts_BT: Tensor, *, width: int | None = None) -> Tensor:
    """Logits [B, T, V] that each token of `texts_BT` was to be chosen by, on the model's device.

    Args:
        prompt: what stands before every text; for an encoder-decoder model, what its encoder reads.
        texts_BT: [B, T]; what a text's last token is makes no difference.
        width: tokens of a forward pass behind the prompt's; None reads everything in one.
    """
    device = next(model.parameters()).device
    texts_BT = texts_BT.to(device)
    B, T = texts_BT.shape
    prompt_BP = torch.tensor([prompt], device=device).expand(B, -1)
    fixed: dict[str, object] = {}
    name = "input_ids"
    if model.config.is_encoder_decoder:
        states = model.get_encoder()(input_ids=prompt_BP, attention_mask=torch.ones_like(prompt_BP))
        fixed, name = {"encoder_outputs": states, "attention_mask": torch.ones_like(prompt_BP)}, "decoder_input_ids"
        prompt_BP = torch.full((B, 1), _start_token(model), device=device)
    ids = torch.cat([prompt_BP, texts_BT[:, :-1]], 1)
    first = prompt_BP.shape[1]
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    if width is None:
        keep = {"logits_to_keep": T} if keeps else {}
        return model(**{name: ids}, **fixed, **keep, use_cache=False).logits[:, -T:]
    logits, cache = [], None
    ends = [*range(first, ids.shape[1], width), ids.shape[1]]
    for start, end in zip([0, *ends], ends, strict=False):
        keep = {"logits_to_keep": 1} if keeps and start == 0 else {}
        output = model(**{name: ids[:, start:end]}, **fixed, **keep, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[:, -1:] if start == 0 else output.logits)
    return torch.cat(logits, 1)


def _start_token(model: nn.Module) -> int:
    generation = getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None)
    return model.config.decoder_start_token_id if generation is None else generation
