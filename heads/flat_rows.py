"""The sequences of a batch as one flat row without padding, in which each sequence is attended for itself.

    rows [2, 4]   a b c .        flat row [1, 6]   a b c d e f        groups   sequences of 3, 2 and 1 tokens
                  d e|f .                          (packed: d e and f are two documents)

A model's linear layers then compute no padding. Its attention layers call `attend`, which is registered with
transformers beside sdpa: a causal pass for each length that occurs, where sdpa needs a mask of the whole row for packed
documents.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from draftsmith.heads.model_config import SPECIAL_ATTENTION, QueryScales, configs_of, implementation, text_config

# Shapes: B rows, T positions, N positions of the flat row, X any states, K key/value heads, d head size.

NAME = "draftsmith_flat_rows"
"""Name of `attend` among the attention implementations of transformers."""
MULTIPLE = 64
"""Flat rows are filled up to a multiple of this length, so that few lengths occur; see `train.step.MULTIPLE`."""
_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types of transformers; others are recurrent, or an indexer chooses what a token sees."""


class FlatRows:
    """The sequences of padded rows, or the documents of packed ones, longest first.

    Args:
        attention_mask_BT: 1 at tokens; rows are padded on the right.
        documents_BT: see `TeacherSignals`; None where each row is one sequence.
        configs: attributes of the configs of the layers that call `attend`.
        scales: the layers whose queries depend on positions otherwise than by rotation.
    """

    def __init__(
        self,
        attention_mask_BT: Tensor,
        documents_BT: Tensor | None,
        configs: tuple[dict[str, Any], ...],
        scales: QueryScales,
    ) -> None:
        self.shape, device = attention_mask_BT.shape, attention_mask_BT.device
        self._configs, self._scales = configs, scales
        B, T = self.shape
        texts_BT = (torch.arange(B, device=device)[:, None] * (T + 1)).expand(B, T)
        texts_BT = texts_BT if documents_BT is None else texts_BT + documents_BT
        kept_N = attention_mask_BT.flatten().nonzero()[:, 0]
        _, counts = texts_BT.flatten()[kept_N].unique_consecutive(return_counts=True)
        sequences = sorted(kept_N.split(counts.tolist()), key=len, reverse=True)
        self.places_N = torch.cat(sequences)
        """Place in the flattened rows of each token."""
        lengths = [len(sequence) for sequence in sequences]
        self.longest, tokens = lengths[0], len(self.places_N)
        self.filling = min(-tokens % MULTIPLE, B * T - tokens)
        """Positions after the last sequence, which no token attends to."""
        self.width = tokens + self.filling
        self.groups = [(length, len(list(equal))) for length, equal in groupby(lengths)]
        """Length and number of sequences that are equally long."""
        restarting = [torch.arange(length, device=device) for length in lengths]
        self._positions_1N = torch.cat([*restarting, kept_N.new_zeros(self.filling)])[None]

    def arguments(self, input_ids_BT: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs: tokens, and positions that restart in each sequence."""
        ids_N = input_ids_BT.flatten()[self.places_N]
        ids_1N = nn.functional.pad(ids_N, (0, self.filling))[None]
        # With a mask, transformers does not search the positions for documents to make a mask of its own.
        return {"input_ids": ids_1N, "attention_mask": torch.ones_like(ids_1N), "position_ids": self._positions_1N}

    def rows(self, states_1NX: Tensor) -> Tensor:
        """Return states [B, T, X] in the rows, zero at padding."""
        B, T = self.shape
        rows_MX = states_1NX.new_zeros(B * T, states_1NX.shape[-1])
        rows_MX[self.places_N] = states_1NX[0, : len(self.places_N)]
        return rows_MX.unflatten(0, (B, T))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the layers with these configs attend within the sequences of this flat row."""
        token = _READ.set(self)
        try:
            with implementation(self._configs, NAME), self._scales.reading(self._positions_1N):
                yield
        finally:
            _READ.reset(token)


_FITTING: "WeakKeyDictionary[PreTrainedModel, tuple[dict[str, Any], ...]]" = WeakKeyDictionary()
"""The attributes of the layers' configs by model: of models that read flat rows; empty for others."""
_READ: ContextVar[FlatRows | None] = ContextVar("flat row that a model of this thread reads", default=None)


def read_flat(model: PreTrainedModel, flat: bool = True) -> bool:
    """Let `final_states` read flat rows with `model`, or with False no longer; return whether it will.

    Requires layers that choose their attention function by name, and use sdpa.
    """
    types = getattr(text_config(model), "layer_types", None) or ()
    named = getattr(model, "_supports_attention_backend", False) and not model.config.is_encoder_decoder
    fits = flat and named and set(types) <= _TYPES
    _FITTING[model] = tuple(map(vars, configs_of(model, "sdpa"))) if fits else ()
    return bool(_FITTING[model])


def is_measured(model: PreTrainedModel) -> bool:
    """Return whether `read_flat` has been called."""
    return model in _FITTING


@contextmanager
def padded_reads(model: PreTrainedModel) -> Iterator[None]:
    """Let `final_states` read padded rows inside the context, even where `model` reads flat rows."""
    before = _FITTING.pop(model, None)
    try:
        yield
    finally:
        if before is not None:
            _FITTING[model] = before


def flat_rows(model: PreTrainedModel, attention_mask_BT: Tensor, documents_BT: Tensor | None) -> FlatRows | None:
    """Return the flat row to read instead of these rows; None where `model` reads the rows.

    Rows without documents are read flat on a CPU only: a GPU would start more kernels for less work.
    """
    configs = _FITTING.get(model)
    if not configs or (documents_BT is None and attention_mask_BT.device.type != "cpu"):
        return None
    flat = FlatRows(attention_mask_BT, documents_BT, configs, QueryScales(model))
    return flat if documents_BT is not None or flat.width < attention_mask_BT.numel() else None


def again_reading() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts of a forward pass and of its repetition in the backward pass, for torch's `checkpoint`."""
    flat = _READ.get()
    return nullcontext(), nullcontext() if flat is None else flat.reading()


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Store only each block's inputs for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    This takes less memory and one more forward pass of the blocks; gradients stay the same.
    """
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=again_reading, **options)

    return again


def as_rows(states: Tensor) -> Tensor:
    """Return states that a module computes: in rows while a flat row is read, else as they are."""
    if torch.compiler.is_compiling():  # compiled passes read rows; torch cannot compile a look at a ContextVar
        return states
    flat = _READ.get()
    return states if flat is None else flat.rows(states)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output [1, N, heads, d] within each sequence of the flat row that is read.

    The mask, if there is one, is that of the longest sequence, from `_mask`; a window looks alike in every sequence.

    Raises:
        ValueError: for a layer that `attend` does not compute; the model then reads rows, see `measure_flat_rows`.
    """
    flat = _READ.get()
    assert flat is not None, "the name is in a config only while a flat row is read"
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    if not causal or any(kwargs.get(name) is not None for name in SPECIAL_ATTENTION):
        raise ValueError("attention that is more than a causal softmax")
    if any(x.shape[0] != 1 or x.shape[2] != flat.width for x in (query, key, value)):
        raise ValueError("attention over other positions than those of the row")
    dtype, wide = value.dtype, nullcontext()
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu") and query.requires_grad:
        # See `_fused_backward` of unrolled_attention.py.
        query, key, value, wide = query.float(), key.float(), value.float(), torch.autocast("cpu", enabled=False)
    settings = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    start, parts = 0, []
    for length, count in flat.groups:
        of_texts = slice(start, start := start + length * count)
        query_CKLd, key_CKLd, value_CKLd = (
            x[0, :, of_texts].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value)
        )
        mask = None if attention_mask is None else attention_mask[..., :length, :length]
        causal = mask is None
        with wide:
            out = scaled_dot_product_attention(query_CKLd, key_CKLd, value_CKLd, mask, is_causal=causal, **settings)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    parts.append(value.new_zeros(flat.filling, query.shape[1], value.shape[-1]))
    return torch.cat(parts)[None].to(dtype), None


def _mask(**options: Any) -> Tensor | None:
    """Return the mask of the longest sequence alone; None where all its tokens see all those before them."""
    flat = _READ.get()
    assert flat is not None, "see `attend`"
    lengths = {"batch_size": 1, "q_length": flat.longest, "kv_length": flat.longest}
    return sdpa_mask(**{**options, **lengths, "attention_mask": None})


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask)
