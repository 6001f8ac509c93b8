"""Which sequences make up a step: a function of seed and step alone, so that nothing has to be saved to resume."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from draftsmith.heads.documents import document_numbers


def batch_indices(seed: int, step: int, batch_size: int, length: int) -> list[int]:
    """The rows of global batch `step`: epochs are shuffled one by one and follow each other without a gap."""
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, length)
        indices.append(_permutation(seed, epoch, length)[place])
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
    """What an encoder reads; the input ids are then the decoder's."""
    source_mask_BS: Tensor | None = None
    rows: Sequence[int] = ()
    """Which rows of the data it holds."""
    documents_BT: Tensor | None = None
    """Of packed rows: which document each position belongs to; see `TeacherSignals`."""


def collate(rows: Dataset, indices: list[int], device: torch.device, start_token: int | None = None) -> Batch:
    """Pad the rows on the right to the longest of them.

    `start_token`: an encoder-decoder target's; prompts then go to its encoder, responses behind it to its decoder.
    """
    chosen = [rows[index] for index in indices]
    texts, spans = [row["input_ids"] for row in chosen], [row["spans"] for row in chosen]
    sources = None
    if start_token is not None:
        prompts = [of_row[0][0] for of_row in spans]
        sources = _padded([text[:length] for text, length in zip(texts, prompts, strict=True)], device)
        texts = [[start_token, *text[length:]] for text, length in zip(texts, prompts, strict=True)]
        spans = [[[1, len(text)]] for text in texts]
    ids_BT, attention_BT = _padded(texts, device)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, of_row in enumerate(spans):
        for start, end in of_row:
            mask_BT[i, start - 1 : end - 1] = True
    documents_BT = None
    if "documents" in rows.column_names:
        documents_BT = document_numbers([row["documents"] for row in chosen], ids_BT.shape[1]).to(device)
    return Batch(ids_BT, attention_BT, mask_BT, *(sources or (None, None)), rows=indices, documents_BT=documents_BT)


def _padded(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T], zeros behind, and the mask of what is text."""
    width = max(map(len, texts))
    ids_BT = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    mask_BT = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return ids_BT.to(device), mask_BT.to(device)


def response_tokens(rows: Dataset, indices: list[int]) -> int:
    """Trained tokens of a global batch; every process can count them, so nothing has to be exchanged."""
    return sum(end - start for index in indices for start, end in rows[index]["spans"])
