"""Rules for drafts whose tokens were drawn from q."""

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules.any_draft import along
from draftsmith.decode.rules.outcome import Decided, ratio, residual

# Shapes: B sequences, N draft nodes, P = N + 1 positions, V vocabulary.


def token_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Accept x ~ q with probability min(1, p/q); after the last rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1. Siblings of a tree are tested in the order in which they were
    drawn. A rejection changes p to norm(max(p - q, 0)) and removes the token from q, so that q is the distribution from
    which the next sibling was drawn. Jeon et al. 2024, arXiv:2402.14160.
    """
    if draft.is_chain:
        q_BNV, overlap_BN, ratio_BN = _overlap_and_ratios(p_BPV, draft)
        accepted_B = draws.until_failure(ratio_BN, draft.valid_BN)
        return _chain_outcome(p_BPV, q_BNV, draft, draws, accepted_B, overlap_BN, None)
    return _token_rule_of_trees(p_BPV, draft, draws)


def _token_rule_of_trees(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Test every node whose parent is the last accepted one, in order: parents are before their children."""
    parent_BN = draft.parent_positions().expand_as(draft.tokens_BN)
    p_BV, position_B = p_BPV[:, 0], torch.zeros_like(parent_BN[:, 0])
    removed_BV = torch.zeros_like(p_BV, dtype=torch.bool)
    for node, token_B1 in enumerate(draft.tokens_BN.split(1, 1)):
        q_BV = draft.q_BNV[:, node].masked_fill(removed_BV, 0.0)
        changed_B1 = removed_BV.any(-1, keepdim=True)
        p_BV, q_BV = (x_BV / x_BV.sum(-1, keepdim=True).where(changed_B1, 1.0) for x_BV in (p_BV, q_BV))
        ratio_B = (p_BV.gather(1, token_B1) / q_BV.gather(1, token_B1))[:, 0].double()
        tested_B = parent_BN[:, node] == position_B
        if draft.valid_BN is not None:
            tested_B = tested_B & draft.valid_BN[:, node]
        accepted_B = draws.passes(ratio_B, node, tested_B) & tested_B
        rejected_B1 = (tested_B & ~accepted_B)[:, None]
        p_BV = torch.where(rejected_B1, residual(p_BV, q_BV), p_BV)
        p_BV = torch.where(accepted_B[:, None], p_BPV[:, node + 1], p_BV)
        position_B = torch.where(accepted_B, node + 1, position_B)
        removed_B1 = rejected_B1 | removed_BV.gather(1, token_B1)
        removed_BV = removed_BV.scatter(1, token_B1, removed_B1) & ~accepted_B[:, None]
    path_BD = draft.paths(position_B[:, None] - 1)[:, 0]
    return Decided(path_BD, draws.next(p_BV), along(_overlap(p_BPV, draft), path_BD, draft))


def _overlap(p_BPV: Tensor, draft: DraftBatch) -> Tensor:
    """Return the sum of min(p, q) [B, P] at each position that has children, and 0 elsewhere."""
    overlap_BP, rows_B = torch.zeros_like(p_BPV[..., 0]), torch.arange(len(p_BPV), device=p_BPV.device)
    parent_BN = draft.parent_positions().expand_as(draft.tokens_BN)
    p_BNV = p_BPV[rows_B[:, None], parent_BN]
    overlap_BN = torch.minimum(p_BNV, draft.q_BNV).sum(-1)
    if draft.valid_BN is not None:
        overlap_BN = overlap_BN * draft.valid_BN
    return overlap_BP.scatter_reduce_(1, parent_BN, overlap_BN, "amax")  # siblings have the same q


def block_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Accept the longest prefix that a joint test of the block allows; in expectation at least the token rule's.

    With p_0 = 1 and p_i = min(1, p_(i-1) p(x_i)/q(x_i)), prefix i is accepted with probability
    h_i = S_i / (S_i + 1 - p_i), S_i = sum_x max(p_i p(x) - q(x), 0), and the whole block with p_N. The residual is
    scaled by the accepted prefix's p_i. Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    N = len(draft)
    q_BNV, overlap_BN, ratio_BN = _overlap_and_ratios(p_BPV, draft)
    weights = [torch.ones_like(ratio_BN[:, 0])]
    for ratio_B in ratio_BN.unbind(1):
        weights.append((weights[-1] * ratio_B).clamp_max_(1.0))
    weight_BP = torch.stack(weights, 1)
    if N > 1:
        scaled_BNV = weight_BP[:, 1:N, None].to(p_BPV.dtype) * p_BPV[:, 1:N]
        surplus_BN = (scaled_BNV - q_BNV[:, 1:]).clamp_min_(0).sum(-1).double()
        part_BN = ratio(surplus_BN, surplus_BN + 1 - weight_BP[:, 1:N])
        accept_BN = torch.cat([part_BN, weight_BP[:, N:]], 1)
        if draft.valid_BN is not None:  # the last valid token ends the block
            ends_BN = torch.cat([~draft.valid_BN[:, 1:], torch.ones_like(draft.valid_BN[:, :1])], 1)
            accept_BN = torch.where(ends_BN, weight_BP[:, 1:], accept_BN)
    else:
        accept_BN = weight_BP[:, 1:]
    accepted_B = draws.longest(accept_BN, draft.valid_BN)
    return _chain_outcome(p_BPV, q_BNV, draft, draws, accepted_B, overlap_BN, weight_BP)


def _overlap_and_ratios(p_BPV: Tensor, draft: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, N, V], for each position the sum of min(p, q), and p/q at the draft token in fp64."""
    N = len(draft)
    q_BNV = draft.q_BNV
    p_BNV, tokens_BN1 = p_BPV[:, :N], draft.tokens_BN[..., None]
    ratio_BN = (p_BNV.gather(2, tokens_BN1) / q_BNV.gather(2, tokens_BN1))[..., 0].double()
    return q_BNV, torch.minimum(p_BNV, q_BNV).sum(-1), ratio_BN


def _chain_outcome(
    p_BPV: Tensor,
    q_BNV: Tensor,
    draft: DraftBatch,
    draws: Draws,
    accepted_B: Tensor,
    overlap_BN: Tensor,
    weight_BP: Tensor | None,
) -> Decided:
    """Draw the token after the accepted prefixes: from the residual, or from p after a whole draft.

    `weight_BP`: the scale of p in the residual after each prefix; None for a scale of 1.
    """
    B, N = overlap_BN.shape
    rows_B, steps_N = torch.arange(B, device=p_BPV.device), torch.arange(N, device=p_BPV.device)
    if draft.valid_BN is None:
        whole_B = accepted_B == N
    else:
        count_B = draft.valid_BN.sum(1)
        accepted_B = torch.minimum(accepted_B, count_B)
        whole_B = accepted_B == count_B
    p_BV = p_BPV[rows_B, accepted_B]
    q_BV = q_BNV[rows_B, accepted_B.clamp_max(N - 1)].masked_fill_(whole_B[:, None], 0.0)
    scale_B = None if weight_BP is None else weight_BP[rows_B, accepted_B].masked_fill_(whole_B, 1.0)
    next_B = draws.next(residual(p_BV, q_BV, scale_B))
    tested_BN = steps_N <= accepted_B[:, None]
    if draft.valid_BN is not None:
        tested_BN = tested_BN & draft.valid_BN
    path_BN = torch.where(steps_N < accepted_B[:, None], steps_N, -1)
    return Decided(path_BN, next_B, overlap_BN.masked_fill_(~tested_BN, torch.nan))
