"""The randomised probability integral transform: draws from p become uniform numbers.

u = F(x-) + v p(x) with an independent v ~ U(0, 1) is uniform iff x ~ p, whatever p is (Rosenblatt 1952; for discrete
variables Brockwell 2007). The u of the next token is uniform given all earlier tokens, so the u of a text are
independent.

F sums tokens in some order. Any order that is fixed before the token is drawn leaves u uniform; the order decides which
wrong rules are detected. In order of falling p, tokens that occur too often because the target assigns them a high
probability move u towards 0. In order of falling q/p, tokens do that occur too often because the drafter assigns them a
high probability: the error of most wrong rules is a function of q/p, which would average out in vocabulary order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from draftsmith.decode.draws import Draws
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.decode.verification import Outcome, Rule, VerifyBatch, VerifyResult, verify_batch
from draftsmith.heads.draft_tree import ROOT, Draft, DraftBatch

# Shapes: N tokens, V vocabulary, P positions of a draft.

PLACES = 5
"""Positions of a round that are tested separately; the last one includes all later positions."""
AT_ONCE = 2**20
"""Numbers of a table over the vocabulary that are transformed at once."""


def transform(p_NV: Tensor, tokens_N: Tensor, v_N: Tensor, score_NV: Tensor | None = None) -> Tensor:
    """Return u [N] in fp64 of tokens under p [N, V], in order of falling score (None: p itself), ties by token id.

    A token of probability zero gets a u, too; `Texts.impossible` counts those.
    """
    p_NV = p_NV.double()
    p_NV = p_NV / p_NV.sum(-1, keepdim=True)
    score_NV = p_NV if score_NV is None else score_NV
    own_N1 = tokens_N[:, None]
    score_N1 = score_NV.gather(1, own_N1)
    ids_V = torch.arange(p_NV.shape[1], device=p_NV.device)
    before_NV = (score_NV > score_N1) | ((score_NV == score_N1) & (ids_V < own_N1))
    return (p_NV * before_NV).sum(-1) + v_N * p_NV.gather(1, own_N1)[:, 0]


def round_starts(output: DecodeOutput) -> list[int]:
    """Return the index of each round's first token among the new tokens; token 0 comes from the prefill."""
    starts, place = [], 1
    for record in output.rounds:
        starts.append(place)
        place += record.committed
    return starts


def pairs(u_T: Tensor, starts: list[int]) -> Tensor:
    """Return [n, 2]: the first two u from each round start, even if the round has only one token; without overlaps.

    After a pair, the next pair begins with the next round. The start of a round is known before its tokens are drawn,
    so pairs are independent and uniform on the square. (Their number is a stopping time, which makes no difference for
    large numbers, Anscombe 1952.) The test detects random numbers that are used twice.
    """
    taken, free = [], 0
    for start in starts:
        if start >= free and start + 1 < len(u_T):
            taken.append(start)
            free = start + 2
    return torch.stack([u_T[taken], u_T[[start + 1 for start in taken]]], -1)


@dataclass
class Watch:
    """Wraps a rule and records u of every token that it emits, by q/p, under the p that it received.

    The u are stored by the token's place in its round, so that an error in the bonus token alone is not averaged out.
    Splitting by place is valid; splitting by outcome is not, since accepted tokens are more often tokens with a high q.
    A token has place i if its round had accepted i tokens before it. If the round ended earlier, the token was drawn in
    a later round, from p given all earlier tokens; over both cases it is drawn from p, because the decoder is lossless;
    hence it is also drawn from p in the first case. And q after the accepted tokens, or the candidates chosen there,
    are determined by these tokens before the next one is drawn. So u is uniform at every place for any lossless rule.
    (A separate test checks that p is the target's own.)
    """

    rule: Rule | None
    seed: int
    _u: list[list[float]] = field(default_factory=lambda: [[] for _ in range(PLACES)])
    _waiting: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)
    """p, q, token and place of tokens that are not transformed yet; a batch is much cheaper than single tokens."""

    def __post_init__(self) -> None:
        self._v = torch.Generator().manual_seed(self.seed)

    def watched(self, change: VerifyBatch | None = None) -> Rule:
        """Return the rule to use in a decoder; `change` replaces the verification."""
        change = partial(verify_batch, self.rule) if change is None else change
        return Rule("watched", partial(self._watch, change), lambda draft: True, "any draft")

    def _watch(self, verify: VerifyBatch, p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Outcome:
        outcome = verify(p_BPV, draft, draws)
        for row, values in enumerate(outcome.packed().tolist()):
            whole = Draft(tuple(draft.tokens_BN[row].tolist()), draft.parents)  # none of the paths has invalid nodes
            q = tuple(q_BV[row] for q_BV in draft.q) if draft.drawn else None
            self._add(p_BPV[row], whole, q, outcome.result(values, whole))
        return outcome

    def _add(self, p_PV: Tensor, draft: Draft, q: tuple[Tensor, ...] | None, result: VerifyResult) -> None:
        """Keep the emitted tokens with their p and q; `q`: that of each drawn node."""
        tokens = [*(draft.tokens[node] for node in result.path), result.next_token]
        for place, (node, token) in enumerate(zip([ROOT, *result.path], tokens, strict=True)):
            p_V = p_PV[node + 1]
            self._waiting.append((p_V, _q(p_V, draft, q, node), token, min(place, PLACES - 1)))
        if len(self._waiting) * p_PV.shape[1] >= AT_ONCE:
            self._transform()

    def by_place(self) -> list[Tensor]:
        """Return u by place, in fp64; the last place includes all later ones."""
        self._transform()
        return [torch.tensor(u, dtype=torch.float64) for u in self._u]

    def _transform(self) -> None:
        if not self._waiting:
            return
        rows_p, rows_q, tokens, places = zip(*self._waiting, strict=True)
        self._waiting = []
        p_NV, q_NV = torch.stack(rows_p).double(), torch.stack(rows_q).double()
        score_NV = (q_NV / p_NV).nan_to_num(0.0, posinf=0.0)
        v_N = torch.rand(len(tokens), generator=self._v, dtype=torch.float64).to(p_NV.device)
        u_N = transform(p_NV, torch.tensor(tokens, device=p_NV.device), v_N, score_NV)
        for place, u in zip(places, u_N.tolist(), strict=True):
            self._u[place].append(u)


def _q(p_V: Tensor, draft: Draft, q: tuple[Tensor, ...] | None, node: int) -> Tensor:
    """Return the numerator [V] of the score q/p after `node`.

    For chosen draft tokens, candidates come before all other tokens; without draft tokens, the order is that of p.
    """
    below = draft.children[node + 1]
    if not below:
        return p_V * p_V
    if q is not None:
        return q[below[0]]
    q_V = torch.zeros_like(p_V)
    candidates = [draft.tokens[child] for child in below]
    q_V[candidates] = p_V[candidates]
    return q_V


def chunks(count: int, vocabulary: int, *, numbers: int = 2**25) -> Iterator[slice]:
    """Yield slices of `count` texts or tokens whose tables over the vocabulary have at most `numbers` entries."""
    size = max(1, numbers // vocabulary)
    for start in range(0, count, size):
        yield slice(start, start + size)
