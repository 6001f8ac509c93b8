"""Rules for trees whose siblings were drawn from q: one after the other, each against what p still owes."""

import torch
from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify.chains import residual
from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import ROOT, DrawnDraft


def siblings_iid_rule(p_PV: Tensor, draft: DrawnDraft, chance: Chance) -> Verdict:
    """Siblings drawn independently: accept with min(1, p/q); after each rejection p becomes norm(max(p - q, 0)).

    q stays as it is. SpecInfer, Miao et al. 2023, arXiv:2305.09781, Algorithm 2.
    """
    return _descend(p_PV, draft, chance, shrink=False)


def siblings_without_replacement_rule(p_PV: Tensor, draft: DrawnDraft, chance: Chance) -> Verdict:
    """Siblings drawn without replacement, tested in the order in which they were drawn.

    As for independent ones, but after each rejection q loses the rejected token and is renormalised.
    Sequoia, Chen et al. 2024, arXiv:2402.12374, Algorithm 1; recursive rejection sampling, Jeon et al. 2024,
    arXiv:2402.14160.
    """
    return _descend(p_PV, draft, chance, shrink=True)


def _descend(p_PV: Tensor, draft: DrawnDraft, chance: Chance, *, shrink: bool) -> Verdict:
    children = draft.children
    node, path, overlap = ROOT, [], []
    while below := children[node + 1]:
        p_V, q_V = p_PV[node + 1], draft.q[below[0]]
        overlap.append(float(torch.minimum(p_V, q_V).sum()))
        accepted = None
        for child in below:
            token = draft.tokens[child]
            ratio = float(p_V[token] / q_V[token])
            if chance.bernoulli(min(1.0, ratio)):
                accepted = child
                break
            rest_V = residual(p_V, q_V)
            p_V = rest_V / rest_V.sum()
            if shrink:
                q_V = without(q_V, token)
        if accepted is None:
            return Verdict(tuple(path), chance.categorical(p_V), tuple(overlap))
        path.append(accepted)
        node = accepted
    return Verdict(tuple(path), chance.categorical(p_PV[node + 1]), tuple(overlap))


def without(q_V: Tensor, token: int) -> Tensor:
    """q given that it is not `token`: [V]. All zero when nothing else had any probability."""
    rest_V = q_V.clone()
    rest_V[token] = 0
    total = rest_V.sum()
    return rest_V / total if total > 0 else rest_V
