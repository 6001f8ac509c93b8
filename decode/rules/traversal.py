"""The rule for trees whose siblings were drawn from q without replacement."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules.any_draft import along
from draftsmith.decode.rules.outcome import Decided, ratio, residual
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Parents, children_of
from draftsmith.heads.rows import upload

# Shapes: B sequences, N draft nodes, P = N + 1 positions, E steps, V vocabulary.


class Step(NamedTuple):
    """A step of the traversal, which visits children before their parent, whatever the draws are.

    Indices for all sequences where their drafts have one shape, else [B].
    """

    tests: bool
    """The path to `node` is tested, whose children were all removed; else its weight is set, before its children."""
    node: int | Tensor
    position: int | Tensor
    """Of its parent."""
    sibling: int | Tensor
    """The next one; `NO_NODE` after the last."""
    exists_B: Tensor | None
    """Texts that have the node; None: all."""


def traversal_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Test whole paths: accept the path of the first remaining leaf with its weight, else remove the leaf and repeat.

    The weight of a node is min(1, w_parent p(x)/q(x)), with p and q at its parent after all rejections. A rejection
    there changes p to norm(max(w p - q, 0)), w to S / (S + 1 - w) with S = sum_x max(w p(x) - q(x), 0), and takes the
    rejected token from q. On a chain this is the block rule. Weng et al. 2025, arXiv:2505.12398.
    """
    overlap_BP = _overlap(p_BPV, draft)
    p_BPV, q_BNV = p_BPV.clone(), draft.q_BNV.clone()
    weight_BP = torch.ones_like(p_BPV[..., 0], dtype=torch.float64)
    leaf_B = torch.full_like(p_BPV[:, 0, 0], ROOT, dtype=torch.int64)
    open_B = leaf_B == ROOT  # no path was accepted yet
    for tests, node, position, sibling, exists_B in _steps(draft):
        rows = slice(None) if isinstance(node, int) else torch.arange(len(open_B), device=open_B.device)
        p_BV, q_BV, weight_B = p_BPV[rows, position], q_BNV[rows, node], weight_BP[rows, position]
        token_B1 = draft.tokens_BN[rows, node][:, None]
        if not tests:
            ratio_B = (p_BV.gather(1, token_B1) / q_BV.gather(1, token_B1))[:, 0].double()
            _put(weight_BP, rows, node + 1, (weight_B * ratio_B).clamp_max_(1.0), exists_B)
            continue
        active_B = open_B if exists_B is None else open_B & exists_B
        accepted_B = draws.passes(weight_BP[rows, node + 1], node, active_B) & active_B
        leaf_B = torch.where(accepted_B, node, leaf_B)
        open_B = open_B & ~accepted_B
        left_B = (weight_B[:, None].to(p_BV.dtype) * p_BV - q_BV).clamp_min_(0).sum(-1).double()
        rest_BV = residual(p_BV, q_BV, weight_B)
        # A sequence that has accepted a path takes nothing from its parent any more.
        _put(p_BPV, rows, position, rest_BV / rest_BV.sum(-1, keepdim=True), active_B)
        _put(weight_BP, rows, position, ratio(left_B, left_B + 1 - weight_B), active_B)
        if isinstance(sibling, Tensor):
            _put(q_BNV, rows, sibling.clamp_min(0), without(q_BV, token_B1), sibling >= 0)
        elif sibling != NO_NODE:
            q_BNV[:, sibling] = without(q_BV, token_B1)
    end_BV = p_BPV[torch.arange(len(leaf_B), device=leaf_B.device), leaf_B + 1]
    path_BD = draft.paths(leaf_B[:, None])[:, 0]
    return Decided(path_BD, draws.next(end_BV), along(overlap_BP, path_BD, draft))


def _put(values: Tensor, rows: slice | Tensor, position: int | Tensor, new: Tensor, where_B: Tensor | None) -> None:
    """Set the values [B, ...] at these positions, of the sequences in `where_B`."""
    if where_B is not None:
        new = torch.where(where_B[(...,) + (None,) * (new.dim() - 1)], new, values[rows, position])
    values[rows, position] = new


def without(q_BV: Tensor, token_B1: Tensor) -> Tensor:
    """Return q conditioned on any token except this one: [B, V]; all zero when no other token has probability."""
    rest_BV = q_BV.scatter(1, token_B1, 0.0)
    return rest_BV / rest_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(rest_BV.dtype).tiny)


def _overlap(p_BPV: Tensor, draft: DraftBatch) -> Tensor:
    """Return the sum of min(p, q) [B, P] at each position that has children, and 0 elsewhere."""
    overlap_BP, shapes = torch.zeros_like(p_BPV[..., 0]), draft.shapes
    if len(shapes) == 1:
        for position, below in enumerate(children_of(shapes[0])):
            if below:
                overlap_BP[:, position] = torch.minimum(p_BPV[:, position], draft.q_BNV[:, below[0]]).sum(-1)
        return overlap_BP
    rows_B = torch.arange(len(p_BPV), device=p_BPV.device)
    for node, position_B in enumerate(draft.parent_positions().unbind(1)):
        value_B = torch.minimum(p_BPV[rows_B, position_B], draft.q_BNV[:, node]).sum(-1)
        _put(overlap_BP, rows_B, position_B, value_B, None if draft.valid_BN is None else draft.valid_BN[:, node])
    return overlap_BP


def _steps(draft: DraftBatch) -> list[Step]:
    """Return the steps for all sequences; sequences of different shapes test the n-th node of their order together."""
    shapes, valid_BN = draft.shapes, draft.valid_BN
    if len(shapes) == 1:
        return [
            Step(tests, node, position, sibling, None if valid_BN is None else valid_BN[:, node])
            for tests, node, position, sibling in _visits(shapes[0])
        ]
    kinds: list[bool] = []
    table: list[list[int]] = []
    queues = [list(reversed(_visits(shape))) for shape in shapes]
    while any(queues):
        tests = all(not queue or queue[-1][0] for queue in queues)
        kinds.append(tests)
        taken = [queue.pop() if queue and queue[-1][0] == tests else (tests, NO_NODE, 0, NO_NODE) for queue in queues]
        table += [list(nodes) for nodes in zip(*(visit[1:] for visit in taken), strict=True)]
    steps = upload(table, draft.tokens_BN.device).unflatten(0, (-1, 3))
    return [
        Step(tests, node_B.clamp_min(0), position_B, sibling_B, node_B >= 0)
        for tests, (node_B, position_B, sibling_B) in zip(kinds, steps, strict=True)
    ]


@lru_cache(maxsize=4096)
def _visits(parents: Parents) -> list[tuple[bool, int, int, int]]:
    """Return (whether it is a test, node, its parent's position, next sibling) of each step through a tree."""
    children, visits = children_of(parents), []

    def visit(position: int) -> None:
        for child, sibling in zip(children[position], [*children[position][1:], NO_NODE], strict=False):
            visits.append((False, child, position, sibling))
            visit(child + 1)
            visits.append((True, child, position, sibling))

    visit(0)
    return visits
