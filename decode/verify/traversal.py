"""Traversal verification: the block rule for trees, leaf by leaf."""

import torch
from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify.chains import residual
from draftsmith.decode.verify.siblings import without
from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import ROOT, DrawnDraft


class _Node:
    """The root or a draft token while leaves are tested: what p and q still hold below it, and its weight."""

    def __init__(self, p_V: Tensor, q_V: Tensor | None, children: list[int]) -> None:
        self.p_V, self.q_V = p_V, q_V
        self.children = list(children)
        self.weight = 1.0

    def lose(self, token: int) -> None:
        """A child failed: p becomes norm(max(w p - q, 0)), the weight S/(S + 1 - w), and q loses the child."""
        rest_V = (self.weight * self.p_V - self.q_V).clamp_min(0)
        left = float(rest_V.sum())
        whole = left + 1 - self.weight
        rest_V = residual(self.p_V, self.q_V, self.weight)
        self.p_V = rest_V / rest_V.sum()
        self.weight = left / whole if whole > 0 else 1.0
        self.q_V = without(self.q_V, token)


def traversal_rule(p_PV: Tensor, draft: DrawnDraft, chance: Chance) -> Verdict:
    """Try whole paths: accept the first remaining leaf's path with its weight, else delete the leaf and go on.

    The weight of a node is min(1, w_parent p(x)/q(x)) with what is left of p and q at its parent. Siblings were drawn
    without replacement. On a chain this is the block rule. Weng et al. 2025, arXiv:2505.12398.
    """
    overlap = {}
    nodes = []
    for place, below in enumerate(draft.children):
        q_V = draft.q[below[0]] if below else None
        nodes.append(_Node(p_PV[place], q_V, below))
        if below:
            overlap[place - 1] = float(torch.minimum(p_PV[place], q_V).sum())
    _weigh(ROOT, nodes, draft)
    while nodes[0].children:
        leaf = ROOT
        while nodes[leaf + 1].children:
            leaf = nodes[leaf + 1].children[0]
        if chance.bernoulli(nodes[leaf + 1].weight):
            return _verdict(leaf, nodes, draft, chance, overlap)
        parent = nodes[draft.parents[leaf] + 1]
        parent.children.remove(leaf)
        parent.lose(draft.tokens[leaf])
        # The parent's weight and p changed: so do the weights below it on the paths that are left.
        _weigh(draft.parents[leaf], nodes, draft)
    return _verdict(ROOT, nodes, draft, chance, overlap)


def _weigh(start: int, nodes: list[_Node], draft: DrawnDraft) -> None:
    """Set the weights of every node below `start` that is still there."""
    below = [start]
    while below:
        parent = below.pop()
        node = nodes[parent + 1]
        for child in node.children:
            token = draft.tokens[child]
            nodes[child + 1].weight = min(1.0, node.weight * float(node.p_V[token] / node.q_V[token]))
        below += node.children


def _verdict(leaf: int, nodes: list[_Node], draft: DrawnDraft, chance: Chance, overlap: dict[int, float]) -> Verdict:
    path = draft.path(leaf)
    tested = [overlap[node] for node in [ROOT, *path] if node in overlap]
    return Verdict(tuple(path), chance.categorical(nodes[leaf + 1].p_V), tuple(tested))
