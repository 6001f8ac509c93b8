"""Verification rules: functions of the target's distributions, the drafts and `draws` that return a `Decided`.

    token, block    chains drawn from q
    traversal       the block rule for trees whose siblings were drawn from q without replacement, leaf by leaf
    point-mass      any draft, however its tokens were chosen, sorted or pruned
    typical         any draft; LOSSY: texts are not distributed as the target's
    greedy          any draft under greedy decoding: the target's argmax

A rule verifies the drafts of B texts that have one shape, or parts of one, on the device: it reads no value, so a round
needs one transfer to the host, that of the packed outcome. Rules for any draft take different shapes, too.
`p_BPV` is always [B, N + 1, V]: place 0 holds the target's distribution after the last committed token, place i + 1 the
one after draft node i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.draws import NOT_DRAWN, Draws
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft, DraftBatch, children_of

# Shapes: B texts, N draft nodes, P = N + 1 places, D levels of the draft, V vocabulary.


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path and the token after it."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, starting with a child of the root."""
    next_token: int
    """The correction after a rejection, or the bonus token after the path's last token; `NOT_DRAWN` where the text ends
    with the path or the processors forbid every token."""
    overlap: tuple[float, ...]
    """For each tested draft position, in order: sum over v of min(p_v, q_v); for tokens that were not drawn from q, the
    target's probability of the candidates; 1.0 or 0.0 under greedy decoding."""

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)

    def until(self, empty: Sequence[float]) -> "VerifyResult":
        """Return the result up to the first place on its path that is `empty`: no token is allowed after it."""
        for count, node in enumerate([ROOT, *self.path]):
            if empty[node + 1]:
                return self.first(count)
        return self

    def first(self, count: int) -> "VerifyResult":
        """Return the result of a text that ends with the first `count` of the tokens: nothing after them was tested."""
        if count > self.accepted:
            return self
        return VerifyResult(self.path[:count], NOT_DRAWN, self.overlap[:count])


@dataclass(frozen=True)
class Decided:
    """The outcome of a rule on the device: accepted paths and the tokens after them."""

    path_BD: Tensor
    """Accepted nodes, then -1."""
    next_B: Tensor
    overlap_BD: Tensor
    """For each tested position, then NaN."""

    @property
    def columns(self) -> int:
        """Number of packed values of each text."""
        return 1 + 2 * self.path_BD.shape[1]

    def packed(self) -> Tensor:
        """Return the values [B, columns] in fp64 from which `result` is made."""
        return torch.cat([self.next_B[:, None], self.path_BD, self.overlap_BD.double()], 1)

    def result(self, values: Sequence[float], own: Sequence[int] | None = None) -> VerifyResult:
        """Return the result for one text, from its packed values; `own`: the node of its draft for each node."""
        depth = self.path_BD.shape[1]
        path = (int(node) for node in values[1 : 1 + depth] if node >= 0)
        overlap = (value for value in values[1 + depth : self.columns] if value == value)
        return VerifyResult(
            tuple(path if own is None else (own[node] for node in path)), int(values[0]), tuple(overlap)
        )


def residual(p_BV: Tensor, q_BV: Tensor, scale_B: Tensor | None = None) -> Tensor:
    """Return the unnormalised distributions after a rejection, max(scale * p - q, 0): [B, V].

    After a rejection a row is not zero, except through rounding where p and q differ in the last bit only. Then p, the
    limit of the residual, is returned.
    """
    scaled_BV = p_BV if scale_B is None else scale_B[:, None].to(p_BV.dtype) * p_BV
    rest_BV = (scaled_BV - q_BV).clamp_min_(0)
    return torch.where(rest_BV.any(-1, keepdim=True), rest_BV, p_BV)


def token_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Accept x ~ q with probability min(1, p/q); after the first rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1. Lossless whatever q is.
    """
    q_BNV, overlap_BN, ratio_BN = _overlap_and_ratios(p_BPV, draft)
    accepted_B = draws.until_failure(ratio_BN, draft.valid_BN)
    return _chain_outcome(p_BPV, q_BNV, draft, draws, accepted_B, overlap_BN, None)


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
    q_BNV = torch.stack(draft.q, 1)
    p_BNV, tokens_BN1 = p_BPV[:, :N], draft.tokens_BN[..., None]
    ratio_BN = (p_BNV.gather(2, tokens_BN1) / q_BNV.gather(2, tokens_BN1))[..., 0].double()
    return q_BNV, torch.minimum(p_BNV, q_BNV).sum(-1), ratio_BN


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, with 0/0 = 1: a prefix of weight one without a residual is accepted."""
    return torch.where(whole > 0, part / whole, 1.0)


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
    place_BN = draft.places().expand_as(draft.tokens_BN)
    leaf_B = _deepest(draft, drawn_BP.gather(1, place_BN) == draft.tokens_BN)
    path_BD = paths(draft, leaf_B)
    next_B = drawn_BP.gather(1, leaf_B[:, None] + 1)[:, 0]
    return Decided(path_BD, next_B, along(_candidates(p_BPV, draft), path_BD, draft))


def _deepest(draft: DraftBatch, passes_BN: Tensor) -> Tensor:
    """Return the first of the deepest nodes [B] whose whole path consists of valid nodes that pass, or `ROOT`."""
    if draft.valid_BN is not None:
        passes_BN = passes_BN & draft.valid_BN
    if draft.is_chain:
        return passes_BN.cumprod(1).sum(1) - 1
    reached_BN, place_BN = passes_BN, draft.places().expand_as(passes_BN)
    for _ in range(draft.depth - 1):
        reached_BP = torch.nn.functional.pad(reached_BN, (1, 0), value=True)
        reached_BN = passes_BN & reached_BP.gather(1, place_BN)
    depth_BN = draft.depths()[:, 1:] * reached_BN
    return torch.where(reached_BN.any(1), depth_BN.argmax(1), ROOT)


def _candidates(p_BPV: Tensor, draft: DraftBatch) -> Tensor:
    """Return the probability [B, P] of the children of each place, which hold different tokens."""
    place_BN = draft.places().expand(len(p_BPV), -1)
    p_BN = _of_tokens(p_BPV, draft.tokens_BN, place_BN)
    if draft.valid_BN is not None:
        p_BN = p_BN * draft.valid_BN
    return torch.zeros_like(p_BPV[:, :, 0]).scatter_add_(1, place_BN, p_BN)


def _of_tokens(p_BPV: Tensor, tokens_BN: Tensor, place_BN: Tensor) -> Tensor:
    """Return the target's probability [B, N] of each draft token, whose parent has this place."""
    rows_B1 = torch.arange(p_BPV.shape[0], device=p_BPV.device)[:, None]
    return p_BPV[rows_B1, place_BN, tokens_BN]


def paths(draft: DraftBatch, leaf_B: Tensor) -> Tensor:
    """Return the nodes [B, D] on the path to each leaf, which may be `ROOT`, then -1."""
    (B,), D, device = leaf_B.shape, draft.depth, leaf_B.device
    if draft.is_chain:
        step_D = torch.arange(D, device=device)
        return torch.where(step_D <= leaf_B[:, None], step_D, -1)
    # One column more takes what is written after the root is reached.
    path_BD = torch.full((B, D + 1), -1, device=device)
    above_BP = torch.nn.functional.pad(draft.places().expand_as(draft.tokens_BN) - 1, (1, 0), value=ROOT)
    depth_BP, node_B1 = draft.depths().expand_as(above_BP), leaf_B[:, None]
    for _ in range(D):
        path_BD.scatter_(1, (depth_BP.gather(1, node_B1 + 1) - 1) % (D + 1), node_B1)
        node_B1 = above_BP.gather(1, node_B1 + 1)
    return path_BD[:, :D]


def along(values_BP: Tensor, path_BD: Tensor, draft: DraftBatch) -> Tensor:
    """Return the values [B, D] at the root and at the nodes of each path that have a valid child, and NaN elsewhere."""
    place_BD = torch.cat([torch.zeros_like(path_BD[:, :1]), path_BD[:, :-1] + 1], 1)
    child_BN = torch.ones_like(draft.tokens_BN) if draft.valid_BN is None else draft.valid_BN.long()
    children_BP = torch.zeros_like(values_BP, dtype=torch.int64)
    tested_BP = children_BP.scatter_add_(1, draft.places().expand_as(child_BN), child_BN) > 0
    tested_BD = tested_BP.gather(1, place_BD)
    tested_BD[:, 1:] &= path_BD[:, :-1] >= 0
    return values_BP.gather(1, place_BD).masked_fill_(~tested_BD, torch.nan)


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
    place_BN = draft.places().expand(B, N)
    leaf_B = _deepest(draft, _of_tokens(p_BPV, draft.tokens_BN, place_BN) > threshold_BP.gather(1, place_BN))
    path_BD = paths(draft, leaf_B)
    next_B = draws.next(p_BPV[torch.arange(B, device=p_BPV.device), leaf_B + 1])
    return Decided(path_BD, next_B, along(_candidates(p_BPV, draft), path_BD, draft))


# Trees whose siblings were drawn from q.


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


def traversal_rule(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
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
