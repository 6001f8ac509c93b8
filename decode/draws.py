"""The random draws of one round for several texts at once, as tensors.

A draw is identified by its kind and a node of its text's own draft, whatever the drafts of other texts are. The exact
tests replace `SeededDraws` by one that
enumerates all outcomes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from draftsmith.decode.sampling import index_at
from draftsmith.decode.uniforms import first_uniforms, round_keys, signed, uniforms
from draftsmith.heads.draft_tree import DraftBatch
from draftsmith.heads.rows import Counts, constant

NOT_DRAWN = -2
"""In place of a token that nothing has drawn; no node of a draft holds it."""
KINDS = 3
"""Numbers of each node: for the token that a draft draws, for its test, and for a token of the target."""
ROOM = 16
"""Nodes for which numbers are computed at once; more are computed when they are needed."""
Node = int | Tensor
"""The number of a draw in its text, for all texts or for each [B]."""

# Shapes: B texts, N nodes, P nodes and the root, V vocabulary.


class Draws(Protocol):
    """Random draws for B texts. A row that is not active draws nothing, and its result has no meaning."""

    def of(self, rows: Sequence[int]) -> Self:
        """Return the draws of these texts."""
        ...

    def drafted(self, weights_BV: Tensor, node: Node, active_B: Tensor | None = None) -> Tensor:
        """Return the token [B] that a draft draws as its draw number `node`, in proportion to its weights.

        The weights of active rows are not all zero.
        """
        ...

    def chain(self, length: int) -> Tensor | None:
        """Return the uniform numbers [B, length] of `drafted` for a chain; None where there are none."""
        ...

    def passes(self, probability_B: Tensor, node: Node, active_B: Tensor) -> Tensor:
        """Return [B] bool, the test of `node`: True with this probability; values of 1 and above are certain."""
        ...

    def until_failure(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        """Test the valid nodes in order until a test fails: return the number [B] of nodes before it, N if none does.

        With `valid_BN`, nodes that are not valid count as passed.
        """
        ...

    def longest(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        """Test the valid nodes from the last one on until a test passes: return its node + 1 [B], or 0."""
        ...

    def next(self, weights_BV: Tensor) -> Tensor:
        """Return the token [B] after the accepted path, in proportion to its weights, which are not all zero."""
        ...

    def along(self, weights_BPV: Tensor, draft: DraftBatch) -> Tensor:
        """Return [B, P]: a token after every place, in proportion to its weights [V].

        Only the tokens along one path have a meaning: the one on which each node holds the token that was drawn after
        its parent.
        """
        ...


MakeDraws = Callable[[Sequence[int], Sequence[int], torch.device], Draws]
"""Returns the draws of texts with these seeds and numbers of committed tokens; `Counts` hold `signed` seeds."""


def seeded_draws(seeds: Sequence[int], lengths: Sequence[int], device: torch.device) -> "SeededDraws":
    """Return the draws of a round of texts with these seeds and numbers of committed tokens."""
    if not isinstance(seeds, Counts):
        seeds = Counts(map(signed, seeds), device)
    return SeededDraws(round_keys(seeds.on_device_B, Counts.of(lengths, device).on_device_B))


class SeededDraws:
    """Draws from numbers that are a function of the texts' keys for this round; see `uniforms`."""

    def __init__(self, keys_B: Tensor) -> None:
        self._keys_B = keys_B
        self._numbers_BNK = first_uniforms(keys_B, KINDS * ROOM).unflatten(1, (-1, KINDS))

    def of(self, rows: Sequence[int]) -> "SeededDraws":
        if list(rows) == list(range(len(self._keys_B))):
            return self
        return SeededDraws(self._keys_B[constant(tuple(rows), self._keys_B.device)])

    def drafted(self, weights_BV: Tensor, node: Node, active_B: Tensor | None = None) -> Tensor:
        index_B = index_at(weights_BV, self._at(0, node))[:, 0]
        return index_B if active_B is None else index_B.clamp_max_(weights_BV.shape[1] - 1)

    def chain(self, length: int) -> Tensor:
        return self._numbers(0, length).contiguous()

    def passes(self, probability_B: Tensor, node: Node, active_B: Tensor) -> Tensor:
        return self._at(1, node)[:, 0] < probability_B

    def until_failure(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        failed_BN = self._numbers(1, probability_BN.shape[1]) >= probability_BN
        if valid_BN is not None:
            failed_BN &= valid_BN
        return (failed_BN.cumsum(1) == 0).sum(1)  # the nodes up to which no test has failed

    def longest(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        N = probability_BN.shape[1]
        passed_BN = self._numbers(1, N) < probability_BN
        if valid_BN is not None:
            passed_BN &= valid_BN
        return N - (passed_BN.flip(1).cumsum(1) == 0).sum(1)

    def next(self, weights_BV: Tensor) -> Tensor:
        return index_at(weights_BV, self._numbers(2, 1))[:, 0]

    def along(self, weights_BPV: Tensor, draft: DraftBatch) -> Tensor:
        numbers_BP = self._numbers(2, weights_BPV.shape[1])
        if not draft.is_chain:  # places of equal depth use the same number: no path has two of them
            numbers_BP = numbers_BP.gather(1, draft.depths().expand(weights_BPV.shape[:2]))
        return index_at(weights_BPV, numbers_BP[..., None])[..., 0]

    def _at(self, kind: int, node: Node) -> Tensor:
        """Return the number [B, 1] of one node in each row."""
        if isinstance(node, int):
            return self._numbers(kind, node + 1)[:, node:]
        return uniforms(self._keys_B, (KINDS * node + kind)[:, None])

    def _numbers(self, kind: int, count: int) -> Tensor:
        """Return the numbers [B, count] of drafted tokens (0), of tests (1), or of the target's tokens (2)."""
        if count > self._numbers_BNK.shape[1]:
            self._numbers_BNK = first_uniforms(self._keys_B, KINDS * 2 * count).unflatten(1, (-1, KINDS))
        return self._numbers_BNK[:, :count, kind]
