"""Drafters whose q at a depth does not depend on the tokens before it in the draft: one pass serves the whole tree."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.heads.drafter import TrainableDrafter, Tree


class ByDepth(TrainableDrafter):
    """Answers every node with the logits of its depth."""

    @abstractmethod
    def logits_at(self, depth: int) -> Tensor:
        """[B, V] for the token behind a node at `depth`; `begin` has answered for depth 0."""

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        depths = {tree.depths[node] for tree, wanted in zip(trees, nodes, strict=True) for node in wanted}
        by_depth = {depth: self.logits_at(depth) for depth in depths}
        some = next(iter(by_depth.values()))
        return [
            torch.stack([by_depth[tree.depths[node]][row] for node in wanted]) if wanted else some[:0]
            for row, (tree, wanted) in enumerate(zip(trees, nodes, strict=True))
        ]
