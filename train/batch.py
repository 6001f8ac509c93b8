"""The rows of a step: which they are, and one padded batch of them.

The rows depend on seed and step alone, so that resuming needs no saved state.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from draftsmith.heads.hidden_states import ProcessorInputs, document_numbers

# Shapes: B sequences, T positions, S positions of the source.

MULTIPLE = 16
"""Batches are padded to a multiple of this length. On a CPU oneDNN keeps kernels for every length that occurs, so a run
with few lengths takes less memory. On a GPU matrix products are fastest at such sizes."""

ReadImages = Callable[[str, list[int]], ProcessorInputs | None]
"""Returns the processor's tensors for a text, from the column `images` and the tokens of its row."""


def batch_indices(
    seed: int, step: int, batch_size: int, length: int, excluded: Collection[int] = frozenset()
) -> list[int]:
    """Return the rows of global batch `step`; epochs are shuffled separately and follow each other without a gap.

    The next row takes the place of one that is excluded, so that nothing else changes; at least one row must remain.
    """
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, length)
        row = _permutation(seed, epoch, length)[place]
        while row in excluded:
            row = (row + 1) % length
        indices.append(row)
    return indices


_last: dict[tuple[int, int, int], list[int]] = {}


def _permutation(seed: int, epoch: int, length: int) -> list[int]:
    key = (seed, epoch, length)
    if key not in _last:
        if len(_last) > 1:
            _last.clear()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        _last[key] = torch.randperm(length, generator=generator).tolist()
    return _last[key]


@dataclass(frozen=True)
class Batch:
    """A padded part of a global batch. `mask_BT` marks positions whose next token belongs to a response."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    mask_BT: Tensor
    source_BS: Tensor | None = None
    """Input of an encoder; the input ids are then the decoder's."""
    source_mask_BS: Tensor | None = None
    rows: Sequence[int] = ()
    """Indices of its rows in the data."""
    documents_BT: Tensor | None = None
    """For packed rows, the number of each position's document; see `TeacherSignals`."""
    inputs: Sequence[ProcessorInputs | None] = ()
    """The processor's tensors of each row, where one of them begins with images."""


def collate(
    rows: Dataset,
    indices: list[int],
    device: torch.device,
    start_token: int | None = None,
    read_images: ReadImages | None = None,
    limit: int | None = None,
) -> Batch:
    """Pad rows on the right to one length: that of the longest, or the multiple of `MULTIPLE` after it.

    Args:
        limit: the length up to which rows are padded to a multiple; see `model_config.context_limit`.
        read_images: returns the processor's tensors of a row; for data with images.
        start_token: an encoder-decoder target's; its encoder then reads the prompts, and its decoder this token and
            the responses.
    """
    chosen = [rows[index] for index in indices]
    texts, spans = [row["input_ids"] for row in chosen], [row["spans"] for row in chosen]
    source_BS = source_mask_BS = None
    if start_token is not None:
        lengths = [of_row[0][0] for of_row in spans]
        prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        source_BS, source_mask_BS = _padded(prompts, device, limit)
        texts = [[start_token, *text[length:]] for text, length in zip(texts, lengths, strict=True)]
        spans = [[[1, len(text)]] for text in texts]
    ids_BT, attention_BT = _padded(texts, device, limit)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, of_row in enumerate(spans):
        for start, end in of_row:
            mask_BT[i, start - 1 : end - 1] = True
    documents_BT = None
    if "documents" in rows.column_names:
        documents_BT = document_numbers([row["documents"] for row in chosen], ids_BT.shape[1]).to(device)
    inputs: list[ProcessorInputs | None] = []
    if read_images is not None and any(row["images"] for row in chosen):
        inputs = [read_images(row["images"], row["input_ids"]) for row in chosen]
    return Batch(ids_BT, attention_BT, mask_BT, source_BS, source_mask_BS, indices, documents_BT, inputs)


def _padded(texts: list[list[int]], device: torch.device, limit: int | None) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T], padded with zeros, and the attention mask [B, T]."""
    longest = max(map(len, texts))
    width = -(-longest // MULTIPLE) * MULTIPLE
    if limit is not None:
        width = min(width, max(longest, limit))
    ids_BT = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    mask_BT = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return ids_BT.to(device), mask_BT.to(device)


def response_tokens(rows: Dataset, indices: list[int]) -> int:
    """Return the number of trained tokens in a global batch; every process counts them without communication."""
    return sum(end - start for index in indices for start, end in rows[index]["spans"])
