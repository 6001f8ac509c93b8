"""Enumerates one round of speculation: the committed tokens, continued by the target.

A round is exact iff its random outcome, continued by sampling from the target, has the target's distribution over all
strings. Any number of exact rounds is then exact by induction: replace the last round by the target, then the one
before it. Testing one round after one text is therefore sufficient for a rule; models and settings vary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
from exact.enumeration import (
    BranchingRng,
    RowDraws,
    Tokens,
    Verify,
    add,
    outcomes,
    spread,
    string_distribution,
    total_variation,
    verified,
    verified_together,
)
from exact.toys import ToyDrafter, ToyModel, below
from torch import Tensor
from transformers import LogitsProcessor

from draftsmith.decode.cache.committed import Contexts, contexts_of
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.policies import Policy
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.rules import RULES, Rule
from draftsmith.decode.rules.any_draft import verify_greedy
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Stops
from draftsmith.heads.draft_tree import ROOT, Draft

PROMPT = (0, 3, 0, 3)
"""Repetitive, so that repetition penalties and forbidden n-grams apply from the first new token on."""
EXACT = 1e-12
"""Tolerance of fp64 sums over at most 3,125 strings; the error of a wrong rule is at least 1e-6."""
GAMMA = 2
PLAIN = Sampling(1.0)
DRAFTER_SEEDS = 1000
"""Drafter i has seed 1000 + i, so that no drafter equals a target."""

Drafts = list[tuple[float, Draft]]


@dataclass(frozen=True)
class Setting:
    """How p and q are computed from the two models."""

    sampling: Sampling = PLAIN
    extra: tuple[LogitsProcessor, ...] = ()
    banned_p: frozenset[int] = frozenset()
    banned_q: frozenset[int] = frozenset()
    eos: frozenset[int] = frozenset()
    equal: bool = False
    """The drafter is the target."""
    independent: bool = False
    """The drafter does not read its own draft tokens."""


class Round:
    """One round after `PROMPT`, for one pair of models in one setting.

    `count` new tokens are compared: one more than a draft of `gamma` levels can commit, so every outcome is continued.
    """

    def __init__(self, setting: Setting, seed: int, gamma: int = GAMMA) -> None:
        self.setting, self.count = setting, gamma + 2
        self.processors = Processors(setting.sampling, setting.extra)
        self.target = ToyModel(seed, setting.banned_p)
        model = self.target if setting.equal else ToyModel(DRAFTER_SEEDS + seed, setting.banned_q)
        self.drafter = ToyDrafter(model, independent=setting.independent)
        self.p_V = cache(self._p_V)
        self.p = cache(lambda new: self.p_V(new).tolist())
        self._known: dict[str, Drafts] = {}
        self.cut = cache(self._cut)
        self.continued = cache(lambda new: list(string_distribution(self.p, self.count, setting.eos, new)))
        self.expected = dict(self.continued(()))

    def _p_V(self, new: Tokens) -> Tensor:
        """Return the target's distribution after PROMPT + `new`, with all processors applied."""
        logits_1V = self.target.logits(PROMPT + new)[None]

        def contexts() -> Contexts:
            return contexts_of([[*PROMPT, *new]], torch.device("cpu"))

        if self.processors.greedy:
            best = self.processors.scores(logits_1V, contexts).argmax(-1)
            return torch.nn.functional.one_hot(best, logits_1V.shape[1])[0].double()
        return self.processors.scores(logits_1V, contexts).softmax(-1)[0]

    def p_PV(self, draft: Draft) -> Tensor:
        """Return p after the root and after each node of `draft`."""
        return torch.stack([self.p_V(below(draft, node)) for node in range(ROOT, len(draft))])

    def _text(self) -> DecodeSequence:
        return DecodeSequence(list(PROMPT), len(PROMPT) + self.count, stops=Stops(self.setting.eos))

    def drafts(self, policy: Policy) -> Drafts:
        """Return every draft that the policy can build, with its probability."""
        settings = repr(policy)
        if settings not in self._known:
            self._known[settings] = self._drafts(policy)
        return self._known[settings]

    def _drafts(self, policy: Policy) -> Drafts:
        drafts: Drafts = []
        pending: list[tuple[int, ...]] = [()]
        while pending:  # all outcomes that are known so far are texts of one batch
            rngs, texts = [BranchingRng(path) for path in pending], [self._text() for _ in pending]
            self.drafter.start(SimpleNamespace(sequences=texts))
            builders = [DraftBuilder(text, text.room, self.processors) for text in texts]
            draws = None if self.processors.greedy else RowDraws(rngs)
            proposer = Proposer(self.drafter, self.processors)
            grown = proposer.build([policy] * len(texts), builders, [None] * len(texts), draws)
            drafts += [(rng.weight, draft) for rng, draft in zip(rngs, grown, strict=True)]
            pending = [path for rng in rngs for path in rng.alternatives]
        return drafts

    def _cut(self, new: Tokens) -> Tokens:
        """Return the tokens of `new` that a `DecodeSequence` commits: none after an EOS."""
        return tuple(self._text().commit(list(new)))

    def committed(self, rule: Verify | Rule | None, drafts: Drafts, *, together: bool = False) -> dict[Tokens, float]:
        """Return the distribution of the tokens that the round commits."""
        distribution: dict[Tokens, float] = {}
        for weight, draft, result in self.verified(rule, drafts, together=together):
            kept = tuple(draft.tokens[node] for node in result.path)
            for token, share in spread(result.next_token):
                add(distribution, self.cut((*kept, token)), weight * share)
        return distribution

    def verified(
        self, rule: Verify | Rule | None, drafts: Drafts, *, together: bool = False
    ) -> Iterator[tuple[float, Draft, VerifyResult]]:
        """Yield every outcome of a rule, which verifies many drafts in one call or one after the other.

        `together`: drafts of different shapes are verified in one call where the decoder does so. None: the best rule
        of each.
        """
        if rule is None or isinstance(rule, Rule):
            assert rule is not None or together
            cases = [(self.p_PV(draft), draft) for _, draft in drafts]
            for weight, number, result in verified_together(rule, cases) if together else verified(rule, cases):
                yield drafts[number][0] * weight, drafts[number][1], result
            return
        for drawn, draft in drafts:
            p_PV = self.p_PV(draft)
            for decided, result in outcomes(lambda rng, p=p_PV, d=draft: rule(p, d, rng), leave_open=True):
                yield drawn * decided, draft, result

    def gap(self, rule: Verify | Rule | None, drafts: Drafts, *, together: bool = False) -> float:
        """Return the total variation between the round, continued by the target, and the target alone."""
        return self._gap(self.committed(rule, drafts, together=together))

    def _gap(self, committed: dict[Tokens, float]) -> float:
        actual: dict[Tokens, float] = {}
        for new, weight in committed.items():
            for string, rest in self.continued(new):
                add(actual, string, weight * rest)
        mass = sum(actual.values())
        assert abs(mass - 1) < EXACT, f"the probabilities of all outcomes add up to {mass}"
        return total_variation(actual, self.expected)

    def expected_accepted(self, rule: Verify | Rule, drafts: Drafts) -> float:
        """Return the expected number of accepted draft tokens."""
        return sum(weight * result.accepted for weight, _, result in self.verified(rule, drafts))


def gaps(pairs: Sequence[Round], rule: Rule, policy: Policy, *, leave_open: bool) -> list[float]:
    """Return the `gap` of each pair; the rule verifies the drafts of all together. `leave_open`: see `verified`."""
    owners = [(number, weight, draft) for number, pair in enumerate(pairs) for weight, draft in pair.drafts(policy)]
    committed: list[dict[Tokens, float]] = [{} for _ in pairs]
    cases = [(pairs[number].p_PV(draft), draft) for number, _, draft in owners]
    for decided, case, result in verified(rule, cases, leave_open=leave_open):
        number, drawn, draft = owners[case]
        kept = tuple(draft.tokens[node] for node in result.path)
        for token, share in spread(result.next_token):
            add(committed[number], pairs[number].cut((*kept, token)), drawn * decided * share)
    return [pair._gap(tokens) for pair, tokens in zip(pairs, committed, strict=True)]


def the_rule(name: str) -> Verify | Rule:
    """Return the decoder's rule of that name; "greedy": the rule of greedy decoding."""
    if name == "greedy":
        return lambda p_PV, draft, rng: verify_greedy(p_PV.argmax(-1).tolist(), draft)
    return RULES[name]
