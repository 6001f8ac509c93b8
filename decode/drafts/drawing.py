"""Trees of tokens that are drawn from q: this module and chains.py alone make such drafts.

The tokens of such a draft were drawn one after the other, and all of them were kept. Verification rules that compare p
with q require this ("non-anticipation"): they are not lossless for tokens that were selected after their values were
known.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.heads.draft_tree import NO_NODE, Draft
from draftsmith.heads.rows import upload

# Shapes: B texts, m nodes of all texts, V vocabulary.


class DrawnDraft(Draft):
    """A draft of tokens that were drawn from q one after the other, all of which were kept; `Drawing` makes it."""

    def __init__(self, tokens: tuple[int, ...], parents: tuple[int, ...], q: tuple[Tensor, ...] | None = None) -> None:
        super().__init__(tokens, parents)
        self._q = q


class Drawing:
    """A tree of tokens that are drawn from q, all of which are kept; `draw_together` draws them.

    A token is submitted before it is known; tokens cannot be removed, and tokens that were not drawn cannot be added.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int, Tensor]] = []
        self.asked = 0
        """Number of draws that were asked for; a draw is none where the support of q was exhausted."""

    def add(self, token: int, parent: int, q_V: Tensor) -> None:
        """Keep a token that was drawn from q after `parent`; only `draw_together` calls this."""
        self._nodes.append((token, parent, q_V))

    def draft(self) -> Draft:
        """Return the draft of all tokens that were drawn."""
        tokens, parents, q = zip(*self._nodes, strict=True) if self._nodes else ((), (), ())
        return DrawnDraft(tokens, parents, q)


Draw = Callable[[Tensor, int | Tensor, Tensor | None], Tensor]
"""Weights [B, V], the numbers of the draws in their texts, and the rows that draw [B] (None: all) to indices [B]."""


class Wanted(NamedTuple):
    """Children to draw in one tree."""

    drawing: Drawing
    parents: Sequence[int]
    counts: Sequence[int]
    """Number of children of each parent."""
    start: int
    """Row of q after the first parent; those after the others follow it."""


def draw_together(
    trees: Sequence[Wanted], q_mV: Tensor, draw: Draw, *, may_empty: bool, chances: bool
) -> list[list[list[tuple[int, float | None]]]]:
    """Draw children for several trees at once, and read them in one transfer.

    Args:
        q_mV: the distributions after all nodes. With `may_empty` rows may be zero.
        draw: see `Draw`.

    Returns:
        For each tree and each of its parents the tokens of the children and, with `chances`, their probabilities under
        q; fewer children where the support of q is smaller.
    """
    columns, values, places, q = [], [], [], []
    for i, (rows, firsts, wanted) in enumerate(_by_parent(trees, q_mV.device)):
        weights_BV = q_BV = q_mV[rows]
        q.append(q_BV.unbind())
        counts = [tree.counts[i] if i < len(tree.counts) else 0 for tree in trees]
        for order in range(max(counts)):
            valid_B = wanted > order if isinstance(wanted, Tensor) and min(counts) <= order else None
            if may_empty or order > 0:
                if order > 0:
                    weights_BV = weights_BV.scatter(1, columns[-1][:, None].clamp_min(0), 0)
                left_B = weights_BV.any(-1)
                valid_B = left_B if valid_B is None else valid_B & left_B
            token_B = draw(weights_BV, firsts + order, valid_B)
            columns.append(token_B if valid_B is None else token_B.masked_fill(~valid_B, NO_NODE))
            values += [q_BV.gather(1, token_B[:, None])[:, 0].double()] if chances else []
            places.append(i)
    packed = torch.stack(columns, 1)
    table = (torch.cat([packed, torch.stack(values, 1)], 1) if chances else packed).tolist()
    drawn: list[list[list[tuple[int, float | None]]]] = [[[] for _ in tree.counts] for tree in trees]
    for number, (tree, row) in enumerate(zip(trees, table, strict=True)):
        for order, i in enumerate(places):
            if row[order] != NO_NODE:
                tree.drawing.add(int(row[order]), tree.parents[i], q[i][number])
                drawn[number][i].append((int(row[order]), row[len(places) + order] if chances else None))
        tree.drawing.asked += sum(tree.counts)
    return drawn


def _by_parent(
    trees: Sequence[Wanted], device: torch.device
) -> list[tuple[slice | Tensor, int | Tensor, int | Tensor]]:
    """Return for the i-th parent of all trees: its rows of q, the number of its first draw, and its draws.

    In one upload, where there are several trees: [B] each.
    """
    columns = []
    for i in range(max(len(tree.counts) for tree in trees)):
        rows = [tree.start + min(i, len(tree.counts) - 1) for tree in trees]
        firsts = [tree.drawing.asked + sum(tree.counts[:i]) for tree in trees]
        columns.append((rows, firsts, [tree.counts[i] if i < len(tree.counts) else 0 for tree in trees]))
    if len(trees) == 1:
        return [(slice(row, row + 1), first, count) for (row,), (first,), (count,) in columns]
    packed = upload([numbers for column in columns for numbers in column], device)
    return [(rows_B, firsts_B, wanted_B) for rows_B, firsts_B, wanted_B in packed.unflatten(0, (-1, 3))]
