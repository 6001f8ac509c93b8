"""Expected number of rounds of a policy on a given text of the target, from the teacher-forced comparison.

    policy                      T = 0    T > 0
    chain, any rule for chains  exact    exact
    confidence                  exact    exact (rejected tails of drafts are assumed to be as long as on the text)
    best-first                  exact    exact, by replay
    sampled-tree                replay   refused
    drafters that retrieve      exact    exact
    policies that learn         refused  refused

"Exact" are the expected rounds given the text. Policies are refused if they need p after tokens that are not in the
text, or depend on what was decoded before.

A lossless decoder generates the target's text with any drafter. Given that text x, a round that is anchored at token a
commits j tokens of it with a probability that follows from p and q at those tokens alone. For a chain

    token rule    P(at least i draft tokens accepted | x) = prod_{k<=i} min(1, q(x_k) / p(x_k))
    block rule    P(at least i draft tokens accepted | x) = min_{k<=i} min(1, prod_{j<=k} q(x_j) / p(x_j))
    point mass    P(at least i draft tokens accepted | x) = prod_{k<=i} q(x_k)

with x_1 the first token after the anchor. The next round begins after the committed tokens, as if the text had begun
there, so the anchors are a renewal process, and its expected number of visits is the expected number of rounds.

The token rule commits x_k if it is drafted, with probability q(x_k), and accepted, with min(1, p/q): min(p, q) in
total, divided by p given the text. For the block rule let P_i, Q_i be the products of p and q along x and
w_i = min(1, w_{i-1} p(x_i)/q(x_i)) its weights. By induction from the draft's end, a drafted prefix is accepted with
probability w_i (Sun et al. 2024, arXiv:2403.10444), so given x at least i tokens are accepted with probability
u_i = w_i Q_i / P_i = Q_i/P_i min(1, w_{i-1} p/q) = min(Q_i/P_i, u_{i-1}): the running minimum of the likelihood ratio.
It does not depend on where the draft ends, if the end depends only on earlier tokens. See docs/guide/forecast.md.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import ForecastLayout, Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Round, Stops
from draftsmith.decode.target import TransformersTarget
from draftsmith.errors import DraftsmithError
from draftsmith.eval.teacher_forced import PositionStats, TargetText
from draftsmith.heads.base import Context, Drafter
from draftsmith.heads.draft_tree import Parents, depths_of
from draftsmith.heads.retrieval import Hybrid, Retrieval
from draftsmith.metrics import position_counts

# Shapes: A anchors (committed tokens after which a round may begin), K draft positions, B texts, Q tokens of a pass,
# V vocabulary.

Floats = NDArray[np.float64]


def token_rule(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """Return [A, K]: the probability that the token rule accepts at least k + 1 draft tokens."""
    return np.exp(np.cumsum(np.minimum(log_q_AK - log_p_AK, 0.0), 1))


def block_rule(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """Return the same for the block rule: the running minimum of the likelihood ratio."""
    return np.exp(np.minimum(np.minimum.accumulate(np.cumsum(log_q_AK - log_p_AK, 1), 1), 0.0))


def point_mass(log_p_AK: Floats, log_q_AK: Floats) -> Floats:
    """Return the same for a sampled chain that is verified by sampling from p and comparing with the draft."""
    return np.exp(np.cumsum(log_q_AK, 1))


CHAIN_RULES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "token": token_rule,
    "block": block_rule,
    "point-mass": point_mass,
}


def matched(agree_AK: NDArray[np.bool_]) -> Floats:
    """Return [A, K]: 1 while every position so far agrees: acceptance of chosen draft tokens, given the text."""
    return np.cumprod(agree_AK, 1).astype(np.float64)


def walk(survival_AK: Floats, lengths_A: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Propagate rounds from the prefill's token to the end of the text.

    Returns the expected number of rounds (0 to 1) that are anchored at each committed token, [A], the expected rounds
    that accept all positions before draft position k and have a draft token there, [K], and those that accept it, [K].

    Args:
        survival_AK: probability that a round from each anchor accepts at least k + 1 draft tokens of the text.
        lengths_A: draft tokens from each anchor along the text. Drafts are cut at the end of the text, as by an EOS or
            the length limit.
    """
    A, K = survival_AK.shape
    visits_A, tested_K, accepted_K = np.zeros(A), np.zeros(K), np.zeros(K)
    visits_A[:1] = 1.0
    for anchor in range(A):
        visited = visits_A[anchor]
        if visited == 0.0:
            continue
        left = A - anchor  # tokens of the text after the anchor
        drafted = min(int(lengths_A[anchor]), left)
        assert drafted <= K, f"a draft of {drafted} tokens, and {K} positions are known"
        at_least_k = np.concatenate(([1.0], survival_AK[anchor, :drafted]))
        tested_K[:drafted] += visited * at_least_k[:-1]
        accepted_K[:drafted] += visited * at_least_k[1:]
        committed = -np.diff(at_least_k, append=0.0)  # exactly 0, 1, ... draft tokens, and one of the target's own
        steps = min(len(committed), left - 1)
        visits_A[anchor + 1 : anchor + 1 + steps] += visited * committed[:steps]
    return visits_A, tested_K, accepted_K


Lengths = NDArray[np.int64]
DEFAULT_RULE = "block"


class NotPredicted(DraftsmithError):
    """Raised for policies without an exact forecast from a text; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class ExpectedRounds:
    """Expected rounds of one text."""

    tokens: int
    """Tokens that the rounds commit in total."""
    rounds: float
    work: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Expected rounds by (draft tokens verified, draft tokens on the longest path)."""
    tested_K: Floats = field(default_factory=lambda: np.zeros(0))
    accepted_K: Floats = field(default_factory=lambda: np.zeros(0))
    """Expected rounds that test each draft position, and that accept it."""


@dataclass(frozen=True, eq=False)
class RetrievalStats:
    """The retrieved drafts after each anchor of a text."""

    taken_A: NDArray[np.bool_]
    """Whether the drafter proposes the retrieved draft; otherwise it drafts with its logits."""
    lengths_A: Lengths
    matched_A: Lengths
    """Length of the common prefix of the retrieved draft and the text."""


def needs_replay(policy: Policy | None, sampling: Sampling) -> bool:
    """Return whether the drafter has to run along the text: its draft depends on tokens that are not in the text."""
    return policy is not None and policy.layout(greedy=sampling.greedy).replay


def require_predicted(policy: Policy | None, sampling: Sampling, rule: str | None) -> None:
    """Raise NotPredicted for policies that the table above refuses."""
    layout = ForecastLayout(replay=True) if policy is None else policy.layout(greedy=sampling.greedy)
    if layout.refused:
        raise NotPredicted(f"{policy} {layout.refused}")
    if sampling.greedy:
        return
    if rule == "typical":
        raise NotPredicted("rule 'typical' is lossy: its texts are not the target's")
    if not layout.chain and rule not in (None, "point-mass"):
        raise NotPredicted(
            f"rule {rule!r} needs a chain sampled from q; {policy or 'a retrieved draft'} is not sampled"
        )


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
    """Return the expected rounds of `policy` on `text`.

    Args:
        policy: None for a drafter that only retrieves.
        table: `acceptance_measure` of target and drafter on this text, for at least as many positions as are drafted;
            empty for a drafter that only retrieves.
        rule: verification rule of sampled chains; None is the decoder's default.
        retrieved: the drafts of a drafter that retrieves.
        reach: longest draft that the drafter's logits reach.

    Raises:
        NotPredicted: for policies without an exact forecast.
    """
    require_predicted(policy, sampling, rule)
    if needs_replay(policy, sampling):
        raise NotPredicted(f"{policy} depends on candidates beside the text: use `replay`")
    A = text.anchors
    room_A = np.array([text.room(anchor) for anchor in range(A)], dtype=np.int64)
    if policy is None:
        survival_AK, lengths_A = np.zeros((A, 1)), np.zeros(A, np.int64)
        nodes_A = lengths_A
    else:
        rooms_A = np.minimum(room_A, reach) if reach is not None else room_A
        survival_AK, lengths_A, nodes_A = _drafted(policy, table, rooms_A, sampling, rule)
    if retrieved is not None:
        survival_AK, lengths_A, nodes_A = _with_retrieved(survival_AK, lengths_A, nodes_A, retrieved)
    visits_A, tested_K, accepted_K = walk(survival_AK, lengths_A)
    work: defaultdict[tuple[int, int], float] = defaultdict(float)
    for visits, nodes, length, copied in zip(
        visits_A, nodes_A, lengths_A, retrieved.taken_A if retrieved else [False] * A, strict=True
    ):
        work[int(nodes), 0 if copied else int(length)] += float(visits)
    return ExpectedRounds(text.decode_tokens, float(visits_A.sum()), work, tested_K, accepted_K)


def _drafted(
    policy: Policy, table: PositionStats, room_A: Lengths, sampling: Sampling, rule: str | None
) -> tuple[Floats, Lengths, Lengths]:
    """Return survival probabilities, depths and counts of draft tokens from each anchor, without retrieved drafts."""
    layout = policy.layout(greedy=sampling.greedy)
    if sampling.greedy:
        survival_AK = matched(table["rank"] == 0)
    else:
        survival_AK = CHAIN_RULES[rule or DEFAULT_RULE](table["log_p"], table["log_q"])
    unsure_AK = table["sure"] < layout.threshold
    unsure_AK[:, 0] = False  # the first token is always drafted
    lengths_A = np.minimum(room_A, layout.chain)
    lengths_A = np.minimum(lengths_A, np.where(unsure_AK.any(1), unsure_AK.argmax(1), unsure_AK.shape[1]))
    return survival_AK, lengths_A, lengths_A


def _with_retrieved(
    survival_AK: Floats, lengths_A: Lengths, nodes_A: Lengths, retrieved: RetrievalStats
) -> tuple[Floats, Lengths, Lengths]:
    """Replace drafts by retrieved ones where the drafter proposes them."""
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


def retrieved(drafter: Drafter, text: TargetText) -> RetrievalStats | None:
    """Return the retrieved drafts after every token of the text; None for a drafter that does not retrieve."""
    if not isinstance(drafter, (Retrieval, Hybrid)):
        return None
    retrieval = drafter.retrieval if isinstance(drafter, Hybrid) else drafter
    row = SimpleNamespace(source=text.source, tokens=text.tokens[: text.prompt_length])
    retrieval.start(cast(Context, SimpleNamespace(sequences=[row], max_length=text.max_length, hidden=None)))
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
    """Return replayed or decoded rounds as `ExpectedRounds`."""
    tested_K, accepted_K = (np.array(counts, dtype=float) for counts in position_counts(rounds))
    work = dict(Counter((record.drafted, record.depth) for record in rounds))
    return ExpectedRounds(text.decode_tokens, float(len(rounds)), work, tested_K, accepted_K)


class KnownTarget(TransformersTarget):
    """The target, whose p assigns probability 1 to the next token of a known text."""

    def __init__(self, model: PreTrainedModel, known: Sequence[TargetText]) -> None:
        super().__init__(model)
        self._known = known

    def prefill(self, sequences: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        self._texts = list(sequences)
        logits_BV = torch.zeros_like(super().prefill(sequences, layers))
        for row, logits_V in enumerate(logits_BV):
            self._force(logits_V, row, 0)
        return logits_BV

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        logits_BQV = torch.zeros_like(super().verify(tokens_BQ, shapes))
        for row in range(len(self._texts)):
            shape = shapes[row if len(shapes) > 1 else 0]
            for column, depth in enumerate([0, *depths_of(shape)]):
                self._force(logits_BQV[row, column], row, depth)
        return logits_BQV

    def _force(self, logits_V: Tensor, row: int, depth: int) -> None:
        """Forbid all tokens but the text's; what follows a draft token that is not the text's own is never read."""
        text = self._texts[row]
        tokens, following = self._known[text.number].tokens, len(text.tokens) + depth
        if following < len(tokens):
            logits_V.fill_(-torch.inf)
            logits_V[tokens[following]] = 0.0

    def drop(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        super().drop(rows)


@torch.inference_mode()
def replay(
    target: PreTrainedModel,
    drafter: Drafter,
    policy: Policy,
    texts: Sequence[TargetText],
    sampling: Sampling,
    together: int,
    done: Callable[..., None] = lambda texts=1: None,
) -> list[list[Round]]:
    """Return the rounds in which the decoder would generate each text, `together` texts at a time.

    Only for policies whose draft tokens are chosen, not sampled: their acceptance depends on the target's tokens alone.
    Seconds and `overlap` of these rounds are meaningless. `done` is called with the number of texts of each batch.
    """
    rounds: list[list[Round]] = []
    for start in range(0, len(texts), together):
        batch = list(texts[start : start + together])
        rows = [_row(number, text) for number, text in enumerate(batch)]
        known, processors = KnownTarget(target, batch), Processors(sampling, sequences=len(rows))
        with closing(known), closing(DecodeLoop(known, drafter, policy, rows, processors)) as loop:
            loop.prefill()
            while loop.sequences:
                loop.round()
        rounds += [row.rounds for row in rows]
        done(len(rows))
    return rounds


def _row(number: int, text: TargetText) -> DecodeSequence:
    # A text shorter than its limit ended with an EOS.
    ends = frozenset(text.tokens[-1:] if len(text.tokens) < text.max_length else [])
    prompt = text.tokens[: text.prompt_length]
    return DecodeSequence(prompt, text.max_length, 0, Stops(ends), source=text.source, number=number)
