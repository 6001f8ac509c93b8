"""Rules for chains that were drawn from q: the token rule and the block rule.

`p_PV` is always [N + 1, V]: row 0 is the target's distribution behind the last committed token, row i + 1 the one
behind draft node i.

Greedy verification: the target's argmax, nothing else.

The point-mass rule: exact for candidates that were chosen, sorted or pruned in any way at all.

Rules for trees whose siblings were drawn from q: one after the other, each against what p still owes.

Traversal verification: the block rule for trees, leaf by leaf.

Typical acceptance: LOSSY. It keeps likely draft tokens, so the text is no longer distributed as the target's.

What a verification decides.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.sampling import Rng
from draftsmith.heads.draft_tree import ROOT, Draft, DrawnDraft


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path and the token behind it."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, from a child of the root downwards."""
    next_token: int
    """The correction after a rejection, or the bonus token after the path's last token."""
    overlap: tuple[float, ...]
    """For each draft position that was tested, from the first on: sum over v of min(p_v, q_v); for tokens that were not
    drawn from a q, the target's probability of the candidates; 1.0 or 0.0 under greedy decoding."""

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)


def residual(p_V: Tensor, q_V: Tensor, scale: float = 1.0) -> Tensor:
    """max(scale * p - q, 0), unnormalised: what the target still owes after a rejection. [V]

    A rejection implies that something is left; only rounding can leave nothing, when both are equal up to the last
    bit. Then p itself is what the residual tends to.
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
        # Drawn even where it is certain: rounding then never shifts the draws that follow.
        if rng.bernoulli(min(1.0, ratios[i])):
            continue
        return VerifyResult(tuple(range(i)), rng.categorical(residual(p_PV[i], q_NV[i])), overlap[: i + 1])
    return VerifyResult(tuple(range(N)), rng.categorical(p_PV[N]), overlap)


def block_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Accept the longest prefix that the whole block allows; never fewer tokens in expectation than the token rule.

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
    for i in range(N, 0, -1):  # the largest i that passes: lower ones need not be drawn
        if rng.bernoulli(weights[N] if i == N else _ratio(surplus[i], surplus[i] + 1 - weights[i])):
            accepted = i
            break
    path = tuple(range(accepted))
    if accepted == N:
        return VerifyResult(path, rng.categorical(p_PV[N]), overlap)
    rest_V = residual(p_PV[accepted], q_NV[accepted], weights[accepted])
    return VerifyResult(path, rng.categorical(rest_V), overlap[: accepted + 1])


def _overlap_and_ratios(p_NV: Tensor, q_NV: Tensor, draft: DrawnDraft) -> tuple[tuple[float, ...], list[float]]:
    """Per position: sum of min(p, q), and p/q at the draft token."""
    tokens_N1 = torch.tensor(draft.tokens, device=p_NV.device)[:, None]
    overlap = torch.minimum(p_NV, q_NV).sum(-1)
    ratios = (p_NV.gather(1, tokens_N1) / q_NV.gather(1, tokens_N1))[:, 0]
    return tuple(overlap.tolist()), ratios.tolist()


def _ratio(part: float, whole: float) -> float:
    """part / whole, where 0/0 counts as 1: a prefix of weight one with nothing left to correct is kept."""
    return part / whole if whole > 0 else 1.0


def verify_greedy(target_tokens: list[int], draft: Draft) -> VerifyResult:
    """Descend while a child equals the target's argmax, then emit the argmax.

    `target_tokens`: [N + 1], the argmax behind the root and behind each node.
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
        wanted = target_tokens[node + 1]
        below = children[node + 1]
        match = next((child for child in below if draft.tokens[child] == wanted), None)
        if match is None:
            overlap = (1.0,) * len(path) + ((0.0,) if below else ())
            return VerifyResult(tuple(path), wanted, overlap)
        path.append(match)
        node = match


def point_mass_rule(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Draw y ~ p; descend if y is among the children, otherwise y is the next token.

    Every emitted token is a draw from p, so how the candidates came about cannot matter. It accepts with probability
    sum_{x in children} p(x), the most that any rule can do for candidates that do not depend on chance.
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
    """Siblings drawn independently: accept with min(1, p/q); after each rejection p becomes norm(max(p - q, 0)).

    q stays as it is. SpecInfer, Miao et al. 2023, arXiv:2305.09781, Algorithm 2.
    """
    return _descend(p_PV, draft, rng, shrink=False)


def siblings_without_replacement_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Siblings drawn without replacement, tested in the order in which they were drawn.

    As for independent ones, but after each rejection q loses the rejected token and is renormalised.
    Sequoia, Chen et al. 2024, arXiv:2402.12374, Algorithm 1; recursive rejection sampling, Jeon et al. 2024,
    arXiv:2402.14160.
    """
    return _descend(p_PV, draft, rng, shrink=True)


def _descend(p_PV: Tensor, draft: DrawnDraft, rng: Rng, *, shrink: bool) -> VerifyResult:
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
    """q given that it is not `token`: [V]. All zero when nothing else had any probability."""
    rest_V = q_V.clone()
    rest_V[token] = 0
    total = rest_V.sum()
    return rest_V / total if total > 0 else rest_V


class _Node:
    """The root or a draft token while leaves are tested: what p and q still hold below it, and its weight."""

    def __init__(self, p_V: Tensor, q_V: Tensor | None, children: list[int]) -> None:
        self.p_V, self.q_V = p_V, q_V
        self.children = list(children)
        self.weight = 1.0

    def lose(self, token: int) -> None:
        """A child failed: p becomes norm(max(w p - q, 0)), the weight S/(S + 1 - w), and q loses the child."""
        assert self.q_V is not None, "a node with children has a q"
        rest_V = (self.weight * self.p_V - self.q_V).clamp_min(0)
        left = float(rest_V.sum())
        whole = left + 1 - self.weight
        rest_V = residual(self.p_V, self.q_V, self.weight)
        self.p_V = rest_V / rest_V.sum()
        self.weight = left / whole if whole > 0 else 1.0
        self.q_V = without(self.q_V, token)


def traversal_rule(p_PV: Tensor, draft: DrawnDraft, rng: Rng) -> VerifyResult:
    """Try whole paths: accept the first remaining leaf's path with its weight, else delete the leaf and go on.

    The weight of a node is min(1, w_parent p(x)/q(x)) with what is left of p and q at its parent. Siblings were drawn
    without replacement. On a chain this is the block rule. Weng et al. 2025, arXiv:2505.12398.
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
        parent.lose(draft.tokens[leaf])
        # The parent's weight and p changed: so do the weights below it on the paths that are left.
        _weigh(draft.parents[leaf], nodes, draft)
    return _result(ROOT, nodes, draft, rng, overlap)


def _weigh(start: int, nodes: list[_Node], draft: DrawnDraft) -> None:
    """Set the weights of every node below `start` that is still there."""
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
    path = draft.path(leaf)
    tested = [overlap[node] for node in [ROOT, *path] if node in overlap]
    return VerifyResult(tuple(path), rng.categorical(nodes[leaf + 1].p_V), tuple(tested))


EPSILON, DELTA = 0.09, 0.3


def typical_rule(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
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
    return VerifyResult(tuple(path), rng.categorical(p_PV[best + 1]), tuple(overlap))
