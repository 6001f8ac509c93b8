"""A transformers KV cache with preallocated storage: it appends in place and rolls back by changing a length.

    row 0   | committed ......... | draft nodes ..|
    row 1   | committed .... | draft nodes ..|
             slot = position ^     ^ `lengths`: the slot of the next token, for each row

Rows have no padding between their tokens, so the layout of a row does not depend on the others.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import ConfigError
from draftsmith.heads.rows import Counts, Rows

FIRST_SLOTS = 256
"""Slots that are allocated in addition to the first sequence; storage doubles when they are full."""

CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Arguments by which models take their cache; transformers 5.24 renamed most of them to the first."""
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
RECURRENT_TYPES = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
"""Layer types of transformers whose layers hold such states."""

# Shapes: B rows, Q tokens fed, S slots.


def cache_name(names: Iterable[str]) -> str:
    """Return the name of the argument, and output, of a model that holds its cache; empty if none does."""
    return next((name for name in CACHES if name in names), "")


class WritePosition:
    """The slots that the next forward pass writes to; shared by all layers."""

    def __init__(self) -> None:
        self.end = 0
        """Number of slots that attention reads after the write."""
        self.start: int | None = 0
        """The first slot written; None where rows differ."""
        self.slots_BQ: Tensor | None = None
        """The slots written; None where they are the same for all rows."""
        self.row: int | None = None
        """The only row that is read; None for all."""


class RollbackLayer(CacheLayerMixin):
    """One layer's keys and values, [B, heads, S, head_dim]."""

    is_sliding = False
    is_croppable = True

    def __init__(self, place: WritePosition, rows: int, longest: int | None, fixed: bool) -> None:
        super().__init__()
        self._place, self._rows, self._longest, self._fixed = place, rows, longest, fixed
        self.indexer: RollbackLayer | None = None
        """The keys of the layer's indexer, in attention over the tokens that score best."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, Q, head_dim = key_states.shape
        B = self._rows
        self.dtype, self.device = key_states.dtype, key_states.device
        slots = Q + FIRST_SLOTS if self._longest is None else min(Q + FIRST_SLOTS, max(Q, self._longest))
        if self._fixed:
            assert self._longest is not None
            slots = self._longest
        self.keys = key_states.new_zeros(B, heads, slots, head_dim)
        self.values = value_states.new_zeros(B, value_states.shape[1], slots, value_states.shape[-1])
        if self._fixed:
            for storage in (self.keys, self.values):
                torch._dynamo.mark_static_address(storage)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write to the slots of `WritePosition` and return views of all slots up to its end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, end = self._place, self._place.end
        keys, values = self._held(end)
        row = place.row
        if row is not None:
            keys, values = keys[row : row + 1], values[row : row + 1]
        elif keys.shape[0] > key_states.shape[0]:  # rows of sequences that have ended
            keys, values = keys[: len(key_states)], values[: len(key_states)]
        slots_BQ = place.slots_BQ
        if slots_BQ is None:
            assert place.start is not None
            written = slice(place.start, place.start + key_states.shape[2])
            keys[:, :, written] = key_states
            values[:, :, written] = value_states
        else:
            rows_B1 = torch.arange(slots_BQ.shape[0], device=slots_BQ.device)[:, None]
            keys[rows_B1, :, slots_BQ] = key_states.transpose(1, 2)
            values[rows_B1, :, slots_BQ] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write an indexer's keys [B, Q, index_head_dim] as `update` does and return those of all slots."""
        if self.indexer is None:
            self.indexer = RollbackLayer(self._place, self._rows, self._longest, self._fixed)
        keys_B1QD = indexer_key_states[:, None]
        return self.indexer.update(keys_B1QD, keys_B1QD[..., :0])[0][:, 0]

    @property
    def _storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values including their empty slots; allocated by the first `update`."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _held(self, needed: int) -> tuple[Tensor, Tensor]:
        """Return the storage, which is extended where it has fewer slots than `needed`."""
        keys, values = self._storage
        slots = keys.shape[2]
        if needed > slots:
            # Storage doubles, so each token is copied once on average, whatever the length of the sequence.
            more = max(needed, 2 * slots) - slots
            self.keys, self.values = keys, values = _padded(keys, more), _padded(values, more)
        return keys, values

    def move(self, to_Bk: Tensor, from_Bk: Tensor) -> None:
        """Copy slots `from_Bk` of the first B rows to slots `to_Bk`; a layer that reads another's keys has none."""
        rows_B1 = torch.arange(len(to_Bk), device=to_Bk.device)[:, None]
        for storage in self._storage if self.is_initialized else ():
            storage[rows_B1, :, to_Bk] = storage[rows_B1, :, from_Bk]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; rows move to the front only, and the storage of the others stays."""
        assert all(to <= row for to, row in enumerate(rows)), "a row would be overwritten before it is moved"
        for storage in self._storage if self.is_initialized else ():
            for to, row in enumerate(rows):
                if to != row:
                    storage[to] = storage[row]

    def clear(self) -> None:
        """Set all slots to zero."""
        for storage in self._storage if self.is_initialized else ():
            storage.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.end, 0

    def get_seq_length(self) -> int:
        return self._place.start or 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        raise NotImplementedError("`RollbackCache.lengths` is changed instead")


def _padded(x: Tensor, slots: int) -> Tensor:
    """Return `x` [B, heads, S, head_dim] followed by empty slots."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], slots, x.shape[3])], 2)


class RollbackCache(Cache):
    """A cache that appends in place and rolls back without copying.

    transformers' `DynamicCache` copies all keys and values at every step; this cache copies new ones only.

    Args:
        longest: number of tokens of the longest sequence at its end, which limits what is allocated at first; None if
            unknown.
        fixed: allocate `longest` slots at once, and keep this storage when sequences end.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: int,
        device: torch.device,
        longest: int | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        text_config = config.get_text_config(decoder=True)
        names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")  # the last is BART's encoder's number
        depth = next(number for name in names if (number := getattr(text_config, name, None)))
        self.place = WritePosition()
        self.multiple = 1
        """After the prompt, the number of slots that attention reads is a multiple of this."""
        self.lengths = Counts([0] * rows, device)
        """Number of committed tokens of each row."""
        self._layers = [RollbackLayer(self.place, rows, longest, fixed) for _ in range(depth)]
        super().__init__(layers=[*self._layers])

    def aim(self, starts: Counts, count: int) -> None:
        """Set the slots of the next forward pass: `count` tokens per row, starting at `starts`."""
        self.place.row = None
        multiple = self.multiple if max(starts) else 1
        self.place.end = -(-(max(starts) + count) // multiple) * multiple
        if starts.equal:
            self.place.start, self.place.slots_BQ = starts[0], None
        else:
            self.place.start = None
            self.place.slots_BQ = starts.on_device_B[:, None] + torch.arange(count, device=starts.device)

    def aim_at(self, row: int, count: int) -> None:
        """Set the slots of a forward pass over the first `count` tokens of one row."""
        self.place.row, self.place.start, self.place.end, self.place.slots_BQ = row, 0, count, None

    def keep(self, slots: Rows) -> None:
        """Commit for each row the tokens in these slots, in order; slots are counted from the end of its tokens."""
        if not slots.rise_from_0:
            start_B1 = self.lengths.on_device_B[:, None]
            to_Bk = start_B1 + torch.arange(slots.width, device=slots.device)
            for layer in self._stores():  # the padding of shorter rows is copied to slots that later tokens take
                layer.move(to_Bk, start_B1 + slots.values_BW)
        self.lengths = self.lengths + slots.counts

    def clear(self, rows: int) -> None:
        """Begin again with this number of empty sequences."""
        self.place.start, self.place.end, self.place.slots_BQ = 0, 0, None
        self.lengths = Counts([0] * rows, self.lengths.device)
        for layer in self._stores():
            layer.clear()

    @property
    def is_allocated(self) -> bool:
        """Storage exists: the first pass allocates it."""
        return any(layer.is_initialized for layer in self._layers)

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        for layer in self._stores():
            layer.keep_rows(rows)
        self.lengths = self.lengths.keep(rows)

    def _stores(self) -> list[RollbackLayer]:
        """Return the layers and their indexers."""
        return [store for layer in self._layers for store in (layer, layer.indexer) if store is not None]


def refuse_other_layers(config: PreTrainedConfig) -> None:
    """Raise ConfigError for a model with layers whose states are not rolled back."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = layer_types - ATTENTION_TYPES - {"moe", "mlp"} - RECURRENT_TYPES
    if others:
        raise ConfigError(
            f"model_type={config.model_type!r} has layers of type {sorted(others)}; expected attention of type "
            f"{', '.join(sorted(ATTENTION_TYPES))} or recurrent layers: others cannot discard rejected draft tokens"
        )
