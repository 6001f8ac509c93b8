"""What a language model's lm_head reads, for a batch of text, and the map from these states to the model's logits."""

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.documents import document_positions

# Shapes: B texts, T positions, S positions of the source, H hidden size, V vocabulary.


class CappedHead(nn.Module):
    """cap * tanh(logits / cap) of an lm_head's logits (Gemma 2, arXiv:2408.00118, section 2)."""

    def __init__(self, lm_head: nn.Module, cap: float) -> None:
        super().__init__()
        self.lm_head, self.cap = lm_head, cap

    @property
    def weight(self) -> Tensor:
        """[V, H]: the lm_head's."""
        return self.lm_head.weight

    def forward(self, states_nH: Tensor) -> Tensor:
        return torch.tanh(self.lm_head(states_nH) / self.cap) * self.cap


def logits_head(model: nn.Module) -> nn.Module | None:
    """Return the map from `final_states` to logits: the lm_head, with the soft cap that the config names; None without
    an lm_head."""
    lm_head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return CappedHead(lm_head, cap) if cap and lm_head is not None else lm_head


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
