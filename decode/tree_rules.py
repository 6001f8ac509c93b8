"""Verification rules for trees whose siblings were drawn from q; see `verification_rules`."""

import torch
from torch import Tensor

from draftsmith.decode.draws import Draws
from draftsmith.decode.verification_rules import Decided, Outcome, along, paths, ratio, residual
from draftsmith.heads.draft_tree import ROOT, DraftBatch, children_of, depths_of
from draftsmith.heads.rows import constant

# Shapes: B texts, P places, D levels of the draft, V vocabulary.


def siblings_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Outcome:
    """Test siblings that were drawn without replacement, in the order in which they were drawn.

    Accept with min(1, p/q). A rejection sets p to norm(max(p - q, 0)), and removes the token from q, which is
    renormalised. Sequoia, Chen et al. 2024, arXiv:2402.12374, Algorithm 1; recursive rejection sampling, Jeon et al.
    2024, arXiv:2402.14160.
    """
    B, depth = p_BPV.shape[0], max(depths_of(draft.parents))
    children = children_of(draft.parents)
    rows_B = torch.arange(B, device=p_BPV.device)
    node_B = torch.full_like(rows_B, ROOT)
    end_BV, path, overlap = p_BPV[:, 0], [], []
    for level in range(depth):
        places = [place for place, below in enumerate(children) if below and _depth(draft, place) == level]
        next_B = torch.full_like(rows_B, ROOT)
        tested_B = torch.full_like(end_BV[:, 0], torch.nan)
        for place in places:
            here_B = node_B == place - 1
            p_BV, q_BV = p_BPV[:, place], draft.q[children[place][0]]
            open_B = here_B
            for order, child in enumerate(children[place]):
                exists_B = open_B if draft.valid_BN is None else open_B & draft.valid_BN[:, child]
                if order == 0:
                    tested_B = torch.where(exists_B, torch.minimum(p_BV, q_BV).sum(-1), tested_B)
                token_B1 = draft.tokens_BN[:, child, None]
                ratio_B = (p_BV.gather(1, token_B1) / q_BV.gather(1, token_B1))[:, 0].double()
                accepted_B = draws.passes(ratio_B, draft.number(child), exists_B) & exists_B
                next_B = torch.where(accepted_B, child, next_B)
                rejected_B1 = (exists_B & ~accepted_B)[:, None]
                open_B = open_B & ~accepted_B
                rest_BV = residual(p_BV, q_BV)
                p_BV = torch.where(rejected_B1, rest_BV / rest_BV.sum(-1, keepdim=True), p_BV)
                q_BV = without(q_BV, token_B1)
            end_BV = torch.where(open_B[:, None], p_BV, end_BV)
        node_B = next_B
        path.append(next_B)
        overlap.append(tested_B)
    path_BD = torch.stack(path, 1)
    last_B = path_BD.amax(1)  # parents come before their children
    leaf_P = constant(tuple(not below for below in children), p_BPV.device, torch.bool)
    end_BV = torch.where(leaf_P[last_B + 1][:, None], p_BPV[rows_B, last_B + 1], end_BV)
    return Decided(path_BD, draws.next(end_BV), torch.stack(overlap, 1))


def _depth(draft: DraftBatch, place: int) -> int:
    return 0 if place == 0 else depths_of(draft.parents)[place - 1]


def without(q_BV: Tensor, token_B1: Tensor) -> Tensor:
    """Return q conditioned on any token except this one: [B, V]; all zero when no other token has probability."""
    rest_BV = q_BV.scatter(1, token_B1, 0.0)
    return rest_BV / rest_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(rest_BV.dtype).tiny)


class _Traversal:
    """The state of every place: p and q without the rejected children, and the weight, which scales p."""

    def __init__(self, p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> None:
        self.draft, self.draws = draft, draws
        self.children = children_of(draft.parents)
        self.p = list(p_BPV.unbind(1))
        self.q = [draft.q[below[0]] if below else None for below in self.children]
        self.weight = [torch.ones_like(p_BPV[:, 0, 0], dtype=torch.float64) for _ in self.children]
        self.open_B = torch.ones_like(p_BPV[:, 0, 0], dtype=torch.bool)
        """Rows that have accepted no path yet."""
        self.leaf_B = torch.full_like(self.open_B, ROOT, dtype=torch.int64)
        self.end_BV = self.p[0]

    def visit(self, place: int) -> None:
        """Test the paths through each child of `place`, and remove the child where none of them is accepted."""
        for child in self.children[place]:
            token_B1, q_BV = self.draft.tokens_BN[:, child, None], self.q[place]
            assert q_BV is not None, "a node with children has a q"
            ratio_B = (self.p[place].gather(1, token_B1) / q_BV.gather(1, token_B1))[:, 0].double()
            self.weight[child + 1] = (self.weight[place] * ratio_B).clamp_max_(1.0)
            self.visit(child + 1)
            self._test(place, child, token_B1)

    def _test(self, place: int, child: int, token_B1: Tensor) -> None:
        """Accept the path to `child`, all of whose children were removed, with its weight, or remove the child."""
        exists_B = self.open_B if self.draft.valid_BN is None else self.open_B & self.draft.valid_BN[:, child]
        accepted_B = self.draws.passes(self.weight[child + 1], self.draft.number(child), exists_B) & exists_B
        self.leaf_B = torch.where(accepted_B, child, self.leaf_B)
        self.end_BV = torch.where(accepted_B[:, None], self.p[child + 1], self.end_BV)
        self.open_B = self.open_B & ~accepted_B
        p_BV, q_BV, weight_B = self.p[place], self.q[place], self.weight[place]
        assert q_BV is not None
        # p becomes norm(max(w p - q, 0)), the weight S / (S + 1 - w), and q loses the token.
        left_B = (weight_B[:, None].to(p_BV.dtype) * p_BV - q_BV).clamp_min_(0).sum(-1).double()
        rest_BV = residual(p_BV, q_BV, weight_B)
        rejected_B = exists_B & ~accepted_B
        self.p[place] = torch.where(rejected_B[:, None], rest_BV / rest_BV.sum(-1, keepdim=True), p_BV)
        self.weight[place] = torch.where(rejected_B, ratio(left_B, left_B + 1 - weight_B), weight_B)
        self.q[place] = without(q_BV, token_B1)


def traversal_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Outcome:
    """Test whole paths: accept the path of the first remaining leaf with its weight, else remove the leaf and repeat.

    The weight of a node is min(1, w_parent p(x)/q(x)), with p and q at its parent after all rejections. Siblings are
    drawn without replacement. On a chain this is the block rule. Weng et al. 2025, arXiv:2505.12398.

    Leaves are removed in the order of a traversal that visits children before their parent, whatever the draws are.
    """
    state = _Traversal(p_BPV, draft, draws)
    state.visit(0)
    end_BV = torch.where(state.open_B[:, None], state.p[0], state.end_BV)
    path_BD = paths(draft, state.leaf_B)
    overlap = [
        torch.minimum(p_BPV[:, place], draft.q[below[0]]).sum(-1) if below else None
        for place, below in enumerate(children_of(draft.parents))
    ]
    nothing_B = torch.zeros_like(p_BPV[:, 0, 0])
    overlap_BP = torch.stack([nothing_B if value_B is None else value_B for value_B in overlap], 1)
    return Decided(path_BD, draws.next(end_BV), along(overlap_BP, path_BD, draft))
