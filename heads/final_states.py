"""What a language model's lm_head reads, for a batch of text: the states that logits are made from."""

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.documents import document_positions

# Shapes: B texts, T positions, S positions of the source, H hidden size.


def final_states(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    source_BS: Tensor | None = None,
    source_mask_BS: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """[B, T, H]; an encoder-decoder model reads the source and, in its decoder, the input ids.

    `documents_BT`: see `TeacherSignals`. Not every model keeps documents apart, see `require_packable`.
    """
    if documents_BT is not None:
        return _packed_states(model, input_ids_BT, attention_mask_BT, documents_BT)
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


def _packed_states(model: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """transformers tells documents apart by positions that restart, but only where it is given no mask and no cache."""
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"data.pack=True with an encoder-decoder model (model_type={model.config.model_type!r}); "
            "expected data.pack=false"
        )
    # Padding stays at position 0: nothing reads it, and however much there is, learned positions do not run out.
    position_ids_BT = document_positions(documents_BT) * attention_mask_BT
    return model.base_model(input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False).last_hidden_state
