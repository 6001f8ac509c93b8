"""What a language model's lm_head reads, for a batch of text, and the map from these states to the model's logits.

What a target's layers put out during a forward pass, for drafters that read more than its final state.

Rows that hold several documents one after the other: which position belongs to which, and what it may see.

documents_BT   0 0 0 1 1 2 2 2        positions   0 1 2 0 1 0 1 2
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL

# Shapes: B rows, T positions.


def document_numbers(lengths: Sequence[Sequence[int]], width: int) -> Tensor:
    """[B, T]: the document of each position, for rows whose documents have these lengths, padded on the right to
    `width`. The padding is one more document, so that nothing real is ever seen together with it."""
    rows = []
    for row in lengths:
        padding = width - sum(row)
        assert padding >= 0, f"documents of {sum(row)} tokens in a row of {width}"
        rows.append(torch.arange(len(row) + 1).repeat_interleave(torch.tensor([*row, padding])))
    return torch.stack(rows)


def document_positions(documents_BT: Tensor) -> Tensor:
    """[B, T]: the position inside its own document, so that a document is read as if it stood alone."""
    places_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_BT - places_BT.where(first_BT, 0).cummax(1).values


def positions_like(ids_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """[B, T] positions inside documents, or [1, T] where every row is one."""
    if documents_BT is None:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    return document_positions(documents_BT)


def causal_in_documents(documents_BT: Tensor) -> Tensor:
    """bool [B, 1, T, T]: each position sees itself and what stands before it in its own document."""
    return (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]).tril()


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


def layers_name(model: nn.Module) -> str:
    """The name of a decoder-only model's list of layers."""
    return layer_lists(model)[0]


def layer_lists(model: nn.Module) -> list[str]:
    """The names of a model's lists of layers: one, or an encoder's and a decoder's."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    wanted = 2 if model.config.is_encoder_decoder else 1
    if len(names) < wanted:
        raise ConfigError(
            f"model {type(model).__name__} has no list of {depth} layers to copy from; expected init='random'"
        )
    return names[:wanted]


# Shapes: B rows, Q tokens fed, F features a position.


class Features:
    """Keeps the outputs of chosen layers of each pass, at no cost, as long as it lives.

    Args:
        layers: see `Needs.layers`.
    """

    def __init__(self, model: nn.Module, layers: tuple[int, ...]) -> None:
        require_layers(model, layers)
        self._layers = layers
        self._seen: dict[int, Tensor] = {}
        blocks = model.get_submodule(layers_name(model)) if set(layers) - {FINAL} else []
        for layer in set(layers):
            module = model.base_model if layer == FINAL else blocks[layer - 1]
            weakref.finalize(self, module.register_forward_hook(_keeping(self._seen, layer)).remove)

    def take(self) -> Tensor:
        """[B, Q, F] of the last pass, the layers side by side in the order that was asked for."""
        return torch.cat([self._seen[layer] for layer in self._layers], -1)


def _keeping(seen: dict[int, Tensor], layer: int) -> object:
    def keep(_: nn.Module, arguments: tuple, output: object) -> None:
        state = getattr(output, "last_hidden_state", output)
        seen[layer] = state[0] if isinstance(state, tuple) else state

    return keep


def require_layers(model: nn.Module, layers: tuple[int, ...]) -> None:
    """ConfigError unless `model` is decoder-only and has these layers."""
    if not layers:
        return
    if model.config.is_encoder_decoder:
        raise ConfigError(f"model_type={model.config.model_type!r}; expected a decoder-only target for these features")
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    wrong = [layer for layer in layers if layer != FINAL and not 1 <= layer <= depth]
    if wrong:
        raise ConfigError.of("drafter layers", list(layers), f"1 to {depth}, which is what the target has")
