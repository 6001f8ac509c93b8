"""Rules for chains that were drawn from q: the token rule and the block rule.

`p_PV` is always [N + 1, V]: row 0 is the target's distribution behind the last committed token, row i + 1 the one
behind draft node i.
"""

import torch
from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import DrawnDraft


def residual(p_V: Tensor, q_V: Tensor, scale: float = 1.0) -> Tensor:
    """max(scale * p - q, 0), unnormalised: what the target still owes after a rejection. [V]

    A rejection implies that something is left; only rounding can leave nothing, when both are equal up to the last
    bit. Then p itself is what the residual tends to.
    """
    rest_V = (scale * p_V - q_V).clamp_min(0)
    return rest_V if rest_V.any() else p_V


def token_rule(p_PV: Tensor, draft: DrawnDraft, chance: Chance) -> Verdict:
    """Accept x ~ q with probability min(1, p/q); after the first rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1. Lossless whatever q is.
    """
    N = len(draft)
    if N == 0:
        return Verdict((), chance.categorical(p_PV[0]), ())
    q_NV = draft.q_NV
    overlap, ratios = _overlap_and_ratios(p_PV[:N], q_NV, draft)
    for i in range(N):
        # Drawn even where it is certain: rounding then never shifts the draws that follow.
        if chance.bernoulli(min(1.0, ratios[i])):
            continue
        return Verdict(tuple(range(i)), chance.categorical(residual(p_PV[i], q_NV[i])), overlap[: i + 1])
    return Verdict(tuple(range(N)), chance.categorical(p_PV[N]), overlap)


def block_rule(p_PV: Tensor, draft: DrawnDraft, chance: Chance) -> Verdict:
    """Accept the longest prefix that the whole block allows; never fewer tokens in expectation than the token rule.

    With p_0 = 1 and p_i = min(1, p_(i-1) p(x_i)/q(x_i)), prefix i is accepted with probability
    h_i = S_i / (S_i + 1 - p_i), S_i = sum_x max(p_i p(x) - q(x), 0), and the whole block with p_N. The residual is
    scaled by the accepted prefix's p_i. Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    N = len(draft)
    if N == 0:
        return Verdict((), chance.categorical(p_PV[0]), ())
    q_NV = draft.q_NV
    overlap, ratios = _overlap_and_ratios(p_PV[:N], q_NV, draft)
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    scale_N1 = torch.tensor(weights[:N], dtype=p_PV.dtype, device=p_PV.device)[:, None]
    surplus = (scale_N1 * p_PV[:N] - q_NV).clamp_min(0).sum(-1).tolist()
    accepted = 0
    for i in range(N, 0, -1):  # the largest i that passes: lower ones need not be drawn
        if chance.bernoulli(weights[N] if i == N else _ratio(surplus[i], surplus[i] + 1 - weights[i])):
            accepted = i
            break
    path = tuple(range(accepted))
    if accepted == N:
        return Verdict(path, chance.categorical(p_PV[N]), overlap)
    rest_V = residual(p_PV[accepted], q_NV[accepted], weights[accepted])
    return Verdict(path, chance.categorical(rest_V), overlap[: accepted + 1])


def _overlap_and_ratios(p_NV: Tensor, q_NV: Tensor, draft: DrawnDraft) -> tuple[tuple[float, ...], list[float]]:
    """Per position: sum of min(p, q), and p/q at the draft token."""
    tokens_N1 = torch.tensor(draft.tokens, device=p_NV.device)[:, None]
    overlap = torch.minimum(p_NV, q_NV).sum(-1)
    ratios = (p_NV.gather(1, tokens_N1) / q_NV.gather(1, tokens_N1))[:, 0]
    return tuple(overlap.tolist()), ratios.tolist()


def _ratio(part: float, whole: float) -> float:
    """part / whole, where 0/0 counts as 1: a prefix of weight one with nothing left to correct is kept."""
    return part / whole if whole > 0 else 1.0
