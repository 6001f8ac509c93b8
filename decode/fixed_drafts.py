"""Drafts of a fixed shape for all texts of a batch, built on the device without reading a value.

A chain of a given length and a tree of given ranks have the same shape whatever the drafter's probabilities are, so the
host needs no token of the draft before the draft is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedTokens, StoredContexts
from draftsmith.decode.draws import Draws
from draftsmith.decode.sampling import Processors, index_at, precise
from draftsmith.heads.base import DraftedChain, Drafter, Level, WantedChain
from draftsmith.heads.draft_tree import ROOT, BatchDrawing, DraftBatch, path_to
from draftsmith.heads.rows import Counts, constant

# Shapes: B texts, n nodes of a level, D tokens on a path, V vocabulary.


@dataclass(frozen=True)
class Shape:
    """A tree: for each level, its nodes as (index of the parent in the level before, rank among all tokens).

    Nodes of one parent stand together, in order. `drawn`: a chain whose tokens are drawn from q, not chosen by rank.
    """

    levels: tuple[tuple[tuple[int, int], ...], ...]
    drawn: bool = False

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(map(len, self.levels))

    @cached_property
    def is_chain(self) -> bool:
        return all(len(level) == 1 for level in self.levels)

    @cached_property
    def is_plain_chain(self) -> bool:
        """Whether it is a chain of drawn or of the likeliest tokens, not of others."""
        return all(level == ((0, 0),) for level in self.levels)

    @cached_property
    def extended(self) -> list[list[int]]:
        """For each level its nodes that have children."""
        return [sorted({parent for parent, _ in level}) for level in (*self.levels[1:], ())]

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """For each level the ranks of the children of each node with children in the level before."""
        parents = [[0], *self.extended]
        return [
            [[rank for parent, rank in level if parent == place] for place in parents[depth]]
            for depth, level in enumerate(self.levels)
        ]


def chain_shape(length: int, *, drawn: bool) -> Shape:
    """Return the shape of a chain."""
    return Shape(tuple(((0, 0),) for _ in range(length)), drawn)


class FixedDrafts:
    """Builds the drafts of one shape after the last committed tokens of B texts.

    Args:
        rooms: maximum depth of a node, for each text.
        draws: for children that are drawn; None where all are chosen.
        numbers: index of each text in the whole batch.
        shared: (shared tokens, size of the target's vocabulary), where the vocabularies are padded to different sizes.
    """

    def __init__(
        self,
        shape: Shape,
        rooms: Counts,
        processors: Processors,
        draws: Draws | None,
        committed: CommittedTokens | None,
        numbers: Sequence[int],
        shared: tuple[int, int] | None,
    ) -> None:
        self._shape, self._rooms, self._processors = shape, rooms, processors
        self._least_room = min(rooms)
        self._committed, self._numbers, self._shared = committed, numbers, shared
        assert draws is not None or not shape.drawn, "children are drawn"
        self._draws = draws if shape.drawn else None
        self._drafts = BatchDrawing(None if self._draws is None else self._draws.drafted)
        self.slots: list[int | None] = []
        """For each node its number among those that the drafter reads; None for leaves, which it does not read."""

    def build(self, drafter: Drafter) -> DraftBatch:
        """Return the drafts; the drafter reads the nodes that have children."""
        depth = min(len(self._shape.levels), max(self._rooms))
        logits_BV = drafter.begin([row for row, room in enumerate(self._rooms) if room > 0])
        wanted = self._whole_chain()
        if wanted is not None and (chain := _at_once(drafter, logits_BV, wanted)) is not None:
            return self._of_chain(chain)
        logits_BnV = logits_BV[:, None]
        nodes = [ROOT]
        read = 0
        for level in range(depth):
            added = self._add(level, nodes, logits_BnV)
            if level + 1 == depth:
                self.slots += [None] * len(added)
                break
            places = self._shape.extended[level]
            self.slots += [read + places.index(i) if i in places else None for i in range(len(added))]
            read += len(places)
            logits_BnV = drafter.extend(self._level(level, [added[i] for i in places], nodes))
            nodes = [added[i] for i in places]
        return self._drafts.batch()

    def _whole_chain(self) -> WantedChain | None:
        """Return the chain that a drafter may draft at once, equal for all texts and independent of them; else None."""
        length = len(self._shape.levels)
        fits = self._shape.is_plain_chain and 1 < length <= self._least_room
        if not fits or self._shared is not None or not self._processors.only_temperature:
            return None
        if self._draws is None:
            return WantedChain(length)
        uniform_BD = self._draws.chain(length)
        return None if uniform_BD is None else WantedChain(length, self._processors.sampling.temperature, uniform_BD)

    def _of_chain(self, chain: DraftedChain) -> DraftBatch:
        """Return a chain that the drafter made at once as the drafts, of which it has read all tokens but the last."""
        self.slots = [*range(chain.tokens_BD.shape[1] - 1), None]
        self._drafts.chain(chain.tokens_BD, chain.q)
        return self._drafts.batch()

    def _add(self, level: int, nodes: list[int], logits_BnV: Tensor) -> list[int]:
        """Add the nodes of a level after `nodes`, which the drafter has read, and return them."""
        scores_BnV = self._scores(logits_BnV, nodes)
        first, below = len(self._drafts.tokens), self._shape.children[level]
        for place, node in enumerate(nodes):
            ranks, scores_BV = below[place], scores_BnV[:, place]
            valid_B = self._valid_below(level, node, scores_BV)
            if self._draws is None:
                self._choose(node, ranks, scores_BV, valid_B)
            else:
                q_BV = scores_BV.softmax(-1)
                if self._processors.may_empty:
                    q_BV = q_BV.nan_to_num(0.0)
                self._drafts.draw(node, q_BV, valid_B)
        return list(range(first, len(self._drafts.tokens)))

    def _choose(self, node: int, ranks: list[int], scores_BV: Tensor, valid_B: Tensor | None) -> None:
        """Add the tokens of these ranks as children of `node`."""
        if ranks == [0]:
            return self._drafts.choose(node, scores_BV.argmax(-1), valid_B)
        tokens_Bk = scores_BV.topk(min(ranks[-1] + 1, scores_BV.shape[1])).indices
        none_B = torch.zeros_like(tokens_Bk[:, 0], dtype=torch.bool)
        for rank in ranks:
            exists = rank < tokens_Bk.shape[1]
            self._drafts.choose(node, tokens_Bk[:, rank if exists else 0], valid_B if exists else none_B)

    def _valid_below(self, level: int, node: int, scores_BV: Tensor) -> Tensor | None:
        """Return for which texts [B] `node` may have children; None for all of them."""
        valid_B = None if node == ROOT else self._drafts.valid[node]
        if self._least_room <= level:
            fits_B = self._rooms.on_device_B > level
            valid_B = fits_B if valid_B is None else valid_B & fits_B
        if self._processors.may_empty:
            allowed_B = ~scores_BV.isneginf().all(-1)
            valid_B = allowed_B if valid_B is None else valid_B & allowed_B
        return valid_B

    def _level(self, level: int, nodes: list[int], before: list[int]) -> Level:
        """Return the nodes that the drafter reads next, whose parents are among `before`."""
        if self._shape.is_chain:
            return Level(self._drafts.tokens[-1][:, None], None, level + 1)
        tokens_Bn = torch.stack([self._drafts.tokens[node] for node in nodes], 1)
        parents_n = constant(tuple(before.index(self._drafts.parents[node]) for node in nodes), tokens_Bn.device)
        return Level(tokens_Bn, parents_n.expand_as(tokens_Bn), level + 1)

    def _scores(self, logits_BnV: Tensor, nodes: list[int]) -> Tensor:
        """Return the processed logits over the target's vocabulary."""
        if self._processors.none and self._shared is None:
            return precise(logits_BnV)
        B, n = logits_BnV.shape[:2]
        fitted_nV = fitted(logits_BnV.flatten(0, 1), self._shared)

        def contexts() -> StoredContexts:
            paths = [path_to(tuple(self._drafts.parents), node) for node in nodes]
            return contexts_of(self._committed, self._drafts.tokens, [paths] * B, self._numbers)

        return self._processors.scores(fitted_nV, contexts).unflatten(0, (B, n))


def _at_once(drafter: Drafter, logits_BV: Tensor, wanted: WantedChain) -> DraftedChain | None:
    """Return a chain whose tokens the drafter need not read one by one; None where it has to."""
    logits_BDV = drafter.chain_logits(wanted.length)
    if logits_BDV is None:
        return drafter.chain(logits_BV, wanted)
    scores_BDV = precise(logits_BDV)
    if wanted.uniform_BD is None:
        return DraftedChain(scores_BDV.argmax(-1), [])
    q_BDV = (scores_BDV / wanted.temperature).softmax(-1)
    return DraftedChain(index_at(q_BDV, wanted.uniform_BD[..., None])[..., 0], list(q_BDV.unbind(1)))


def contexts_of(
    committed: CommittedTokens | None,
    tokens: Sequence[Tensor],
    paths: Sequence[Sequence[Sequence[int]]],
    numbers: Sequence[int],
) -> StoredContexts:
    """Return the contexts of nodes, text by text: committed tokens, then the tokens on the path to each node.

    Args:
        tokens: the tokens [B] of each node.
        paths: for each text and each of its nodes, the nodes on the path to it.
        numbers: index of each text in the whole batch.
    """
    assert committed is not None, "kept where a processor reads the text"
    depths = [len(path) for of_text in paths for path in of_text]
    rows = [row for row, of_text in enumerate(paths) for _ in of_text]
    paths_nD = None
    if max(depths) > 0:
        wide = tuple((*path, *[0] * (max(depths) - len(path))) for of_text in paths for path in of_text)
        tokens_BN = torch.stack(list(tokens), 1)
        rows_n = constant(tuple(rows), tokens_BN.device)
        paths_nD = tokens_BN[rows_n[:, None], constant(wide, tokens_BN.device)]
    return committed.with_paths(rows, paths_nD, depths, [numbers[row] for row in rows])


def fitted(logits_nV: Tensor, shared: tuple[int, int] | None) -> Tensor:
    """Return logits over the target's vocabulary: -inf for tokens that the drafter does not share."""
    if shared is None:
        return logits_nV
    tokens, vocabulary = shared
    fitted_nV = logits_nV.new_full((logits_nV.shape[0], vocabulary), -torch.inf)
    fitted_nV[:, :tokens] = logits_nV[:, :tokens]
    return fitted_nV
