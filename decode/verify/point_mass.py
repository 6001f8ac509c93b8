"""The point-mass rule: exact for candidates that were chosen, sorted or pruned in any way at all."""

import torch
from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import ROOT, Draft


def point_mass_rule(p_PV: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Draw y ~ p; descend if y is among the children, otherwise y is the next token.

    Every emitted token is a draw from p, so how the candidates came about cannot matter. It accepts with probability
    sum_{x in children} p(x), the most that any rule can do for candidates that do not depend on chance.
    """
    children = draft.children
    node, path, overlap = ROOT, [], []
    while True:
        p_V, below = p_PV[node + 1], children[node + 1]
        token = chance.categorical(p_V)
        if not below:
            return Verdict(tuple(path), token, tuple(overlap))
        candidates = torch.tensor(sorted({draft.tokens[child] for child in below}), device=p_V.device)
        overlap.append(float(p_V[candidates].sum() / p_V.sum()))
        match = next((child for child in below if draft.tokens[child] == token), None)
        if match is None:
            return Verdict(tuple(path), token, tuple(overlap))
        path.append(match)
        node = match
