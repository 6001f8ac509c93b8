"""Rules for any draft, however its tokens were chosen, sorted or pruned."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules.outcome import Decided, VerifyResult
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft

# Shapes: B sequences, N draft nodes, P = N + 1 positions, D levels of the draft, V vocabulary.


def verify_greedy(target_tokens: Sequence[int], draft: Draft) -> VerifyResult:
    """Descend while a child equals the target's token, then return the target's token as the next one.

    `target_tokens`: [N + 1], the target's token after the root and after each node.
    """
    if not draft.tokens:
        return VerifyResult((), target_tokens[0], ())
    if draft.is_chain:
        tokens, accepted = draft.tokens, 0
        while accepted < len(tokens) and tokens[accepted] == target_tokens[accepted]:
            accepted += 1
        overlap = (1.0,) * accepted + ((0.0,) if accepted < len(tokens) and tokens[accepted] != NO_NODE else ())
        return VerifyResult(tuple(range(accepted)), target_tokens[accepted], overlap)
    children = draft.children
    node, path = ROOT, []
    while True:
        token = target_tokens[node + 1]
        below = children[node + 1]
        match = next((child for child in below if draft.tokens[child] == token), None)
        if match is None:
            tested = any(draft.tokens[child] != NO_NODE for child in below)
            return VerifyResult(tuple(path), token, (1.0,) * len(path) + ((0.0,) if tested else ()))
        path.append(match)
        node = match


def point_mass_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Draw y ~ p; descend if y is among the children, otherwise y is the next token.

    Every emitted token is a draw from p, so the rule is exact for any choice of candidates. It accepts with probability
    sum_{x in children} p(x), the maximum of any rule for candidates that are not random.
    """
    drawn_BP = draws.along(p_BPV, draft)
    position_BN = draft.parent_positions().expand_as(draft.tokens_BN)
    leaf_B = _deepest(draft, drawn_BP.gather(1, position_BN) == draft.tokens_BN)
    path_BD = draft.paths(leaf_B[:, None])[:, 0]
    next_B = drawn_BP.gather(1, leaf_B[:, None] + 1)[:, 0]
    return Decided(path_BD, next_B, along(_candidates(p_BPV, draft), path_BD, draft))


def _deepest(draft: DraftBatch, passes_BN: Tensor) -> Tensor:
    """Return the first of the deepest nodes [B] whose whole path consists of valid nodes that pass, or `ROOT`."""
    if draft.valid_BN is not None:
        passes_BN = passes_BN & draft.valid_BN
    if draft.is_chain:
        return passes_BN.cumprod(1).sum(1) - 1
    reached_BN, position_BN = passes_BN, draft.parent_positions().expand_as(passes_BN)
    for _ in range(draft.depth - 1):
        reached_BP = torch.nn.functional.pad(reached_BN, (1, 0), value=True)
        reached_BN = passes_BN & reached_BP.gather(1, position_BN)
    depth_BN = draft.depths()[:, 1:] * reached_BN
    return torch.where(reached_BN.any(1), depth_BN.argmax(1), ROOT)


def _candidates(p_BPV: Tensor, draft: DraftBatch) -> Tensor:
    """Return the probability [B, P] of the children of each position, which hold different tokens."""
    position_BN = draft.parent_positions().expand(len(p_BPV), -1)
    p_BN = _of_tokens(p_BPV, draft.tokens_BN, position_BN)
    if draft.valid_BN is not None:
        p_BN = p_BN * draft.valid_BN
    return torch.zeros_like(p_BPV[:, :, 0]).scatter_add_(1, position_BN, p_BN)


def _of_tokens(p_BPV: Tensor, tokens_BN: Tensor, position_BN: Tensor) -> Tensor:
    """Return the target's probability [B, N] of each draft token, whose parent has this position."""
    rows_B1 = torch.arange(p_BPV.shape[0], device=p_BPV.device)[:, None]
    return p_BPV[rows_B1, position_BN, tokens_BN]


def along(values_BP: Tensor, path_BD: Tensor, draft: DraftBatch) -> Tensor:
    """Return the values [B, D] at the root and at the nodes of each path that have a valid child, and NaN elsewhere."""
    position_BD = torch.cat([torch.zeros_like(path_BD[:, :1]), path_BD[:, :-1] + 1], 1)
    child_BN = torch.ones_like(draft.tokens_BN) if draft.valid_BN is None else draft.valid_BN.long()
    children_BP = torch.zeros_like(values_BP, dtype=torch.int64)
    tested_BP = children_BP.scatter_add_(1, draft.parent_positions().expand_as(child_BN), child_BN) > 0
    tested_BD = tested_BP.gather(1, position_BD)
    tested_BD[:, 1:] &= path_BD[:, :-1] >= 0
    return values_BP.gather(1, position_BD).masked_fill_(~tested_BD, torch.nan)


EPSILON, DELTA = 0.09, 0.3
"""The paper's constants of typical acceptance."""


def typical_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Accept the longest path on which every token has p(x) > min(epsilon, delta exp(-H(p))); then draw from p.

    Cai et al. 2024, arXiv:2401.10774, section 3.3, with epsilon = 0.09 and delta = 0.3. Lossy for all values of
    the two constants.
    """
    B, N = p_BPV.shape[0], len(draft)
    entropy_BP = -(p_BPV * p_BPV.clamp_min(1e-30).log()).sum(-1)
    threshold_BP = (DELTA * (-entropy_BP).exp()).clamp_max_(EPSILON)
    position_BN = draft.parent_positions().expand(B, N)
    leaf_B = _deepest(draft, _of_tokens(p_BPV, draft.tokens_BN, position_BN) > threshold_BP.gather(1, position_BN))
    path_BD = draft.paths(leaf_B[:, None])[:, 0]
    next_B = draws.next(p_BPV[torch.arange(B, device=p_BPV.device), leaf_B + 1])
    return Decided(path_BD, next_B, along(_candidates(p_BPV, draft), path_BD, draft))
