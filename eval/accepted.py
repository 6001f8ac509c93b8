"""How many rounds a policy takes on one text of the target, from target and drafter beside each other on it.

    policy                      T = 0    T > 0
    chain, any rule for chains  exact    exact
    confidence                  exact    exact (what it drafts in vain is taken to be as long as on the text)
    tree of the best            exact    exact
    tree of drawn siblings      exact    refused
    best-first, dynamic-tree    exact    exact, by replay (eval/replay.py)
    sampled-tree                replay   refused
    drafters that retrieve      exact    exact
    policies that learn         refused  refused

"Exact" are the expected rounds given the text. Refused is what would need p behind tokens that the text does not have,
or what depends on what was decoded before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from draftsmith.decode.output import Round
from draftsmith.decode.policies import BestFirst, Chain, ConfidenceChain, DynamicTree, Policy, SampledTree, StaticTree
from draftsmith.decode.processors import Sampling
from draftsmith.errors import DraftsmithError
from draftsmith.eval.agreement import Agreement
from draftsmith.eval.renewal import CHAIN_RULES, Floats, matched, walk
from draftsmith.eval.target_texts import TargetText
from draftsmith.heads.drafter import Drafter
from draftsmith.heads.retrieval import Hybrid, Retrieval

# Shapes: A anchors, K draft positions.

Lengths = NDArray[np.int64]
DEFAULT_RULE = "block"


class NotPredicted(DraftsmithError):
    """No exact forecast of this policy follows from a text; the message says why."""


@dataclass(frozen=True)
class Accepted:
    """Expected rounds of one text."""

    tokens: int
    """What the rounds commit together."""
    rounds: float
    work: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Expected rounds by (draft tokens verified, draft tokens on the longest path)."""
    tested_K: Floats = field(default_factory=lambda: np.zeros(0))
    accepted_K: Floats = field(default_factory=lambda: np.zeros(0))
    """Expected rounds in which each draft position was reached, and accepted."""


@dataclass(frozen=True)
class Retrieved:
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
    table: Agreement,
    text: TargetText,
    sampling: Sampling,
    rule: str | None = None,
    *,
    retrieved: Retrieved | None = None,
    reach: int | None = None,
) -> Accepted:
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
    work: Counter[tuple[int, int]] = Counter()
    for visits, nodes, length, copied in zip(
        walked.visits_A, nodes_A, lengths_A, retrieved.taken_A if retrieved else [False] * A, strict=True
    ):
        work[int(nodes), 0 if copied else int(length)] += float(visits)
    return Accepted(text.decode_tokens, walked.rounds, work, walked.tested_K, walked.accepted_K)


def _grown(
    policy: Policy, table: Agreement, room_A: Lengths, sampling: Sampling, rule: str | None
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
    survival_AK: Floats, lengths_A: Lengths, nodes_A: Lengths, retrieved: Retrieved
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


def retrieved(drafter: Drafter, text: TargetText) -> Retrieved | None:
    """Ask the drafter's index behind every token of the text; None for a drafter that never copies."""
    if not isinstance(drafter, (Retrieval, Hybrid)):
        return None
    retrieval = drafter.retrieval if isinstance(drafter, Hybrid) else drafter
    row = SimpleNamespace(tokens=text.tokens[: text.prompt_length], source=text.source, hidden=None)
    retrieval.start(SimpleNamespace(texts=[row], max_length=text.max_length))
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
    return Retrieved(np.array(taken, bool), np.array(lengths, np.int64), np.array(matches, np.int64))


def of_rounds(text: TargetText, rounds: Sequence[Round]) -> Accepted:
    """What was replayed, or decoded, in the same form."""
    deepest = max((record.tested for record in rounds), default=0)
    tested_K, accepted_K = np.zeros(deepest), np.zeros(deepest)
    for record in rounds:
        tested_K[: record.tested] += 1
        accepted_K[: record.accepted] += 1
    work = Counter((record.drafted, record.depth) for record in rounds)
    return Accepted(text.decode_tokens, float(len(rounds)), Counter(work), tested_K, accepted_K)
