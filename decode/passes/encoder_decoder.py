"""Encoder-decoder targets: encoder outputs, which are computed once, and T5's relative position bias for draft trees.

A T5 layer derives the distance between two tokens from their indices in the cache. Siblings of a tree have consecutive
indices although they have the same position in the text. The bias is therefore computed here from the positions, and
passed to the layer through its `position_bias` argument.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import MoeModelOutputWithPast

from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.decode.passes.attention import Attention
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.plan import Output, Plan, Reading
from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import NO_CONTEXT
from draftsmith.heads.rows import rows_of

if TYPE_CHECKING:
    from transformers.models.t5.modeling_t5 import T5Attention


def _is_biased(module: nn.Module) -> "TypeGuard[T5Attention]":
    """Return whether `module` is T5's attention with a table of biases, or a module with the same attributes."""
    return bool(getattr(module, "has_relative_attention_bias", False))


def biased_layers(decoder: PreTrainedModel) -> "list[T5Attention]":
    """Return the self-attention layers with a table of relative biases; ConfigError for layers unlike T5's.

    T5 has one such layer, whose bias all layers use.
    """
    layers = [module for module in decoder.modules() if _is_biased(module)]
    for layer in layers:
        takes = inspect.signature(layer.forward).parameters
        buckets_take = inspect.signature(layer._relative_position_bucket).parameters
        if "position_bias" not in takes or "bidirectional" not in buckets_take:
            raise ConfigError(
                f"model_type={decoder.config.model_type!r} computes relative positions from indices in the cache; "
                "expected layers that take a position_bias, as T5's do"
            )
    return layers


@contextmanager
def true_positions(layers: "list[T5Attention]", positions_BQ: Tensor, positions_BS: Tensor) -> Iterator[None]:
    """Make `layers` use queries at `positions_BQ` and keys at `positions_BS` for their bias, inside the context."""

    def hook(layer: "T5Attention", args: tuple, kwargs: dict[str, object]) -> tuple[tuple, dict[str, object]]:
        kwargs["position_bias"] = _bias(layer, positions_BS[:, None] - positions_BQ[:, :, None])
        return args, kwargs

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bias(layer: "T5Attention", distance_BQS: Tensor) -> Tensor:
    """Return the bias [B, heads, Q, S] from the layer's own buckets and table."""
    buckets_BQS = layer._relative_position_bucket(
        distance_BQS,
        bidirectional=False,
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
    )
    return layer.relative_attention_bias(buckets_BQS).permute(0, 3, 1, 2)


# Shapes: B rows, T source positions, H hidden size.


class EncodedSources:
    """The encoder's output for the sources, and the cross-attention cache that the decoder computes from it once.

    Args:
        states: [T, H] for each source that was encoded before; the encoder is not called then.
    """

    def __init__(
        self, model: PreTrainedModel, sources: Sequence[list[int]], states: Sequence[Tensor] | None = None
    ) -> None:
        self._caches: EncoderDecoderCache | None = None
        device = next(model.parameters()).device
        lengths = [len(source) for source in (sources if states is None else states)]
        self._mask_BT = pad_sequence([torch.ones(length, dtype=torch.long) for length in lengths], True).to(device)
        self._states_BTH = pad_sequence(list(_encoded(model, sources) if states is None else states), True)

    def inputs(self, cache: RollbackCache) -> tuple[dict[str, Any], EncoderDecoderCache]:
        """Return arguments of the model's forward pass, and its cache."""
        if self._caches is None:
            self._caches = EncoderDecoderCache(cache, DynamicCache())
        states = MoeModelOutputWithPast(last_hidden_state=self._states_BTH)  # some read router_logits
        return {"encoder_outputs": states, "attention_mask": self._mask_BT}, self._caches

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._mask_BT, self._states_BTH = rows_of(self._mask_BT, rows), rows_of(self._states_BTH, rows)
        if self._caches is not None:
            for layer in self._caches.cross_attention_cache.layers:
                assert isinstance(layer, CacheLayerMixin)
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys, layer.values = rows_of(layer.keys, rows), rows_of(layer.values, rows)


def _encoded(model: PreTrainedModel, sources: Sequence[list[int]]) -> list[Tensor]:
    """Return the encoder's output [T, H] for each source; those of one length are read together, none with padding.

    Padding beyond a sliding window would attend to nothing, which makes all states of its row NaN (T5Gemma).
    """
    if not all(sources):
        raise ConfigError("input_ids=None; expected the source's tokens: this drafter has an encoder of its own")
    states = [torch.empty(0)] * len(sources)
    for length in sorted(set(map(len, sources))):
        rows = [row for row, source in enumerate(sources) if len(source) == length]
        ids_bT = torch.tensor([sources[row] for row in rows], device=next(model.parameters()).device)
        encode = model.get_encoder()
        read_bTH = encode(input_ids=ids_bT, attention_mask=torch.ones_like(ids_bT)).last_hidden_state
        for row, states_TH in zip(rows, read_bTH, strict=True):
            states[row] = states_TH
    return states


class EncoderDecoderPasses(EagerPasses):
    """Passes of a decoder whose encoder reads its sources once."""

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache) -> None:
        native = Attention.of(model).native
        self._biased = [] if native else biased_layers(model.get_decoder())
        super().__init__(model, plan, cache)
        self._encoded = EncodedSources(model, plan.sources, plan.encoded)

    @property
    def _takes_positions(self) -> bool:
        return super()._takes_positions or bool(self._biased)

    def _mask(self, reading: Reading, positions_BQ: Tensor, visible_BQS: Tensor | None) -> Any:
        if not self._biased:
            return super()._mask(reading, positions_BQ, visible_BQS)
        positions_BS = reading.slot_positions(self.cache.place.end)
        self._relative = true_positions(self._biased, positions_BQ, positions_BS)
        return self._prepared(reading, positions_BQ, visible_BQS, positions_BS)

    def _inputs(self, reading: Reading, mask: Any) -> dict[str, Any]:
        inputs, caches = self._encoded.inputs(self.cache)
        tokens = {"decoder_input_ids": reading.ids_BQ, "decoder_attention_mask": mask}
        return {**inputs, **tokens, self._cache_name: caches}

    def _run(self, inputs: dict[str, Any], reading: Reading) -> Output:
        with self._relative if self._biased else NO_CONTEXT:
            return super()._run(inputs, reading)

    def drop(self, rows: list[int]) -> None:
        super().drop(rows)
        self._encoded.drop(rows)
