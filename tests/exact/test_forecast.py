"""The forecast's rounds equal the decoder's expected rounds on every text of the target, by enumeration."""

from functools import partial

import numpy as np
import pytest
import torch
from exact.enumeration import State, Tokens, outcomes, played
from exact.one_round import DRAFTER_SEEDS, EXACT
from exact.toys import ToyDrafter, ToyModel, ToyTarget

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import BestFirst, Chain, ConfidenceChain, Policy, SampledTree
from draftsmith.decode.rules import RULES
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Stops
from draftsmith.eval.forecast.expected_rounds import NotPredicted, accepted
from draftsmith.eval.teacher_forced import ChunkLogits, PositionStats, TargetText, acceptance_measure

PROMPT = (0, 3)
PAIRS = 2
SAMPLING = {"top-k": Sampling(1.3, top_k=3), "cold": Sampling(0.6, top_k=2), "greedy": Sampling(0.0)}
Counts = np.ndarray
"""Of the rounds of a text, [3, K]: their number in column 0, those that tested each draft position, and accepted it."""
BANNED = {"plain": frozenset(), "truncated draft vocabulary": frozenset({0, 4})}


class Pair:
    """Two toy models with one sampling; the drafter may be independent of its draft tokens, as in Medusa."""

    def __init__(self, seed: int, sampling: Sampling, *, banned: frozenset[int], independent: bool) -> None:
        self.target = ToyModel(seed)
        self.drafter = ToyDrafter(ToyModel(DRAFTER_SEEDS + seed, banned), independent=independent)
        self.sampling, self.processors = sampling, Processors(sampling)

    def rounds_by_text(
        self, policy: Policy, rule: str | None, count: int, eos: frozenset[int]
    ) -> dict[Tokens, tuple[float, Counts]]:
        """Return (probability, expected counts given the text) for every text of the decoder."""

        def make() -> DecodeLoop:
            text = DecodeSequence(list(PROMPT), len(PROMPT) + count, stops=Stops(eos))
            return DecodeLoop(
                ToyTarget(self.target), self.drafter, policy, [text], self.processors, rule and RULES[rule]
            )

        # One round at a time, histories of equal tokens merged: what follows depends on the tokens alone, which
        # test_lossless.py asserts of every drafter. With the mass go the mean counts of the rounds so far.
        waiting: dict[Tokens, tuple[float, Counts, State]] = {}
        finished: dict[Tokens, tuple[float, Counts]] = {}

        def arrive(mass: float, counts: Counts, state: State) -> None:
            (tokens,) = state.tokens
            into = waiting if state.decoding.sequences else finished
            before = into.get(tokens, (0.0, np.zeros((3, count)), state))
            into[tokens] = (before[0] + mass, before[1] + counts, *before[2:])

        for weight, state in outcomes(lambda rng: played(make, rng, 0)):
            arrive(weight, np.zeros((3, count)), state)
        while waiting:
            mass, counts, before = waiting.pop(min(waiting, key=len))
            after = partial(played, make, rounds=before.rounds + 1)
            for weight, state in outcomes(after, start=before.rng.taken):
                share, record = weight / before.rng.weight, state.texts[0].rounds[-1]
                numbers = np.arange(count)
                of_round = np.stack([numbers == 0, numbers < record.tested, numbers < record.accepted])
                arrive(mass * share, (counts + mass * of_round) * share, state)
        return {tokens: (entry[0], entry[1] / entry[0]) for tokens, entry in finished.items()}

    def agreement(self, text: TargetText, positions: int) -> PositionStats:
        """Return the result of a teacher-forced pass, from the tables of the toy models."""
        tokens, measure = tuple(text.tokens), acceptance_measure(self.processors)
        tables = {name: np.zeros((text.anchors, positions)) for name in ("log_p", "log_q", "rank", "sure")}
        for anchor in range(text.anchors):
            root = text.prompt_length + anchor
            for k in range(min(positions, text.anchors - anchor)):
                seen = tokens[: root + 1 + k]
                if self.drafter.independent and k > 0:
                    seen = (*tokens[: root + 1], 5 + k)  # as ToyDrafter tells depths apart
                label = tokens[root + 1 + k]
                p_1V, q_1V = self.target.logits(tokens[: root + 1 + k])[None], self.drafter.model.logits(seen)[None]
                rows = ChunkLogits(p_1V, q_1V, torch.tensor([label]), None)
                for name, value in measure(rows).items():
                    tables[name][anchor, k] = float(value)
        return tables


def assert_exact(pair: Pair, policy: Policy, rule: str | None, count: int, eos: frozenset[int] = frozenset()) -> int:
    """Compare rounds and acceptance on every text; return the number of texts on which drafts had an effect."""
    moved = 0
    enumerated = pair.rounds_by_text(policy, rule, count, eos)
    assert sum(mass for mass, _ in enumerated.values()) == pytest.approx(1, abs=EXACT)
    for tokens, (_, counts) in enumerated.items():
        rounds = counts[0, 0]
        text = TargetText(list(tokens), len(PROMPT), len(PROMPT) + count)
        if text.anchors == 0:
            assert rounds == 0
            continue
        found = accepted(policy, pair.agreement(text, count), text, pair.sampling, rule)
        assert found.rounds == pytest.approx(rounds, abs=EXACT), f"text {tokens}"
        reached = [np.pad(values_K, (0, count))[:count] for values_K in (found.tested_K, found.accepted_K)]
        assert np.stack(reached) == pytest.approx(counts[1:], abs=EXACT), f"text {tokens}"
        moved += rounds < text.anchors - 1e-6
    return moved


@pytest.mark.parametrize(
    ("rule", "gamma", "sampling"),
    [
        *((rule, gamma, "cold" if gamma == 6 else "top-k") for rule in ("token", "block") for gamma in (1, 2, 3, 6)),
        *((rule, 2, "top-k") for rule in ("point-mass", None)),
    ],
)
def test_chains(rule: str | None, gamma: int, sampling: str) -> None:
    """The rules of trees are one of these on chains."""
    for seed in range(PAIRS):
        pair = Pair(seed, SAMPLING[sampling], banned=frozenset(), independent=seed % 2 == 1)
        assert assert_exact(pair, Chain(gamma), rule, 4) > 0


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("eos", [frozenset({2}), frozenset({0, 1})], ids=str)
def test_an_eos_and_a_truncated_draft_vocabulary(rule: str, eos: frozenset[int]) -> None:
    for seed in range(PAIRS):
        pair = Pair(seed, SAMPLING["top-k"], banned=BANNED["truncated draft vocabulary"], independent=False)
        assert_exact(pair, Chain(2), rule, 4, eos)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chains_that_stop_when_unsure(rule: str) -> None:
    """Earlier tokens decide whether a chain continues, so acceptance up to its end does not depend on its length."""
    for seed in range(PAIRS):
        pair = Pair(seed, SAMPLING["top-k"], banned=frozenset(), independent=False)
        assert assert_exact(pair, ConfidenceChain(0.7, 3), rule, 4) > 0


@pytest.mark.parametrize("policy", [Chain(3), ConfidenceChain(0.5, 3)], ids=str)
def test_greedy(policy: Policy) -> None:
    moved = 0
    for seed in range(20):
        pair = Pair(seed, SAMPLING["greedy"], banned=frozenset(), independent=seed % 2 == 1)
        moved += assert_exact(pair, policy, None, 9)
    assert moved > 0


@pytest.mark.parametrize(
    ("policy", "rule", "name"),
    [
        (SampledTree(2, 2), None, "draws siblings"),
        (BestFirst(size=3, depth=2), None, "candidates beside the text"),
        (Chain(2), "typical", "lossy"),
    ],
)
def test_policies_and_rules_without_an_exact_forecast_are_refused(policy: Policy, rule: str | None, name: str) -> None:
    pair = Pair(0, SAMPLING["top-k"], banned=frozenset(), independent=False)
    text = TargetText([0, 3, 1, 2, 0], 2, 5)
    with pytest.raises(NotPredicted, match=name):
        accepted(policy, pair.agreement(text, 2), text, pair.sampling, rule)
