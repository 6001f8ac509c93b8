"""Drafts that policies grow from q in lockstep.

Each pass of the drafter covers all sequences whose drafts are unfinished. What the policies decide by is read once for
all sequences, and so are the tokens that they draw.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedTokens
from draftsmith.decode.drafts.builder import Children, DraftBuilder, draw_children, probabilities
from draftsmith.decode.drafts.requests import Growing, Look, Request
from draftsmith.decode.draws import Draws
from draftsmith.decode.policies.policy import Policy
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.rows import upload

# Shapes: B sequences, n nodes of one sequence, m nodes of all sequences, V vocabulary of the target.


class _Growth:
    """The drafts of a batch while policies grow them, by row: what each policy waits for, and the finished drafts."""

    def __init__(self, policies: Mapping[int, Policy], builders: Sequence[DraftBuilder]) -> None:
        self.finished: dict[int, Draft] = {}
        self.requests: dict[int, Request] = {}
        self._growing: dict[int, Growing] = {row: policy.grow(builders[row]) for row, policy in policies.items()}
        for row in policies:
            self.send(row, None)
        assert all(request.nodes == [ROOT] for request in self.requests.values()), "a policy first requests the root"

    def send(self, row: int, look: Look | None) -> None:
        """Send a policy what it requested (None starts it); keep its next request, or its draft."""
        self.requests.pop(row, None)
        try:
            growing = self._growing[row]
            self.requests[row] = next(growing) if look is None else growing.send(look)
        except StopIteration as end:
            self.finished[row] = end.value


def grow_drafts(
    drafter: Drafter,
    policies: Mapping[int, Policy],
    builders: Sequence[DraftBuilder],
    draws: Draws | None,
    committed: CommittedTokens | None = None,
) -> dict[int, Draft]:
    """Return the drafts that policies grow, by row.

    Args:
        policies: by the row of the sequence, those of the drafts to grow.
        builders: of all sequences of the batch.
        draws: of all sequences; None where decoding is greedy.
        committed: the tokens of the sequences, see `probabilities`.
    """
    growth = _Growth(policies, builders)
    if not growth.requests:
        return growth.finished
    logits_BnV = drafter.begin(list(growth.requests))[:, None]
    levels = _Levels(builders, logits_BnV.device)
    while True:
        reads = {row: growth.requests[row] for row in sorted(growth.requests)}
        _note_confidences(drafter, builders, reads)
        logits_mV = _after(reads, logits_BnV)
        q_mV = probabilities(builders, {row: read.nodes for row, read in reads.items()}, logits_mV, committed)
        looks = _looks(reads, logits_mV, q_mV)
        for row, look in looks.items():
            growth.send(row, look)
        while drawing := {row: request for row, request in growth.requests.items() if request.draw}:
            assert draws is not None, "greedy policies draw nothing"
            for row, children in _drawn(builders, looks, drawing, q_mV, draws).items():
                growth.send(row, looks[row]._replace(children=children))
        if not growth.requests:
            return growth.finished
        logits_BnV = drafter.extend(levels.next({row: read.nodes for row, read in growth.requests.items()}))


def _after(reads: dict[int, Request], logits_BnV: Tensor) -> Tensor:
    """Return the logits [m, V] after the nodes that are read, one sequence after the other."""
    counts = [len(read.nodes) for read in reads.values()]
    if len(reads) == 1:
        (row,) = reads
        return logits_BnV[row, : counts[0]]
    if sum(counts) == len(logits_BnV) * logits_BnV.shape[1]:
        return logits_BnV.flatten(0, 1)
    cells = [(row, column) for row, count in zip(reads, counts, strict=True) for column in range(count)]
    rows_m, columns_m = torch.tensor(cells, device=logits_BnV.device).unbind(1)
    return logits_BnV[rows_m, columns_m]


def _looks(reads: dict[int, Request], logits_mV: Tensor, q_mV: Tensor) -> dict[int, Look]:
    """Return for each sequence the values that its policy requested, from one transfer."""
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
    """Draw the children that policies requested and add them, with one transfer for all sequences.

    Args:
        looks: at the nodes that were read last, those of `q_mV`.
    """
    rows = list(drawing)
    starts = dict(zip(looks, accumulate([len(look.nodes) for look in looks.values()], initial=0), strict=False))
    children = draw_children(
        [Children(builders[row], looks[row].nodes, drawing[row].draw, starts[row]) for row in rows],
        q_mV,
        draws.of(rows).drafted,
        chances=any(request.chances for request in drawing.values()),
    )
    return dict(zip(rows, children, strict=True))


class _Levels:
    """Translates the nodes that policies request into levels of a batch."""

    def __init__(self, builders: Sequence[DraftBuilder], device: torch.device) -> None:
        self._builders, self._device = builders, device
        self._columns: list[dict[int, int]] = [{ROOT: 0} for _ in builders]
        """For each sequence the index of every node of the previous level."""
        self._slots = self._depth = 0
        self._is_chain = True

    def next(self, requested: Mapping[int, Sequence[int]]) -> Level:
        """Return these nodes as a level; sequences that request none are padded."""
        width = max(map(len, requested.values()))
        self._depth += 1
        tokens, parents = [], []
        for row, builder in enumerate(self._builders):
            nodes, columns = requested.get(row, []), self._columns[row]
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
