"""The encoder's half of an encoder-decoder model: sources are read once, and never rolled back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from draftsmith.decode.cache import PointerCache
from draftsmith.decode.relative import biased_layers
from draftsmith.errors import ConfigError

# Shapes: B rows, T source positions, H hidden size.


class Encoded:
    """What the encoder made of the sources. The decoder's cross-attention keys and values are made from it once.

    Args:
        states: [T, H] of each source where another call has encoded it already; the encoder is not asked then.
    """

    def __init__(self, model: nn.Module, sources: Sequence[list[int]], states: Sequence[Tensor] | None = None) -> None:
        self.biased = biased_layers(model.get_decoder())
        self._caches: EncoderDecoderCache | None = None
        if states is not None:
            self._states_BTH = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
            self._mask_BT = nn.utils.rnn.pad_sequence([state_TH.new_ones(len(state_TH)) for state_TH in states], True)
            self._mask_BT = self._mask_BT.long()
            return
        if not all(sources):
            raise ConfigError("input_ids=None; expected the source's tokens: this drafter has an encoder of its own")
        device = next(model.parameters()).device
        width = max(len(source) for source in sources)
        ids_BT = torch.tensor([source + [0] * (width - len(source)) for source in sources], device=device)
        lengths_B1 = torch.tensor([[len(source)] for source in sources], device=device)
        self._mask_BT = (torch.arange(width, device=device) < lengths_B1).long()
        self._states_BTH = model.get_encoder()(input_ids=ids_BT, attention_mask=self._mask_BT).last_hidden_state

    def inputs(self, ids: Tensor, mask: Any, cache: PointerCache) -> dict[str, Any]:
        """Arguments of the model's forward pass for decoder tokens `ids` [B, Q]."""
        if self._caches is None:
            self._caches = EncoderDecoderCache(cache, DynamicCache())
        return {
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
            "encoder_outputs": BaseModelOutput(last_hidden_state=self._states_BTH),
            "attention_mask": self._mask_BT,
            "past_key_values": self._caches,
        }

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._mask_BT, self._states_BTH = self._mask_BT[rows], self._states_BTH[rows]
        if self._caches is not None:
            for layer in self._caches.cross_attention_cache.layers:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
