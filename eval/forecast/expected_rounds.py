"""How many rounds a policy takes on one text of the target, from target and drafter beside each other on it.

    policy                      T = 0    T > 0
    chain, any rule for chains  exact    exact
    confidence                  exact    exact (what it drafts in vain is taken to be as long as on the text)
    tree of the best            exact    exact
    tree of drawn siblings      exact    refused
    best-first, dynamic-tree    exact    exact, by replay (eval/forecast/replay.py)
    sampled-tree                replay   refused
    drafters that retrieve      exact    exact
    policies that learn         refused  refused

"Exact" are the expected rounds given the text. Refused is what would need p behind tokens that the text does not have,
or what depends on what was decoded before.

Rounds on a given text of the target: exact probabilities of where each one begins, from p and q along that text.

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

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from draftsmith.decode.policies import BestFirst, Chain, ConfidenceChain, DynamicTree, Policy, SampledTree, StaticTree
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import Round
from draftsmith.errors import DraftsmithError
from draftsmith.eval.teacher_forced import PositionStats, TargetText
from draftsmith.heads.base import Drafter, SequenceState
from draftsmith.heads.ngram import Hybrid, Retrieval

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


# Shapes: A anchors, K draft positions.

Lengths = NDArray[np.int64]
DEFAULT_RULE = "block"


class NotPredicted(DraftsmithError):
    """No exact forecast of this policy follows from a text; the message says why."""


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected rounds of one text."""

    tokens: int
    """What the rounds commit together."""
    rounds: float
    work: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Expected rounds by (draft tokens verified, draft tokens on the longest path)."""
    tested_K: Floats = field(default_factory=lambda: np.zeros(0))
    accepted_K: Floats = field(default_factory=lambda: np.zeros(0))
    """Expected rounds in which each draft position was reached, and accepted."""


@dataclass(frozen=True)
class RetrievalStats:
    """What a drafter would copy behind each anchor of a text."""

    taken_A: NDArray[np.bool_]
    """Whether the copy is what it proposes; else it grows a draft."""
    lengths_A: Lengths
    matched_A: Lengths
    """Tokens of the copy that are the text's, from its first on."""


def needs_replay(policy: Policy | None, sampling: Sampling) -> bool:
    """Whether the drafter has to draft along the text itself: its draft depends on candidates beside it."""
    return isinstance(policy, (BestFirst, DynamicTree)) or (isinstance(policy, SampledTree) and sampling.greedy)


def require_predicted(policy: Policy | None, sampling: Sampling, rule: str | None) -> None:
    """NotPredicted for what the table above refuses."""
    if policy is not None and policy.learns:
        raise NotPredicted(f"{policy} learns while it decodes: what it drafts depends on all rounds before")
    if sampling.greedy:
        return
    if rule == "typical":
        raise NotPredicted("rule 'typical' is lossy: its text is not the target's")
    drawn = isinstance(policy, SampledTree) or (isinstance(policy, StaticTree) and policy.siblings != "best")
    if drawn:
        raise NotPredicted(f"{policy} draws siblings: whether one is accepted depends on p of tokens beside the text")
    if not isinstance(policy, (Chain, ConfidenceChain)) and rule not in (None, "point-mass"):
        raise NotPredicted(f"rule {rule!r} needs a chain drawn from q; {policy or 'a retrieved draft'} is chosen")


def accepted(
    policy: Policy | None,
    table: PositionStats,
    text: TargetText,
    sampling: Sampling,
    rule: str | None = None,
    *,
    retrieved: RetrievalStats | None = None,
    reach: int | None = None,
) -> ExpectedRounds:
    """The expected rounds of `policy` on `text`.

    Args:
        policy: None for a drafter that only retrieves.
        table: what `acceptance_measure` says of target and drafter on this text, for at least as many positions as are
            drafted; empty for a drafter that only retrieves.
        rule: for chains that are drawn; None is the decoder's own choice.
        retrieved: for drafters that copy.
        reach: the deepest draft that the drafter's logits reach.

    Raises:
        NotPredicted: for what only decoding itself can tell.
    """
    require_predicted(policy, sampling, rule)
    if needs_replay(policy, sampling):
        raise NotPredicted(f"{policy} depends on candidates beside the text: `replay` runs the drafter for it")
    A = text.anchors
    room_A = np.array([text.room(anchor) for anchor in range(A)], dtype=np.int64)
    if policy is None:
        survival_AK, lengths_A = np.zeros((A, 1)), np.zeros(A, np.int64)
        nodes_A = lengths_A
    else:
        rooms_A = np.minimum(room_A, reach) if reach is not None else room_A
        survival_AK, lengths_A, nodes_A = _grown(policy, table, rooms_A, sampling, rule)
    offered_AK = _offered(policy, table["rank"]) if isinstance(policy, StaticTree) else np.ones_like(survival_AK)
    if retrieved is not None:
        survival_AK, lengths_A, nodes_A = _with_copies(survival_AK, lengths_A, nodes_A, retrieved)
        offered_AK = np.pad(offered_AK, ((0, 0), (0, survival_AK.shape[1] - offered_AK.shape[1])))
        offered_AK[retrieved.taken_A] = 1.0
    walked = walk(survival_AK, lengths_A, offered_AK)
    work: defaultdict[tuple[int, int], float] = defaultdict(float)
    for visits, nodes, length, copied in zip(
        walked.visits_A, nodes_A, lengths_A, retrieved.taken_A if retrieved else [False] * A, strict=True
    ):
        work[int(nodes), 0 if copied else int(length)] += float(visits)
    return ExpectedRounds(text.decode_tokens, walked.rounds, work, walked.tested_K, walked.accepted_K)


def _grown(
    policy: Policy, table: PositionStats, room_A: Lengths, sampling: Sampling, rule: str | None
) -> tuple[Floats, Lengths, Lengths]:
    """For drafts that the policy grows: chances, depths and numbers of tokens from each anchor."""
    if isinstance(policy, StaticTree):
        inside_AK = _inside(policy, table["rank"])
        depth = max(len(path) for path in policy.shape)
        lengths_A = np.minimum(room_A, depth)
        sizes = np.array([sum(len(path) <= deep for path in policy.shape) for deep in range(depth + 1)])
        return inside_AK, lengths_A, sizes[lengths_A.clip(0)]
    if not isinstance(policy, (Chain, ConfidenceChain)):
        raise NotPredicted(f"{policy}: no forecast is known")
    if sampling.greedy:
        survival_AK = matched(table["rank"] == 0)
    else:
        survival_AK = CHAIN_RULES[rule or DEFAULT_RULE](table["log_p"], table["log_q"])
    lengths_A = np.minimum(room_A, policy.draft_length)
    if isinstance(policy, ConfidenceChain):
        unsure_AK = table["sure"] < policy.threshold
        unsure_AK[:, 0] = False  # the first token is always drafted
        lengths_A = np.minimum(lengths_A, np.where(unsure_AK.any(1), unsure_AK.argmax(1), unsure_AK.shape[1]))
    return survival_AK, lengths_A, lengths_A


def _inside(tree: StaticTree, rank_AK: Floats) -> Floats:
    """[A, K]: 1 as long as the text's tokens, by their ranks, are a path of the tree."""
    inside_AK = np.zeros_like(rank_AK)
    shape = set(tree.shape)
    for anchor, ranks in enumerate(rank_AK):
        for depth in range(1, rank_AK.shape[1] + 1):
            if tuple(ranks[:depth]) not in shape:
                break
            inside_AK[anchor, depth - 1] = 1.0
    return inside_AK


def _offered(tree: StaticTree, rank_AK: Floats) -> Floats:
    """[A, K]: 1 where the tree has a draft token below the text's tokens before a position."""
    above = {path[:-1] for path in tree.shape}
    return np.array([[float(tuple(ranks[:depth]) in above) for depth in range(len(ranks))] for ranks in rank_AK])


def _with_copies(
    survival_AK: Floats, lengths_A: Lengths, nodes_A: Lengths, retrieved: RetrievalStats
) -> tuple[Floats, Lengths, Lengths]:
    """Copies in place of grown drafts, where the drafter takes them."""
    width = max(survival_AK.shape[1], int(retrieved.lengths_A.max(initial=1)))
    wide_AK = np.zeros((len(lengths_A), width))
    wide_AK[:, : survival_AK.shape[1]] = survival_AK
    copied_AK = (np.arange(width) < retrieved.matched_A[:, None]).astype(float)
    taken_A = retrieved.taken_A
    return (
        np.where(taken_A[:, None], copied_AK, wide_AK),
        np.where(taken_A, retrieved.lengths_A, lengths_A),
        np.where(taken_A, retrieved.lengths_A, nodes_A),
    )


@dataclass
class _KnownSequence:
    """A `SequenceState` of a text that no target has read: drafters that copy need its tokens alone."""

    source: list[int]
    tokens: list[int]
    hidden: Tensor | None = None

    def take_features(self, count: int) -> NoReturn:
        raise AssertionError("drafters that copy read no features")


@dataclass
class _KnownContext:
    texts: Sequence[SequenceState]
    max_length: int

    def runner(self, model: nn.Module, *, padded: bool = True) -> NoReturn:
        raise AssertionError("drafters that copy run no model")


def retrieved(drafter: Drafter, text: TargetText) -> RetrievalStats | None:
    """Ask the drafter's index behind every token of the text; None for a drafter that never copies."""
    if not isinstance(drafter, (Retrieval, Hybrid)):
        return None
    retrieval = drafter.retrieval if isinstance(drafter, Hybrid) else drafter
    row = _KnownSequence(text.source, text.tokens[: text.prompt_length])
    retrieval.start(_KnownContext([row], text.max_length))
    taken, lengths, matches = [], [], []
    for anchor in range(text.anchors):
        end = text.prompt_length + anchor + 1
        row.tokens = text.tokens[:end]
        room = text.room(anchor)
        length, draft = retrieval.matched(0, room) if room > 0 else (0, ())
        tokens = list(getattr(draft, "tokens", ()))
        following = text.tokens[end : end + len(tokens)]
        pairs = zip(tokens, following, strict=False)
        matches.append(next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(following))))
        lengths.append(len(tokens))
        own = isinstance(drafter, Hybrid)
        taken.append(not own or (length >= drafter.min_match and len(tokens) > 0))
    return RetrievalStats(np.array(taken, bool), np.array(lengths, np.int64), np.array(matches, np.int64))


def of_rounds(text: TargetText, rounds: Sequence[Round]) -> ExpectedRounds:
    """What was replayed, or decoded, in the same form."""
    deepest = max((record.tested for record in rounds), default=0)
    tested_K, accepted_K = np.zeros(deepest), np.zeros(deepest)
    for record in rounds:
        tested_K[: record.tested] += 1
        accepted_K[: record.accepted] += 1
    work = dict(Counter((record.drafted, record.depth) for record in rounds))
    return ExpectedRounds(text.decode_tokens, float(len(rounds)), work, tested_K, accepted_K)
