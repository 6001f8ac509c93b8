"""Which sequences make up a step: a function of seed and step alone, so that nothing has to be saved to resume."""

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor


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


def collate(rows: Dataset, indices: list[int], device: torch.device) -> Batch:
    """Pad the rows on the right to the longest of them."""
    chosen = [rows[index] for index in indices]
    width = max(len(row["input_ids"]) for row in chosen)
    ids_BT = torch.zeros(len(chosen), width, dtype=torch.long)
    attention_BT = torch.zeros_like(ids_BT)
    mask_BT = torch.zeros(len(chosen), width, dtype=torch.bool)
    for i, row in enumerate(chosen):
        length = len(row["input_ids"])
        ids_BT[i, :length] = torch.tensor(row["input_ids"])
        attention_BT[i, :length] = 1
        mask_BT[i, row["prompt_length"] - 1 : length - 1] = True
    return Batch(ids_BT.to(device), attention_BT.to(device), mask_BT.to(device))


def response_tokens(rows: Dataset, indices: list[int]) -> int:
    """Unmasked tokens of a global batch; every process can count them, so nothing has to be exchanged."""
    return sum(len(rows[index]["input_ids"]) - rows[index]["prompt_length"] for index in indices)
