"""Verification rules that look correct and are wrong, each in one respect.

The general forms below are the correct rules if no option is changed; a test checks this.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from exact.enumeration import Rng, RowDraws, Verify, verify
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules import RULES, VerifyBatch
from draftsmith.decode.rules.outcome import Decided, VerifyResult
from draftsmith.heads.draft_tree import ROOT, Draft

FIFTH = 0.2
"""Any threshold on p is wrong; at this one both outcomes are common."""


def _ratio(p: float, q: float) -> float:
    return p / q


def residual(p_V: Tensor, q_V: Tensor, scale: float = 1.0) -> Tensor:
    """Return max(scale * p - q, 0), or p where nothing is left."""
    rest_V = (scale * p_V - q_V).clamp_min(0)
    return rest_V if rest_V.any() else p_V


def token_rule(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    return verify(RULES["token"], p_PV, draft, rng)


def unchecked(name: str, p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Apply a correct rule, also to a kind of draft for which it is wrong."""
    draws = RowDraws([_Certain(rng)])
    outcome = RULES[name].verify(p_PV[None], DraftBatch.of([draft]), draws)
    result = outcome.result(outcome.packed()[0].tolist())
    return VerifyResult(result.path, draws.last[0], result.overlap)


class Seeded:
    """Draws one after the other."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def bernoulli(self, probability: float) -> bool:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def categorical(self, weights_V: Tensor) -> int:
        return int(torch.multinomial(weights_V, 1, generator=self._generator))


def batched(rule: Verify, seed: int = 0) -> VerifyBatch:
    """Return a rule for one text as one for the texts of a batch, with draws of its own."""
    rng = Seeded(seed)

    def verify(p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
        B, N = draft.tokens_BN.shape
        path_BN, overlap_BN = torch.full((B, N), ROOT), torch.full((B, N), torch.nan)
        tokens = []
        for row in range(B):
            own, nodes = of_text(draft, row)
            if not nodes:
                tokens.append(rng.categorical(p_BPV[row, 0]))
                continue
            result = rule(p_BPV[row, [0, *(node + 1 for node in nodes)]], own, rng)
            path_BN[row, : result.accepted] = torch.tensor([nodes[node] for node in result.path])
            tokens.append(result.next_token)
        return Decided(path_BN, torch.tensor(tokens), overlap_BN)

    return verify


def of_text(batch: DraftBatch, row: int) -> tuple[Draft, list[int]]:
    """Return the draft of one text, and those nodes of the batch's shape that it has."""
    nodes = [node for node in range(len(batch)) if batch.valid_BN is None or bool(batch.valid_BN[row, node])]
    place = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
    tokens = tuple(int(batch.tokens_BN[row, node]) for node in nodes)
    shape, q = batch.row(row)
    parents = tuple(place[shape[node]] for node in nodes)
    return (Draft(tokens, parents) if q is None else forged(tokens, parents, [q[node] for node in nodes])), nodes


def forged(tokens: Sequence[int], parents: Sequence[int], q: Sequence[Tensor]) -> Draft:
    """Return a drawn draft of tokens that may not have been drawn from `q`, past the guard of its class."""
    draft = Draft(tuple(tokens), tuple(parents))
    object.__setattr__(draft, "_q", tuple(q))
    return draft


def token(
    p_PV: Tensor,
    draft: Draft,
    rng: Rng,
    *,
    accept: Callable[[float, float], float] = _ratio,
    correct: Callable[[Tensor, Tensor], Tensor] = residual,
) -> VerifyResult:
    """The token rule, with options for the acceptance and for the distribution after a rejection."""
    for i, x in enumerate(draft.tokens):
        if not rng.bernoulli(min(1.0, accept(float(p_PV[i, x]), float(draft.q[i][x])))):
            return VerifyResult(tuple(range(i)), rng.categorical(correct(p_PV[i], draft.q[i])), ())
    return VerifyResult(tuple(range(len(draft))), rng.categorical(p_PV[-1]), ())


def residual_of_p(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Draw from p after a rejection instead of norm(max(p - q, 0))."""
    return token(p_PV, draft, rng, correct=lambda p_V, q_V: p_V)


def inverted_ratio(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Accept with probability q/p."""
    return token(p_PV, draft, rng, accept=lambda p, q: q / p)


def accepts_what_p_finds_likely(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Accept every token with p above a fifth."""
    return token(p_PV, draft, rng, accept=lambda p, q: float(p > FIFTH))


def off_by_one_p(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Compare each draft token with the distribution one position later."""
    return token_rule(torch.cat([p_PV[1:], p_PV[-1:]]), draft, rng)


def bonus_from_the_position_before(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Draw the bonus token from the p of the last draft token."""
    return token_rule(torch.cat([p_PV[:-1], p_PV[-2:-1]]), draft, rng)


def dropped_bonus(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Repeat the last draft token instead of drawing the bonus token."""
    result = token_rule(p_PV, draft, rng)
    return result if result.accepted < len(draft) else VerifyResult(result.path, draft.tokens[-1], ())


def reused_uniform(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Compare every draft token with the same uniform number."""
    ratios = [min(1.0, float(p_PV[i, x] / draft.q[i][x])) for i, x in enumerate(draft.tokens)]
    # The number lies between two of the sorted ratios: all ratios above it are accepted.
    edges = sorted({0.0, 1.0, *ratios})
    widths = torch.tensor([high - low for low, high in pairwise(edges)], dtype=torch.float64)
    uniform = edges[rng.categorical(widths)]
    return token(p_PV, draft, _Comparing(uniform, rng))


class _Comparing:
    """Draws tokens as `rng` does, but compares every probability with the same number."""

    def __init__(self, uniform: float, rng: Rng) -> None:
        self._uniform, self.categorical = uniform, rng.categorical

    def bernoulli(self, probability: float) -> bool:
        return self._uniform < probability


class _Certain:
    """Draws as `rng` does, and takes 0/0, which a rule may compute for a draft that is wrong for it, for certain."""

    def __init__(self, rng: Rng) -> None:
        self._rng, self.categorical = rng, rng.categorical

    def bernoulli(self, probability: float) -> bool:
        return self._rng.bernoulli(1.0 if probability != probability else probability)


def block(p_PV: Tensor, draft: Draft, rng: Rng, *, scaled: bool = True, stop_at_failure: bool = False) -> VerifyResult:
    """The block rule, with options to leave out the scaling and the search for the longest prefix."""
    N = len(draft)
    weights, passes = [1.0], []
    for i, x in enumerate(draft.tokens):
        weights.append(min(1.0, weights[-1] * float(p_PV[i, x] / draft.q[i][x])))
    for i in range(1, N):
        surplus = float((weights[i] * p_PV[i] - draft.q[i]).clamp_min(0).sum())
        whole = surplus + 1 - weights[i]
        passes.append(rng.bernoulli(surplus / whole if whole > 0 else 1.0))
    passes.append(rng.bernoulli(weights[N]))
    if stop_at_failure:
        accepted = passes.index(False) if False in passes else N
    else:
        accepted = max((i + 1 for i, passed in enumerate(passes) if passed), default=0)
    if accepted == N:
        return VerifyResult(tuple(range(N)), rng.categorical(p_PV[N]), ())
    rest_V = residual(p_PV[accepted], draft.q[accepted], weights[accepted] if scaled else 1.0)
    return VerifyResult(tuple(range(accepted)), rng.categorical(rest_V), ())


def siblings(
    p_PV: Tensor, draft: Draft, rng: Rng, *, update_p: bool = True, renormalise_q: bool = True
) -> VerifyResult:
    """The token rule of a tree, with options to leave out two of its steps after a rejection."""
    children, node, path = draft.children, ROOT, []
    while True:
        p_V, below = p_PV[node + 1], children[node + 1]
        q_V = draft.q[below[0]] if below else p_V
        for child in below:
            x = draft.tokens[child]
            if rng.bernoulli(float(p_V[x] / q_V[x])):
                path.append(child)
                node = child
                break
            if update_p:
                p_V = residual(p_V, q_V)
                p_V = p_V / p_V.sum()
            q_V = q_V.clone()
            q_V[x] = 0
            if renormalise_q and q_V.any():
                q_V = q_V / q_V.sum()
        else:
            return VerifyResult(tuple(path), rng.categorical(p_V), ())


def point_mass_drawn_again(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """The point-mass rule with a new y ~ p for every child."""
    children, node, path = draft.children, ROOT, []
    while True:
        match = next((x for x in children[node + 1] if rng.categorical(p_PV[node + 1]) == draft.tokens[x]), None)
        if match is None:
            return VerifyResult(tuple(path), rng.categorical(p_PV[node + 1]), ())
        path.append(match)
        node = match
