"""Drafts: the tokens that a drafter proposes in one round, chosen deterministically or drawn at random.

Tokens of a draft without q were chosen in any way: the best k, pruned, re-sorted, copied from the prompt. Those of a
draft with q were drawn from it one after the other, and all of them were kept; only `Drawing`, `ChainDrawing`,
`drawn_at_once` and `DraftBatch.of` set q. Verification rules that compare p with q require it: they are not lossless
for tokens that were selected after their values were known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.heads.rows import constant

# Shapes: N draft tokens, V vocabulary, B texts.

ROOT = -1
"""The parent of the first draft tokens: the last committed token."""
NO_NODE = -1
"""The token of a node that a text does not have, in a draft whose shape it shares with other texts."""
Parents = tuple[int, ...]
"""The shape of a draft: the parent of each node."""


@lru_cache(maxsize=4096)
def chain_parents(length: int) -> Parents:
    """Return the shape of a chain."""
    return tuple(range(-1, length - 1))


@lru_cache(maxsize=4096)
def depths_of(parents: Parents) -> list[int]:
    """Return the number of nodes on the path to each node, including itself."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


@lru_cache(maxsize=4096)
def children_of(parents: Parents) -> list[list[int]]:
    """Return the children of the root (entry 0) and of each node i (entry i + 1), in order."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        below[parent + 1].append(node)
    return below


@lru_cache(maxsize=4096)
def path_to(parents: Parents, node: int) -> list[int]:
    """Return the nodes from a child of the root to `node`; none for `ROOT`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


class _MayBeDrawn:
    """Drafts with or without the q that their tokens were drawn from; `_drawn` sets it."""

    _q: tuple[Tensor, ...] | None = None

    @property
    def drawn(self) -> bool:
        """Whether the tokens were drawn from q."""
        return self._q is not None

    @property
    def q(self) -> tuple[Tensor, ...]:
        """For each node the distribution after its parent, with all logits processors applied: [V], or [B, V].

        Siblings share it, and each was drawn without the earlier ones.
        """
        assert self._q is not None, "the tokens were chosen"
        return self._q


@dataclass(frozen=True)
class Draft(_MayBeDrawn):
    """A tree of draft tokens, chosen in any way or drawn from q. A chain is a tree with one path.

    Nodes are stored in topological order. `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token. Siblings hold different tokens.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        """Return a draft with one path of these tokens."""
        return Draft(tuple(tokens), chain_parents(len(tokens)))

    @cached_property
    def is_chain(self) -> bool:
        """True if every token is the child of the one before it."""
        return self.parents == chain_parents(len(self.parents))

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of the root (entry 0) and of each node i (entry i + 1), in order."""
        return children_of(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        """Number of nodes on the path to each node, including itself."""
        return depths_of(self.parents)

    @cached_property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        if self.is_chain:
            return self.drafted
        pairs = zip(self.tokens, self.depths, strict=True)
        return max((depth for token, depth in pairs if token != NO_NODE), default=0)

    @cached_property
    def drafted(self) -> int:
        """Number of tokens, without the nodes that the text does not have."""
        return len(self.tokens) - self.tokens.count(NO_NODE)

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root to `node`."""
        return list(range(node + 1)) if self.is_chain else path_to(self.parents, node)

    def keep(self, nodes: list[int]) -> "Draft":
        """Return a draft of these nodes in this order, each after its parent: a chosen draft."""
        place = {ROOT: ROOT}
        for new, old in enumerate(nodes):
            place[old] = new
        return Draft(tuple(self.tokens[i] for i in nodes), tuple(place[self.parents[i]] for i in nodes))

    def __len__(self) -> int:
        return len(self.tokens)


class Drawing:
    """A tree of tokens that are drawn from q, all of which are kept; `draw_together` draws them.

    A token is submitted before it is known; tokens cannot be removed, and tokens that were not drawn cannot be added.
    The rules for drawn drafts require this ("non-anticipation").
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._q: list[Tensor] = []
        self.asked = 0
        """Number of draws that were asked for; a draw is none where the support of q was exhausted."""

    def draft(self) -> Draft:
        """Return the draft of all tokens that were drawn."""
        return _drawn(Draft(tuple(self._tokens), tuple(self._parents)), self._q)


Draw = Callable[[Tensor, int | Tensor, Tensor | None], Tensor]
"""Weights [B, V], the numbers of the draws in their texts, and the rows that draw [B] (None: all) to indices [B]."""


def draw_together(
    drawings: Sequence[Drawing],
    parents: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    q_mV: Tensor,
    starts: Sequence[int],
    draw: Draw,
    *,
    may_empty: bool,
    chances: bool,
) -> list[list[list[tuple[int, float | None]]]]:
    """Draw children for several trees at once, and read them in one transfer.

    Args:
        parents, counts: for each tree its nodes and the number of children to draw of each.
        q_mV: the distributions after the nodes; those of each tree stand together, from its place in `starts` on. With
            `may_empty` rows may be zero.
        draw: see `Draw`.

    Returns:
        For each tree and each of its nodes the tokens of the children and, with `chances`, their probabilities under
        q; fewer children where the support of q is smaller.
    """
    columns, values, places, q = [], [], [], []
    for i in range(max(map(len, counts))):
        wanted = [own[i] if i < len(own) else 0 for own in counts]
        rows = [start + min(i, len(own) - 1) for start, own in zip(starts, counts, strict=True)]
        whole = rows == list(range(len(q_mV)))
        weights_BV = q_BV = q_mV if whole else q_mV[torch.tensor(rows, device=q_mV.device)]
        q.append(q_BV.unbind())
        firsts = [drawing.asked + sum(own[:i]) for drawing, own in zip(drawings, counts, strict=True)]
        first = firsts[0] if min(firsts) == max(firsts) else torch.tensor(firsts, device=q_BV.device)
        for order in range(max(wanted)):
            valid_B = None
            if min(wanted) <= order:
                valid_B = torch.tensor([count > order for count in wanted], device=q_BV.device)
            if may_empty or order > 0:
                if order > 0:
                    weights_BV = weights_BV.scatter(1, columns[-1][:, None].clamp_min(0), 0)
                left_B = weights_BV.any(-1)
                valid_B = left_B if valid_B is None else valid_B & left_B
            token_B = draw(weights_BV, first if order == 0 else first + order, valid_B)
            columns.append(token_B if valid_B is None else token_B.masked_fill(~valid_B, NO_NODE))
            values += [q_BV.gather(1, token_B[:, None])[:, 0].double()] if chances else []
            places.append(i)
    packed = torch.stack(columns, 1)
    rows = (torch.cat([packed, torch.stack(values, 1)], 1) if chances else packed).tolist()
    drawn: list[list[list[tuple[int, float | None]]]] = [[[] for _ in own] for own in counts]
    for tree, (drawing, row) in enumerate(zip(drawings, rows, strict=True)):
        for order, i in enumerate(places):
            if row[order] != NO_NODE:
                drawing._tokens.append(int(row[order]))
                drawing._parents.append(parents[tree][i])
                drawing._q.append(q[i][tree])
                drawn[tree][i].append((int(row[order]), row[len(places) + order] if chances else None))
        drawing.asked += sum(counts[tree])
    return drawn


DraftOrBatch = TypeVar("DraftOrBatch", Draft, "DraftBatch")


def _drawn(draft: DraftOrBatch, q: Iterable[Tensor]) -> DraftOrBatch:
    """Set the distributions from which all tokens of a draft were drawn."""
    object.__setattr__(draft, "_q", tuple(q))
    return draft


class DraftBatch(_MayBeDrawn):
    """Drafts of B texts, whose tokens are on the device. They have one shape, or are chosen ones of any shapes.

    `tokens_BN`: [B, N]. `valid_BN`: bool, False where a text has no such node; no node of it is below one. None: all
    texts have all nodes. `own`: for each text the nodes of its draft that these are, or `NO_NODE`; None: the same.
    """

    own: list[list[int]] | None = None
    own_BN: Tensor | None = None
    """`own` on the device."""
    shapes: list[Parents] | None = None
    """The shape of each text's draft, where they differ; `parents` is empty then."""
    _places_BN: Tensor | None = None
    _depths_BP: Tensor | None = None

    def __init__(self, tokens_BN: Tensor, parents: Parents, valid_BN: Tensor | None = None) -> None:
        self.tokens_BN, self.parents, self.valid_BN = tokens_BN, parents, valid_BN

    @staticmethod
    def of(drafts: Sequence[Draft], device: torch.device | None = None) -> "DraftBatch":
        """Return drafts as a batch: chosen ones, or drawn ones of at least one token each.

        Chosen drafts of different shapes become a batch that rules for any draft verify. The shape of drawn ones
        contains theirs, see `united`.
        """
        first = drafts[0]
        assert all(draft.drawn == first.drawn for draft in drafts)
        if first.drawn and first.tokens:
            return _united(drafts, device)
        if any(draft.parents != first.parents for draft in drafts):
            return (_chains if all(draft.is_chain for draft in drafts) else _mixed)(drafts, device)
        tokens_BN = torch.tensor([draft.tokens for draft in drafts], dtype=torch.int64, device=device)
        return DraftBatch(tokens_BN, first.parents)

    @property
    def is_chain(self) -> bool:
        """True if every token is the child of the one before it."""
        return self.parents == chain_parents(len(self))

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return max((max(depths_of(shape), default=0) for shape in self.shapes or [self.parents]), default=0)

    def parents_of(self, row: int) -> Parents:
        """Return the shape of one text's draft, without regard to `valid_BN`."""
        return self.parents if self.shapes is None else self.shapes[row]

    def places(self) -> Tensor:
        """Return the place [1, N] or [B, N] of each node's parent: 0 for `ROOT`, i + 1 for node i."""
        if self._places_BN is not None:
            return self._places_BN
        return constant((tuple(parent + 1 for parent in self.parents),), self.tokens_BN.device)

    def depths(self) -> Tensor:
        """Return the depth [1, N + 1] or [B, N + 1] of each place."""
        if self._depths_BP is not None:
            return self._depths_BP
        return constant(((0, *depths_of(self.parents)),), self.tokens_BN.device)

    def number(self, node: int) -> int | Tensor:
        """Return the number of a node in the draft of all texts, or of each text [B]."""
        return node if self.own_BN is None else self.own_BN[:, node].clamp_min(0)

    def __len__(self) -> int:
        return self.tokens_BN.shape[1]


def _chains(drafts: Sequence[Draft], device: torch.device | None) -> DraftBatch:
    """Return chosen chains of different lengths as a batch."""
    most = max(map(len, drafts))
    values = [[len(draft), *draft.tokens, *[0] * (most - len(draft))] for draft in drafts]
    count_B1, tokens_BN = torch.tensor(values, device=device).split([1, most], 1)
    return DraftBatch(tokens_BN, chain_parents(most), torch.arange(most, device=device) < count_B1)


def _mixed(drafts: Sequence[Draft], device: torch.device | None) -> DraftBatch:
    """Return chosen drafts of different shapes as a batch."""
    most = max(map(len, drafts))
    values = [
        [[0, *own, *[0] * (most - len(draft))] for own in (draft.tokens, draft.parents, draft.depths)]
        for draft in drafts
    ]
    tokens_BP, parents_BP, depths_BP = torch.tensor(values, device=device).unbind(1)
    batch = DraftBatch(tokens_BP[:, 1:], (), depths_BP[:, 1:] > 0)
    batch.shapes = [draft.parents for draft in drafts]
    batch._places_BN, batch._depths_BP = parents_BP[:, 1:] + 1, depths_BP
    return batch


def _united(drafts: Sequence[Draft], device: torch.device | None) -> DraftBatch:
    """Return drawn drafts as a batch of the smallest shape that contains theirs."""
    parents, own = united([draft.parents for draft in drafts])
    # Where a text has no node, its first one stands, so that p/q is a number everywhere.
    held = [[max(node, 0) for node in nodes] for nodes in own]
    values = [
        [*(draft.tokens[node] for node in nodes), *mine] for draft, nodes, mine in zip(drafts, held, own, strict=True)
    ]
    tokens_BN, own_BN = torch.tensor(values, dtype=torch.int64, device=device).split(len(parents), 1)
    whole = all(min(nodes) > NO_NODE for nodes in own)
    batch = DraftBatch(tokens_BN, parents, None if whole else own_BN >= 0)
    if any(node not in (place, NO_NODE) for nodes in own for place, node in enumerate(nodes)):
        batch.own, batch.own_BN = own, own_BN
    q = zip(*([draft.q[node] for node in nodes] for draft, nodes in zip(drafts, held, strict=True)), strict=True)
    return _drawn(batch, map(torch.stack, q))


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


class ChainDrawing:
    """Builds chains for B texts on the device: all tokens are chosen, or all are drawn and kept.

    See `Drawing` for what drawing requires. `draw`: None where tokens are chosen.
    """

    def __init__(self, draw: Draw | None) -> None:
        self._draw = draw
        self.tokens: list[Tensor] = []
        """The tokens [B] of each node."""
        self.valid: list[Tensor | None] = []
        """The texts that have the node; None: all."""
        self._q: list[Tensor] = []

    def choose(self, token_B: Tensor, valid_B: Tensor | None) -> None:
        """Add the next tokens."""
        assert self._draw is None, "chosen tokens cannot be added to a drawn draft"
        self.tokens.append(token_B)
        self.valid.append(valid_B)

    def draw(self, q_BV: Tensor, valid_B: Tensor | None) -> None:
        """Draw the next tokens for the rows that are valid."""
        assert self._draw is not None, "drawn tokens cannot be added to a chosen draft"
        self.tokens.append(self._draw(q_BV, len(self.tokens), valid_B))
        self.valid.append(valid_B)
        self._q.append(q_BV)

    def batch(self) -> DraftBatch:
        """Return the drafts of all tokens."""
        tokens_BN = torch.stack(self.tokens, 1)
        batch = DraftBatch(tokens_BN, chain_parents(len(self.tokens)), _stacked(self.valid, tokens_BN))
        return batch if self._draw is None else _drawn(batch, self._q)


def drawn_at_once(q_BDV: Tensor, draw: Callable[[Tensor], Tensor]) -> DraftBatch:
    """Return chains whose tokens [B, D] `draw` draws, each from its q, where no q depends on them."""
    return _drawn(DraftBatch(draw(q_BDV), chain_parents(q_BDV.shape[1])), q_BDV.unbind(1))


def _stacked(valid: Sequence[Tensor | None], tokens_BN: Tensor) -> Tensor | None:
    """Return the validity [B] of every node (None: of all rows) as one tensor; None where all are valid."""
    if all(valid_B is None for valid_B in valid):
        return None
    all_B = torch.ones_like(tokens_BN[:, 0], dtype=torch.bool)
    return torch.stack([all_B if valid_B is None else valid_B for valid_B in valid], 1)
