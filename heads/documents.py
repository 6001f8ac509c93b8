"""Rows that hold several documents one after the other: which position belongs to which, and what it may see.

documents_BT   0 0 0 1 1 2 2 2        positions   0 1 2 0 1 0 1 2
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
