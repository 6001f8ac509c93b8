"""The draft of one sequence while it is built: policies add tokens to it and drafters read it.

The tokens of a draft with q were drawn one after the other, and all of them were kept. Verification rules that compare
p with q require this ("non-anticipation"): they are not lossless for tokens that were selected after their values were
known. `DraftBuilder.keep_drawn` and, on the device, `Proposer.chains` alone make such drafts.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedSequence, CommittedTokens, Contexts
from draftsmith.decode.drafts.requests import Look, Request
from draftsmith.decode.sampling import Processors
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft
from draftsmith.heads.rows import upload

# Shapes: B sequences, n nodes of one sequence, m nodes of several sequences, V vocabulary of the target.


class DraftBuilder:
    """A tree of draft tokens after the last committed token of one sequence.

    Tokens are either drawn from q or chosen; one tree never has both. Drawn tokens cannot be removed.
    """

    def __init__(
        self,
        sequence: CommittedSequence,
        room: int,
        processors: Processors,
        shared: tuple[int, int] | None = None,
    ) -> None:
        self.room = room
        """Maximum depth of a node."""
        self.greedy = processors.greedy
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.may_empty = processors.may_empty
        self.sequence, self.processors = sequence, processors
        self.shared = shared
        """(tokens that the drafter may draft, size of the target's vocabulary), where it may not draft all."""
        self.slots: dict[int, int] = {}
        """For each node that the drafter has read, its number in the order in which it was read, with padding."""
        self.kept: list[int] | None = None
        """Nodes of the draft, in its order; None where no node was pruned."""
        self.confidence: list[float] = []
        """For each node of the draft, the probability under q that the policy decided by, for `Policy.observe`."""
        self.survival: list[float] = []
        """For each node of the draft, the policy's estimate of the probability that the path to it is accepted."""
        self.estimates: dict[int, float] = {}
        """By node, the drafter's own estimate that the next token is accepted; see `Drafter.confidences`."""
        self.found = 0
        """Number of retrieved tokens, of which the policy may keep fewer, see `Policy.retrieved`."""
        self.passes = 0
        """Forward passes of the drafter, for policies that count them."""
        self.draws = 0
        """Number of draws that were asked for; a draw is none where the support of q was exhausted."""
        self._is_drawn = False
        self._q: list[Tensor] = []
        """The distribution [V] after the parent of each drawn node."""

    def depth(self, node: int) -> int:
        """Return the number of draft tokens on the path to `node`; 0 for `ROOT`."""
        return 0 if node == ROOT else self.depths[node]

    def follow(self, look: Look) -> Generator[Request, Look, int | None]:
        """Add a child of the only node that was read, the most likely when greedy, else drawn; return it or None."""
        if self.greedy:
            return self.choose(look.parent, look.tokens[0][0]) if look.values[0][0] > 0 else None
        (children,) = (yield Request(draw=[1])).children
        return children[0][0] if children else None

    def choose(self, parent: int, token: int) -> int:
        """Add a token that was chosen in any way as a child of `parent`, and return its node."""
        assert not self._is_drawn, "chosen tokens cannot be added to a drawn draft"
        return self._add(parent, token)

    def start_drawing(self) -> None:
        """Make this a draft all of whose tokens are drawn, also if there is none yet."""
        assert self._is_drawn or not self.tokens, "drawn tokens cannot be added to a chosen draft"
        self._is_drawn = True

    def keep_drawn(self, parent: int, token: int, q_V: Tensor) -> int:
        """Add a token that was just drawn from q after `parent`, and return its node; policies do not call this."""
        self.start_drawing()
        self._q.append(q_V)
        return self._add(parent, token)

    def draft(self) -> Draft:
        """Return the draft of all tokens so far."""
        draft = Draft(tuple(self.tokens), tuple(self.parents))
        if self._is_drawn:
            object.__setattr__(draft, "_q", tuple(self._q))  # a draft is frozen, and `_q` no field of it
        return draft

    def pruned(self, nodes: list[int]) -> Draft:
        """Return a draft of these nodes, each after its parent: a chosen draft, even where the tokens were drawn."""
        self.kept = nodes
        return self.draft().keep(nodes)

    def read_slots(self, path: tuple[int, ...]) -> list[int]:
        """Return the slots of those nodes on a path of the draft that the drafter has read."""
        return [self.slots[node] for node in self.origin(path) if node in self.slots]

    def origin(self, path: tuple[int, ...]) -> list[int]:
        """Return the nodes of this tree that nodes of the draft stand for."""
        return list(path) if self.kept is None else [self.kept[node] for node in path]

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path to `node`."""
        path = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def _add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        assert self.depths[-1] <= self.room, "the policy drafted deeper than `room`"
        return len(self.tokens) - 1


def probabilities(
    builders: Sequence[DraftBuilder],
    nodes: Mapping[int, Sequence[int]],
    logits_mV: Tensor,
    committed: CommittedTokens | None = None,
) -> Tensor:
    """Return q [m, V] after the nodes of several sequences, one after the other, with all logits processors applied.

    A row is zero where the processors forbid every token. Under greedy decoding, the softmax of the processed logits: a
    measure of confidence, since nothing is drawn.

    Args:
        builders: of all sequences of the batch.
        nodes: by the row of a sequence in the batch.
        committed: the tokens of the batch, for processors that read them; made here where they are not kept.
    """

    def contexts() -> Contexts:
        before = committed or CommittedTokens.of([builder.sequence for builder in builders], logits_mV.device)
        rows = [row for row, own in nodes.items() for _ in own]
        paths = [builders[row].path(node) for row, own in nodes.items() for node in own]
        return before.with_tokens(rows, paths, [builders[row].sequence.number for row in rows])

    first = builders[0]
    scores_mV = first.processors.scores(fitted(logits_mV, first.shared), contexts)
    return scores_mV.softmax(-1).nan_to_num(0.0)


def fitted(logits_nV: Tensor, shared: tuple[int, int] | None) -> Tensor:
    """Return logits [..., V] over the target's vocabulary: -inf for tokens that the drafter may not draft."""
    if shared is None:
        return logits_nV
    tokens, vocabulary = shared
    fitted_nV = logits_nV.new_full((*logits_nV.shape[:-1], vocabulary), -torch.inf)
    fitted_nV[..., :tokens] = logits_nV[..., :tokens]
    return fitted_nV


Draw = Callable[[Tensor, int | Tensor, Tensor | None], Tensor]
"""Weights [B, V], the index of each draw in its sequence, and the rows that draw [B] (None: all) to indices [B]."""


class Children(NamedTuple):
    """Children to draw in one tree."""

    builder: DraftBuilder
    parents: Sequence[int]
    counts: Sequence[int]
    """Number of children of each parent."""
    start: int
    """Row of q after the first parent; those after the others follow it."""


def draw_children(
    trees: Sequence[Children], q_mV: Tensor, draw: Draw, *, chances: bool
) -> list[list[list[tuple[int, float | None]]]]:
    """Draw children for several trees at once, read them in one transfer and add them to their builders.

    Args:
        q_mV: the distributions after all nodes. Where a processor may forbid every token, rows may be zero.
        draw: see `Draw`.

    Returns:
        For each tree and each of its parents the nodes of the children and, with `chances`, their probabilities under
        q; fewer children where the support of q is smaller.
    """
    columns, values, parent_of, q = [], [], [], []
    may_empty = trees[0].builder.may_empty
    for i, (rows, firsts, counts_B) in enumerate(_by_parent(trees, q_mV.device)):
        weights_BV = q_BV = q_mV[rows]
        q.append(q_BV.unbind())
        counts = [tree.counts[i] if i < len(tree.counts) else 0 for tree in trees]
        for order in range(max(counts)):
            valid_B = counts_B > order if isinstance(counts_B, Tensor) and min(counts) <= order else None
            if may_empty or order > 0:
                if order > 0:
                    weights_BV = weights_BV.scatter(1, columns[-1][:, None].clamp_min(0), 0)
                left_B = weights_BV.any(-1)
                valid_B = left_B if valid_B is None else valid_B & left_B
            token_B = draw(weights_BV, firsts + order, valid_B)
            columns.append(token_B if valid_B is None else token_B.masked_fill(~valid_B, NO_NODE))
            values += [q_BV.gather(1, token_B[:, None])[:, 0].double()] if chances else []
            parent_of.append(i)
    packed = torch.stack(columns, 1)
    table = (torch.cat([packed, torch.stack(values, 1)], 1) if chances else packed).tolist()
    drawn: list[list[list[tuple[int, float | None]]]] = [[[] for _ in tree.counts] for tree in trees]
    for b, (tree, row) in enumerate(zip(trees, table, strict=True)):
        tree.builder.start_drawing()
        tree.builder.draws += sum(tree.counts)
        for order, i in enumerate(parent_of):
            if row[order] != NO_NODE:
                node = tree.builder.keep_drawn(tree.parents[i], int(row[order]), q[i][b])
                drawn[b][i].append((node, row[len(parent_of) + order] if chances else None))
    return drawn


def _by_parent(
    trees: Sequence[Children], device: torch.device
) -> list[tuple[slice | Tensor, int | Tensor, int | Tensor]]:
    """Return for the i-th parent of all trees: its rows of q, the index of its first draw, and its number of draws.

    In one upload, where there are several trees: [B] each.
    """
    columns = []
    for i in range(max(len(tree.counts) for tree in trees)):
        rows = [tree.start + min(i, len(tree.counts) - 1) for tree in trees]
        firsts = [tree.builder.draws + sum(tree.counts[:i]) for tree in trees]
        columns.append((rows, firsts, [tree.counts[i] if i < len(tree.counts) else 0 for tree in trees]))
    if len(trees) == 1:
        return [(slice(row, row + 1), first, count) for (row,), (first,), (count,) in columns]
    packed = upload([values for column in columns for values in column], device)
    return [(rows_B, firsts_B, counts_B) for rows_B, firsts_B, counts_B in packed.unflatten(0, (-1, 3))]
