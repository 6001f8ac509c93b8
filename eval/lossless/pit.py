"""The randomised probability integral transform: tokens that are draws from p become uniform numbers.

u = F(x-) + v p(x) with an independent v ~ U(0, 1) is uniform iff x ~ p, whatever p is (Rosenblatt 1952; for discrete
variables Brockwell 2007). The next token's u is uniform given all that came before, so those of a text are independent.

F adds up tokens in some order. Any order that is fixed before the token is drawn leaves u uniform, and decides which
wrong rules show. By falling p, tokens that come too often because the target likes them pull u towards 0. By falling
q/p, tokens that come too often because the drafter likes them do: what most wrong rules get wrong is a function of q/p,
and in the order of the vocabulary it would average out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decode.sampling import Rng
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.decode.verification import Rule, VerifyResult, verify
from draftsmith.heads.draft_tree import ROOT, Draft, DrawnDraft

# Shapes: N tokens, V vocabulary, P positions of a draft.

PLACES = 5
"""Of a round that are tested apart; the last one is all that follow."""
AT_ONCE = 2**20
"""Numbers of a table over the vocabulary."""
Verify = Callable[[Tensor, Draft, Rng], VerifyResult]


def transform(p_NV: Tensor, tokens_N: Tensor, v_N: Tensor, score_NV: Tensor | None = None) -> Tensor:
    """u [N] in fp64 of tokens under p [N, V], in the order of falling score (None: p itself), ties by token id.

    A token of probability zero gets a u all the same; `impossible` counts those.
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
    """Where each round's first token stands among the new ones; the first of all comes from the prefill."""
    starts, place = [], 1
    for record in output.rounds:
        starts.append(place)
        place += record.committed
    return starts


def pairs(u_T: Tensor, starts: list[int]) -> Tensor:
    """[n, 2]: the first two u behind round starts, whether or not the round reached the second; without overlaps.

    Behind a pair the next one begins with the next round. When a round begins is known before its tokens are, so pairs
    are independent and uniform on the square. (How many there are, the rounds decide: a stopping time, which changes
    nothing as their number grows, Anscombe 1952.) A random number that is used twice shows here.
    """
    taken, free = [], 0
    for start in starts:
        if start >= free and start + 1 < len(u_T):
            taken.append(start)
            free = start + 2
    return torch.stack([u_T[taken], u_T[[start + 1 for start in taken]]], -1)


@dataclass
class Watch:
    """A rule that is watched: u of every token that it emits, by q/p under the very p that it was given.

    The u are kept by the token's place in its round, so that a rule that is wrong about its bonus token is not averaged
    out. That split is fair, and splitting by what became of a token is not: an accepted token is likelier to be one
    that q likes. Place i says that the round still ran behind i accepted tokens. Where it did not, the token there was
    drawn in a later round, from p given all that came before; over both cases it is drawn from p, because the decoder
    is lossless; hence it is also where the round did run. And q behind the accepted tokens, or which candidates were
    chosen there, is fixed by them before the token is drawn. So at every place u is uniform, for any lossless rule.
    (That p is the target's own is tested apart.)
    """

    rule: Rule | None
    seed: int
    _u: list[list[float]] = field(default_factory=lambda: [[] for _ in range(PLACES)])
    _waiting: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)
    """p, q, token and place of what is not transformed yet: many at once are far cheaper than one by one."""

    def __post_init__(self) -> None:
        self._v = torch.Generator().manual_seed(self.seed)

    def watched(self, change: Verify | None = None) -> Rule:
        """The rule to put into a decoder; `change` replaces what verifies."""
        inner = change or (lambda p_PV, draft, rng: verify(self.rule, p_PV, draft, rng))

        def watch(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
            verdict = inner(p_PV, draft, rng)
            tokens = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
            for place, (node, token) in enumerate(zip([ROOT, *verdict.path], tokens, strict=True)):
                p_V = p_PV[node + 1]
                self._waiting.append((p_V, _q(p_V, draft, node), token, min(place, PLACES - 1)))
            if len(self._waiting) * p_PV.shape[1] >= AT_ONCE:
                self._transform()
            return verdict

        return Rule("watched", watch, lambda draft: True, "any draft")

    def by_place(self) -> list[Tensor]:
        """u by place, in fp64; the last one holds all that are behind it too."""
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


def _q(p_V: Tensor, draft: Draft, node: int) -> Tensor:
    """[V]: what stands for q behind `node`, in whose order over p tokens are put.

    Of chosen tokens the candidates come before all others, and where nothing was drafted the order is p's own.
    """
    below = draft.children[node + 1]
    if not below:
        return p_V * p_V
    if isinstance(draft, DrawnDraft):
        return draft.q[below[0]]
    q_V = torch.zeros_like(p_V)
    candidates = [draft.tokens[child] for child in below]
    q_V[candidates] = p_V[candidates]
    return q_V


def chunks(count: int, vocabulary: int, *, numbers: int = 2**25) -> Iterator[slice]:
    """Slices of `count` texts or tokens that keep a table over the vocabulary within memory."""
    size = max(1, numbers // vocabulary)
    for start in range(0, count, size):
        yield slice(start, start + size)
