"""Typical acceptance: LOSSY. It keeps likely draft tokens, so the text is no longer distributed as the target's."""

from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import ROOT, Draft

EPSILON, DELTA = 0.09, 0.3


def typical_rule(p_PV: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Keep the longest path on which every token has p(x) > min(epsilon, delta exp(-H(p))); then draw from p.

    Cai et al. 2024, arXiv:2401.10774, section 3.3, with the paper's epsilon = 0.09 and delta = 0.3. Lossy: no choice of
    the two makes the output the target's.
    """
    entropy_P = -(p_PV * p_PV.clamp_min(1e-30).log()).sum(-1)
    threshold_P = (DELTA * (-entropy_P).exp()).clamp_max(EPSILON).tolist()
    reached, best = {ROOT}, ROOT
    depths = {ROOT: 0}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent in reached and float(p_PV[parent + 1, token]) > threshold_P[parent + 1]:
            reached.add(node)
            depths[node] = depths[parent] + 1
            if depths[node] > depths[best]:
                best = node
    path, children = draft.path(best), draft.children
    overlap = [
        float(sum(p_PV[node + 1, token] for token in {draft.tokens[child] for child in children[node + 1]}))
        for node in [ROOT, *path]
        if children[node + 1]
    ]
    return Verdict(tuple(path), chance.categorical(p_PV[best + 1]), tuple(overlap))
