"""Rounds on a given text of the target: exact probabilities of where each one begins, from p and q along that text.

A lossless decoder writes the target's text, whatever the drafter. Given that text x, a round that is anchored at its
token a commits j tokens of it with a probability that follows from p and q at those tokens alone. For a chain

    token rule    P(at least i draft tokens accepted | x) = prod_{k<=i} min(1, q(x_k) / p(x_k))
    block rule    P(at least i draft tokens accepted | x) = min_{k<=i} min(1, prod_{j<=k} q(x_j) / p(x_j))
    point mass    P(at least i draft tokens accepted | x) = prod_{k<=i} q(x_k)

with x_1 the first token behind the anchor. The next round begins behind what was committed, as if the text had begun
there, so the anchors are a renewal process, and its expected number of visits is the expected number of rounds.

The token rule commits x_k by drafting it, q(x_k), and accepting it, min(1, p/q): min(p, q), of the p that the text has.
For the block rule let P_i, Q_i be the products of p and q along x and w_i = min(1, w_{i-1} p(x_i)/q(x_i)) its
weights. By induction from the draft's end a prefix that was drafted is part of what is accepted with probability w_i
(Sun et al. 2024, arXiv:2403.10444), so given x at least i tokens are with u_i = w_i Q_i / P_i, and
u_i = Q_i/P_i min(1, w_{i-1} p/q) = min(Q_i/P_i, u_{i-1}): the running minimum of the likelihood ratio. It does not
depend on where the draft ends, as long as whether it goes on was decided by the tokens above. docs/forecast.md
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Shapes: A anchors (committed tokens behind which a round may begin), K draft positions.

Floats = NDArray[np.float64]


def token_rule(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """[A, K]: the chance that at least k + 1 draft tokens are accepted by the token rule."""
    return np.exp(np.cumsum(np.minimum(log_q_AK - log_p_AK, 0.0), 1))


def block_rule(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """The same for the block rule: the running minimum of the likelihood ratio."""
    return np.exp(np.minimum(np.minimum.accumulate(np.cumsum(log_q_AK - log_p_AK, 1), 1), 0.0))


def point_mass(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """The same for a drawn chain that is verified by drawing from p and descending where the draft agrees."""
    return np.exp(np.cumsum(log_q_AK, 1))


CHAIN_RULES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "token": token_rule,
    "block": block_rule,
    "point-mass": point_mass,
    # On a chain, which has no siblings, these are the rules above.
    "siblings-iid": token_rule,
    "siblings-without-replacement": token_rule,
    "traversal": block_rule,
}


def matched(agree_AK: NDArray[np.bool_]) -> Floats:
    """[A, K]: 1 as long as every position so far agrees: what is certain given the text, as chosen drafts are."""
    return np.cumprod(agree_AK, 1).astype(np.float64)


@dataclass(frozen=True)
class Walk:
    """Where rounds begin on one text."""

    visits_A: Floats
    """Expected rounds (0 to 1) that are anchored at each committed token."""
    tested_K: Floats
    """Expected rounds in which draft position k was reached by what was accepted, and had a draft token."""
    accepted_K: Floats

    @property
    def rounds(self) -> float:
        """Expected rounds on the whole text, the prefill aside."""
        return float(self.visits_A.sum())


def walk(survival_AK: Floats, lengths_A: NDArray[np.int64], offered_AK: Floats) -> Walk:
    """Begin behind the prefill's token and go on to the end of the text.

    Args:
        survival_AK: the chance that a round from each anchor has at least k + 1 draft tokens of the text accepted.
        lengths_A: draft tokens from each anchor, where they follow the text. What would reach beyond the text's end is
            cut there, as an EOS or the length cuts it.
        offered_AK: whether a draft token stands at k below the text's tokens before it; of a tree, perhaps elsewhere.
    """
    A, K = survival_AK.shape
    visits_A, tested_K, accepted_K = np.zeros(A), np.zeros(K), np.zeros(K)
    visits_A[:1] = 1.0
    for anchor in range(A):
        visited = visits_A[anchor]
        if visited == 0.0:
            continue
        left = A - anchor  # tokens of the text behind the anchor
        drafted = min(int(lengths_A[anchor]), left)
        assert drafted <= K, f"a draft of {drafted} tokens, and {K} positions are known"
        at_least_k = np.concatenate(([1.0], survival_AK[anchor, :drafted]))
        tested_K[:drafted] += visited * at_least_k[:-1] * offered_AK[anchor, :drafted]
        accepted_K[:drafted] += visited * at_least_k[1:]
        committed = -np.diff(at_least_k, append=0.0)  # exactly 0, 1, ... draft tokens, and one of the target's own
        steps = min(len(committed), left - 1)
        visits_A[anchor + 1 : anchor + 1 + steps] += visited * committed[:steps]
    return Walk(visits_A, tested_K, accepted_K)
