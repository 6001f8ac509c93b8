"""Drafts that policies grow from q in lockstep.

Each pass of the drafter covers all texts whose drafts are unfinished. What the policies decide by is read once for all
texts, and so are the tokens that they draw.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedTokens
from draftsmith.decode.drafts.batch import NO_DRAFT
from draftsmith.decode.drafts.builder import DraftBuilder, probabilities
from draftsmith.decode.drafts.chains import chains
from draftsmith.decode.drafts.drawing import Wanted, draw_together
from draftsmith.decode.draws import Draws
from draftsmith.decode.policies.base import Growing, Policy
from draftsmith.decode.policies.requests import Look, Request
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft
from draftsmith.heads.rows import upload

# Shapes: B texts, n nodes of one text, m nodes of all texts, V vocabulary of the target.


def propose(
    drafter: Drafter,
    policies: Sequence[Policy | None],
    builders: Sequence[DraftBuilder],
    retrieved: Sequence[Draft | None],
    draws: Draws | None,
    committed: CommittedTokens | None = None,
) -> list[Draft]:
    """Return a draft for each text.

    Args:
        retrieved: what `Drafter.retrieve` returned for each text; the `DraftBuilder` of a retrieved draft stays empty.
        draws: of all texts; None where decoding is greedy.
        committed: the tokens of the texts, see `probabilities`.
    """
    drafts = [draft or NO_DRAFT for draft in retrieved]
    growing: dict[int, Growing] = {}
    wanted: dict[int, Request] = {}
    lengths: dict[int, int] = {}

    def advance(row: int, look: Look | None) -> None:
        """Send the policy of one text what it asked for (None starts it); store its next request, or its draft."""
        wanted.pop(row, None)
        try:
            wanted[row] = next(growing[row]) if look is None else growing[row].send(look)
        except StopIteration as end:
            drafts[row] = end.value
            del growing[row]

    for row, (builder, policy) in enumerate(zip(builders, policies, strict=True)):
        if retrieved[row] is None and builder.room >= 1:
            assert policy is not None, "a drafter that computes logits has a policy"
            if policy.fixed_length is not None:
                lengths[row] = policy.fixed_length
                continue
            growing[row] = policy.grow(builder)
            advance(row, None)
    if lengths:
        assert not growing, "all texts have one policy"
        own = _chains(drafter, builders, lengths, draws, committed)
        return [own.get(row, draft) for row, draft in enumerate(drafts)]
    if not growing:
        return drafts
    assert all(read.nodes == [ROOT] for read in wanted.values()), "the first request of a policy is the root"
    logits_BnV = drafter.begin(list(growing))[:, None]
    levels = _Levels(builders, logits_BnV.device)
    while True:
        reads = {row: wanted[row] for row in sorted(wanted)}
        _note_confidences(drafter, builders, reads)
        logits_mV = _after(reads, logits_BnV)
        q_mV = probabilities(builders, {row: read.nodes for row, read in reads.items()}, logits_mV, committed)
        looks = _looks(reads, logits_mV, q_mV)
        for row, look in looks.items():
            advance(row, look)
        while drawing := {row: asked for row, asked in wanted.items() if asked.draw}:
            assert draws is not None, "greedy policies draw nothing"
            for row, children in _drawn(builders, looks, drawing, q_mV, draws).items():
                advance(row, looks[row]._replace(children=children))
        if not growing:
            return drafts
        logits_BnV = drafter.extend(levels.next({row: read.nodes for row, read in wanted.items()}))


def _chains(
    drafter: Drafter,
    builders: Sequence[DraftBuilder],
    lengths: Mapping[int, int],
    draws: Draws | None,
    committed: CommittedTokens | None,
) -> dict[int, Draft]:
    """Return chains for the texts in `lengths`, beside others whose drafts were retrieved, from one transfer."""
    first, texts = builders[0], [builder.sequence for builder in builders]
    rooms = [builder.room if row in lengths else 0 for row, builder in enumerate(builders)]
    draws, length = None if first.greedy else draws, max(lengths.values())
    batch = chains(drafter, first.processors, first.shared, texts, rooms, length, draws, committed)
    (packed_BN,) = batch.packed()
    for row, tokens in enumerate(packed_BN.tolist()):
        builder, (_, q) = builders[row], batch.row(row)
        for node, token in enumerate(tokens if row in lengths else ()):
            if token == NO_NODE:
                break
            if q is not None:
                builder.drawing().add(token, node - 1, q[node])
            builder.add(node - 1, token)
            if node + 1 < len(tokens):
                builder.slots[node] = node
    return {row: builders[row].draft() for row in lengths}


def _after(reads: dict[int, Request], logits_BnV: Tensor) -> Tensor:
    """Return the logits [m, V] after the nodes that are read, one text after the other."""
    counts = [len(read.nodes) for read in reads.values()]
    if len(reads) == 1:
        (row,) = reads
        return logits_BnV[row, : counts[0]]
    if sum(counts) == len(logits_BnV) * logits_BnV.shape[1]:
        return logits_BnV.flatten(0, 1)
    places = [(row, column) for row, count in zip(reads, counts, strict=True) for column in range(count)]
    rows_m, columns_m = torch.tensor(places, device=logits_BnV.device).unbind(1)
    return logits_BnV[rows_m, columns_m]


def _looks(reads: dict[int, Request], logits_mV: Tensor, q_mV: Tensor) -> dict[int, Look]:
    """Return for each text the values that its policy asked for, from one transfer."""
    counts = [len(read.nodes) for read in reads.values()]
    parts = logits_mV.split(counts) if len(counts) > 1 else [logits_mV]
    logits = dict(zip(reads, parts, strict=True))
    most = max(read.top for read in reads.values())
    if most == 0:
        return {row: Look(read.nodes, logits[row], [], []) for row, read in reads.items()}
    most = min(most, q_mV.shape[1])
    best = q_mV.max(-1, keepdim=True) if most == 1 else q_mV.topk(most)
    rows = iter(torch.cat([best.values.double(), best.indices], 1).tolist())
    looks = {}
    for row, read in reads.items():
        own, top = [next(rows) for _ in read.nodes], min(read.top, most)
        values = [values[:top] for values in own]
        tokens = [[int(token) for token in values[most : most + top]] for values in own]
        looks[row] = Look(read.nodes, logits[row], values, tokens)
    return looks


def _drawn(
    builders: Sequence[DraftBuilder], looks: dict[int, Look], drawing: dict[int, Request], q_mV: Tensor, draws: Draws
) -> dict[int, list[list[tuple[int, float | None]]]]:
    """Draw the children that policies asked for and add them, with one transfer for all texts.

    Args:
        looks: at the nodes that were read last, those of `q_mV`.
    """
    rows = list(drawing)
    starts = dict(zip(looks, accumulate([len(look.nodes) for look in looks.values()], initial=0), strict=False))
    drawn = draw_together(
        [Wanted(builders[row].drawing(), looks[row].nodes, drawing[row].draw, starts[row]) for row in rows],
        q_mV,
        draws.of(rows).drafted,
        may_empty=builders[rows[0]].may_empty,
        chances=any(asked.chances for asked in drawing.values()),
    )
    children = {}
    for row, own in zip(rows, drawn, strict=True):
        add = builders[row].add
        children[row] = [
            [(add(parent, token), value) for token, value in of_node]
            for parent, of_node in zip(looks[row].nodes, own, strict=True)
        ]
    return children


class _Levels:
    """Translates the nodes that policies request into levels of a batch."""

    def __init__(self, builders: Sequence[DraftBuilder], device: torch.device) -> None:
        self._builders, self._device = builders, device
        self._columns: list[dict[int, int]] = [{ROOT: 0} for _ in builders]
        """For each text the index of every node of the previous level."""
        self._slots = self._depth = 0
        self._is_chain = True

    def next(self, wanted: Mapping[int, Sequence[int]]) -> Level:
        """Return these nodes as a level; texts that request none are padded."""
        width = max(map(len, wanted.values()))
        self._depth += 1
        tokens, parents = [], []
        for row, builder in enumerate(self._builders):
            nodes, columns = wanted.get(row, []), self._columns[row]
            tokens.append([builder.tokens[node] for node in nodes] + [0] * (width - len(nodes)))
            parents.append([columns[builder.parents[node]] for node in nodes] + [0] * (width - len(nodes)))
            self._columns[row] = {node: column for column, node in enumerate(nodes)}
            builder.slots.update({node: self._slots + column for column, node in enumerate(nodes)})
        self._slots += width
        self._is_chain = self._is_chain and width == 1
        if self._is_chain:
            return Level(upload(tokens, self._device), None, self._depth)
        tokens_Bn, parents_Bn = upload(torch.tensor([tokens, parents]), self._device).unbind()
        return Level(tokens_Bn, parents_Bn, self._depth)


def _note_confidences(drafter: Drafter, builders: Sequence[DraftBuilder], reads: dict[int, Request]) -> None:
    """Store the drafter's own confidences in the builders, where policies read them."""
    confidences_Bn = drafter.confidences()
    if confidences_Bn is None:
        return
    rows = confidences_Bn.tolist()
    for row, read in reads.items():
        builders[row].estimates.update(zip(read.nodes, rows[row], strict=False))
