"""What a language model's lm_head reads, for a batch of text: the states that logits are made from."""

import torch
from torch import Tensor, nn

# Shapes: B texts, T positions, S positions of the source, H hidden size.


def final_states(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    source_BS: Tensor | None = None,
    source_mask_BS: Tensor | None = None,
) -> Tensor:
    """[B, T, H]; an encoder-decoder model reads the source and, in its decoder, the input ids."""
    if source_BS is None:
        return model.base_model(
            input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False
        ).last_hidden_state
    # What lies between decoder and lm_head differs (T5 scales), so the lm_head is asked what it was given.
    read: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        model(
            input_ids=source_BS,
            attention_mask=torch.ones_like(source_BS) if source_mask_BS is None else source_mask_BS,
            decoder_input_ids=input_ids_BT,
            use_cache=False,
        )
    finally:
        handle.remove()
    return read[0]
