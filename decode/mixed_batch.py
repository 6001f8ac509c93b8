"""Drafts of different shapes as one batch."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft, Parents, children_of

# Shapes: B texts, N draft nodes, P = N + 1 places.


def united(shapes: Sequence[Parents]) -> tuple[Parents, list[list[int]]]:
    """Return the smallest shape that contains these, and for each of them its node, or `NO_NODE`, at every node of it.

    Siblings keep their order: the first child of a node is the first child of it in every shape that has it.
    """
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    """By parent and order among its children."""
    own: list[dict[int, int]] = []
    for shape in shapes:
        place, children = {ROOT: ROOT}, children_of(shape)
        for node, parent in enumerate(shape):
            key = place[parent], children[parent + 1].index(node)
            if key not in nodes:
                nodes[key] = len(parents)
                parents.append(key[0])
            place[node] = nodes[key]
        own.append({united: node for node, united in place.items()})
    return tuple(parents), [[of_text.get(node, NO_NODE) for node in range(len(parents))] for of_text in own]


class MixedBatch:
    """Chosen drafts of B texts, each of its own shape, which only the point-mass rule verifies.

    `tokens_BN`, `valid_BN`: as in a `DraftBatch`; N is the largest number of nodes.
    """

    drawn: ClassVar[bool] = False
    own: ClassVar[None] = None
    own_BN: ClassVar[None] = None

    def __init__(self, drafts: Sequence[Draft], device: torch.device | None = None) -> None:
        assert not any(draft.drawn for draft in drafts)
        self._shapes, self._nodes = [draft.parents for draft in drafts], max(map(len, drafts))
        values = [
            [[0, *own, *[0] * (self._nodes - len(draft))] for own in (draft.tokens, draft.parents, draft.depths)]
            for draft in drafts
        ]
        tokens_BP, parents_BP, self._depths_BP = torch.tensor(values, device=device).unbind(1)
        self.tokens_BN, self._places_BN = tokens_BP[:, 1:], parents_BP[:, 1:] + 1
        self.valid_BN = self._depths_BP[:, 1:] > 0

    @property
    def is_chain(self) -> bool:
        return False

    def parents_of(self, row: int) -> Parents:
        return self._shapes[row]

    def places(self) -> Tensor:
        """Return the place [B, N] of each node's parent: 0 for `ROOT`, i + 1 for node i."""
        return self._places_BN

    def depths(self) -> Tensor:
        """Return the depth [B, N + 1] of each place."""
        return self._depths_BP

    def __len__(self) -> int:
        return self._nodes
