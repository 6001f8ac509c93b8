"""Verification rules: functions of the target's distributions, the draft and `rng` that return a `VerifyResult`.

    token, block                                  chains drawn from q
    siblings-iid, siblings-without-replacement    trees whose siblings were drawn from q, tested one after the other
    traversal                                     the block rule for trees drawn without replacement, leaf by leaf
    point-mass                                    any draft, however its tokens were chosen, sorted or pruned
    typical                                       any draft; LOSSY: texts are not distributed as the target's
    greedy                                        any draft under greedy decoding: the target's argmax

`p_PV` is always [N + 1, V]: row 0 is the target's distribution after the last committed token, row i + 1 the one
after draft node i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.sampling import Rng
from draftsmith.heads.draft_tree import ROOT, Draft, DrawnDraft


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path and the token after it."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, starting with a child of the root."""
    next_token: int
    """The correction after a rejection, or the bonus token after the path's last token."""
    overlap: tuple[float, ...]
    """For each tested draft position, in order: sum over v of min(p_v, q_v); for tokens that were not drawn from q, the
    target's probability of the candidates; 1.0 or 0.0 under greedy decoding."""

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)


def residual(p_V: Tensor, q_V: Tensor, scale: float = 1.0) -> Tensor:
    """Return the unnormalised distribution after a rejection, max(scale * p - q, 0): [V].

    After a rejection it is not zero, except through rounding where p and q differ in the last bit only. Then p, the
    limit of the residual, is returned.
    """
    rest_V = (scale * p_V - q_V).clamp_min(0)
    return rest_V if rest_V.any() else p_V


def token_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Accept x ~ q with probability min(1, p/q); after the first rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1. Lossless whatever q is.
    """
    N = len(draft)
    if N == 0:
        return VerifyResult((), rng.categorical(p_PV[0]), ())
    q_NV = draft.q_NV
    overlap, ratios = _overlap_and_ratios(p_PV[:N], q_NV, draft)
    for i in range(N):
        # Drawn even where acceptance is certain, so rounding does not shift the draws that follow.
        if rng.bernoulli(min(1.0, ratios[i])):
            continue
        return VerifyResult(tuple(range(i)), rng.categorical(residual(p_PV[i], q_NV[i])), overlap[: i + 1])
    return VerifyResult(tuple(range(N)), rng.categorical(p_PV[N]), overlap)


def block_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Accept the longest prefix that a joint test of the block allows; in expectation at least the token rule's.

    With p_0 = 1 and p_i = min(1, p_(i-1) p(x_i)/q(x_i)), prefix i is accepted with probability
    h_i = S_i / (S_i + 1 - p_i), S_i = sum_x max(p_i p(x) - q(x), 0), and the whole block with p_N. The residual is
    scaled by the accepted prefix's p_i. Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
    """
    N = len(draft)
    if N == 0:
        return VerifyResult((), rng.categorical(p_PV[0]), ())
    q_NV = draft.q_NV
    overlap, ratios = _overlap_and_ratios(p_PV[:N], q_NV, draft)
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    scale_N1 = torch.tensor(weights[:N], dtype=p_PV.dtype, device=p_PV.device)[:, None]
    surplus = (scale_N1 * p_PV[:N] - q_NV).clamp_min(0).sum(-1).tolist()
    accepted = 0
    for i in range(N, 0, -1):  # the largest i that passes; smaller ones need no draw
        if rng.bernoulli(weights[N] if i == N else _ratio(surplus[i], surplus[i] + 1 - weights[i])):
            accepted = i
            break
    path = tuple(range(accepted))
    if accepted == N:
        return VerifyResult(path, rng.categorical(p_PV[N]), overlap)
    rest_V = residual(p_PV[accepted], q_NV[accepted], weights[accepted])
    return VerifyResult(path, rng.categorical(rest_V), overlap[: accepted + 1])


def _overlap_and_ratios(p_NV: Tensor, q_NV: Tensor, draft: DrawnDraft) -> tuple[tuple[float, ...], list[float]]:
    """Return for each position the sum of min(p, q), and p/q at the draft token."""
    tokens_N1 = torch.tensor(draft.tokens, device=p_NV.device)[:, None]
    overlap = torch.minimum(p_NV, q_NV).sum(-1)
    ratios = (p_NV.gather(1, tokens_N1) / q_NV.gather(1, tokens_N1))[:, 0]
    return tuple(overlap.tolist()), ratios.tolist()


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, with 0/0 = 1: a prefix of weight one without a residual is accepted."""
    return part / whole if whole > 0 else 1.0


def verify_greedy(target_tokens: list[int], draft: Draft) -> VerifyResult:
    """Descend while a child equals the target's argmax, then return the argmax as the next token.

    `target_tokens`: [N + 1], the argmax after the root and after each node.
    """
    if draft.is_chain:
        tokens, accepted = draft.tokens, 0
        while accepted < len(tokens) and tokens[accepted] == target_tokens[accepted]:
            accepted += 1
        overlap = (1.0,) * accepted + ((0.0,) if accepted < len(tokens) else ())
        return VerifyResult(tuple(range(accepted)), target_tokens[accepted], overlap)
    children = draft.children
    node, path = ROOT, []
    while True:
        target_argmax = target_tokens[node + 1]
        below = children[node + 1]
        match = next((child for child in below if draft.tokens[child] == target_argmax), None)
        if match is None:
            overlap = (1.0,) * len(path) + ((0.0,) if below else ())
            return VerifyResult(tuple(path), target_argmax, overlap)
        path.append(match)
        node = match


def point_mass_rule(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Draw y ~ p; descend if y is among the children, otherwise y is the next token.

    Every emitted token is a draw from p, so the rule is exact for any choice of candidates. It accepts with probability
    sum_{x in children} p(x), the maximum of any rule for candidates that are not random.
    """
    children = draft.children
    node, path, overlap = ROOT, [], []
    while True:
        p_V, below = p_PV[node + 1], children[node + 1]
        token = rng.categorical(p_V)
        if not below:
            return VerifyResult(tuple(path), token, tuple(overlap))
        candidates = torch.tensor(sorted({draft.tokens[child] for child in below}), device=p_V.device)
        overlap.append(float(p_V[candidates].sum() / p_V.sum()))
        match = next((child for child in below if draft.tokens[child] == token), None)
        if match is None:
            return VerifyResult(tuple(path), token, tuple(overlap))
        path.append(match)
        node = match


def siblings_iid_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Test independently drawn siblings: accept with min(1, p/q); a rejection sets p to norm(max(p - q, 0)).

    q does not change. SpecInfer, Miao et al. 2023, arXiv:2305.09781, Algorithm 2.
    """
    return _descend(p_PV, draft, rng, shrink=False)


def siblings_without_replacement_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Test siblings that were drawn without replacement, in the order in which they were drawn.

    As for independent siblings, but each rejection also removes the token from q, which is renormalised.
    Sequoia, Chen et al. 2024, arXiv:2402.12374, Algorithm 1; recursive rejection sampling, Jeon et al. 2024,
    arXiv:2402.14160.
    """
    return _descend(p_PV, draft, rng, shrink=True)


def _descend(p_PV: Tensor, draft: DrawnDraft, rng: Rng, *, shrink: bool) -> VerifyResult:
    """Test the children of each accepted node in order; `shrink`: a rejection removes the token from q."""
    children = draft.children
    node, path, overlap = ROOT, [], []
    while below := children[node + 1]:
        p_V, q_V = p_PV[node + 1], draft.q[below[0]]
        overlap.append(float(torch.minimum(p_V, q_V).sum()))
        accepted = None
        for child in below:
            token = draft.tokens[child]
            ratio = float(p_V[token] / q_V[token])
            if rng.bernoulli(min(1.0, ratio)):
                accepted = child
                break
            rest_V = residual(p_V, q_V)
            p_V = rest_V / rest_V.sum()
            if shrink:
                q_V = without(q_V, token)
        if accepted is None:
            return VerifyResult(tuple(path), rng.categorical(p_V), tuple(overlap))
        path.append(accepted)
        node = accepted
    return VerifyResult(tuple(path), rng.categorical(p_PV[node + 1]), tuple(overlap))


def without(q_V: Tensor, token: int) -> Tensor:
    """Return q conditioned on any token except `token`: [V]; all zero when no other token has probability."""
    rest_V = q_V.clone()
    rest_V[token] = 0
    total = rest_V.sum()
    return rest_V / total if total > 0 else rest_V


class _Node:
    """The root or a draft token during the traversal: its weight, and p and q after it without rejected children."""

    def __init__(self, p_V: Tensor, q_V: Tensor | None, children: list[int]) -> None:
        self.p_V, self.q_V = p_V, q_V
        self.children = list(children)
        self.weight = 1.0

    def reject(self, token: int) -> None:
        """Reject a child: p becomes norm(max(w p - q, 0)), the weight S/(S + 1 - w), and q loses the token."""
        assert self.q_V is not None, "a node with children has a q"
        rest_V = (self.weight * self.p_V - self.q_V).clamp_min(0)
        left = float(rest_V.sum())
        whole = left + 1 - self.weight
        rest_V = residual(self.p_V, self.q_V, self.weight)
        self.p_V = rest_V / rest_V.sum()
        self.weight = left / whole if whole > 0 else 1.0
        self.q_V = without(self.q_V, token)


def traversal_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Test whole paths: accept the path of the first remaining leaf with its weight, else remove the leaf and repeat.

    The weight of a node is min(1, w_parent p(x)/q(x)), with p and q at its parent after all rejections. Siblings are
    drawn without replacement. On a chain this is the block rule. Weng et al. 2025, arXiv:2505.12398.
    """
    overlap = {}
    nodes = []
    for place, below in enumerate(draft.children):
        q_V = None
        if below:
            q_V = draft.q[below[0]]
            overlap[place - 1] = float(torch.minimum(p_PV[place], q_V).sum())
        nodes.append(_Node(p_PV[place], q_V, below))
    _weigh(ROOT, nodes, draft)
    while nodes[0].children:
        leaf = ROOT
        while nodes[leaf + 1].children:
            leaf = nodes[leaf + 1].children[0]
        if rng.bernoulli(nodes[leaf + 1].weight):
            return _result(leaf, nodes, draft, rng, overlap)
        parent = nodes[draft.parents[leaf] + 1]
        parent.children.remove(leaf)
        parent.reject(draft.tokens[leaf])
        # The parent's weight and p have changed, and with them the weights of its remaining descendants.
        _weigh(draft.parents[leaf], nodes, draft)
    return _result(ROOT, nodes, draft, rng, overlap)


def _weigh(start: int, nodes: list[_Node], draft: DrawnDraft) -> None:
    """Set the weights of the remaining descendants of `start`."""
    below = [start]
    while below:
        parent = below.pop()
        node = nodes[parent + 1]
        for child in node.children:
            assert node.q_V is not None, "a node with children has a q"
            token = draft.tokens[child]
            nodes[child + 1].weight = min(1.0, node.weight * float(node.p_V[token] / node.q_V[token]))
        below += node.children


def _result(leaf: int, nodes: list[_Node], draft: DrawnDraft, rng: Rng, overlap: dict[int, float]) -> VerifyResult:
    """Accept the path to `leaf` and draw the next token from what is left of p after it."""
    path = draft.path(leaf)
    tested = [overlap[node] for node in [ROOT, *path] if node in overlap]
    return VerifyResult(tuple(path), rng.categorical(nodes[leaf + 1].p_V), tuple(tested))


EPSILON, DELTA = 0.09, 0.3
"""The paper's constants of typical acceptance."""


def typical_rule(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Accept the longest path on which every token has p(x) > min(epsilon, delta exp(-H(p))); then draw from p.

    Cai et al. 2024, arXiv:2401.10774, section 3.3, with epsilon = 0.09 and delta = 0.3. Lossy for all values of
    the two constants.
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
    return VerifyResult(tuple(path), rng.categorical(p_PV[best + 1]), tuple(overlap))
