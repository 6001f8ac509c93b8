"""The enumeration: right probabilities of known draws; it rejects every known wrong rule and accepts the right one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from drawn_tree import ChosenTree, DrawnTree, widths_shape
from exact import wrong_rules
from exact.enumeration import BranchingRng, Open, Tokens, Verify, add, outcomes, spread, total_variation
from exact.one_round import EXACT, GAMMA, PROMPT, Drafts, Round, Setting, the_rule
from exact.toys import ToyModel, below
from exact.wrong_rules import forged
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from draftsmith.decode.cache.committed import contexts_of
from draftsmith.decode.policies import Chain, ConfidenceChain, Policy
from draftsmith.decode.sampling import Sampling
from draftsmith.heads.draft_tree import ROOT, Draft

SEED = 7
PLAIN_SETTING = Setting()
CHAIN = Chain(GAMMA)
PAIR_OF_SIBLINGS, THREE_SIBLINGS = widths_shape([2]), widths_shape([3])
TREE = DrawnTree(((0,), (1,), (0, 0)))
CHOSEN_TREE = ChosenTree(TREE.shape)


@dataclass(frozen=True)
class Mutant:
    """A wrong rule on correct drafts, and the correct rule."""

    name: str
    wrong: Verify
    right: str
    policy: Policy
    above: float
    """Lower bound on its total variation, somewhat below the value for this pair of models."""


MUTANTS = [
    Mutant("residual of p", wrong_rules.residual_of_p, "token", CHAIN, 1e-1),
    Mutant("inverted ratio", wrong_rules.inverted_ratio, "token", CHAIN, 5e-1),
    Mutant("accepts what p finds likely", wrong_rules.accepts_what_p_finds_likely, "token", CHAIN, 1e-1),
    Mutant("p off by one", wrong_rules.off_by_one_p, "token", CHAIN, 2e-1),
    Mutant("bonus from the position before", wrong_rules.bonus_from_the_position_before, "token", CHAIN, 5e-2),
    Mutant("dropped bonus", wrong_rules.dropped_bonus, "token", CHAIN, 1e-1),
    Mutant("reused uniform", wrong_rules.reused_uniform, "token", CHAIN, 2e-2),
    Mutant("block, residual unscaled", partial(wrong_rules.block, scaled=False), "block", CHAIN, 1e-2),
    Mutant("block, first failure", partial(wrong_rules.block, stop_at_failure=True), "block", CHAIN, 5e-2),
    Mutant("siblings, p kept", partial(wrong_rules.siblings, update_p=False), "token", TREE, 1e-2),
    Mutant("siblings, q not renormalised", partial(wrong_rules.siblings, renormalise_q=False), "token", TREE, 1e-3),
    Mutant("point mass drawn again", wrong_rules.point_mass_drawn_again, "point-mass", CHOSEN_TREE, 1e-1),
    Mutant("typical acceptance", partial(wrong_rules.unchecked, "typical"), "point-mass", CHOSEN_TREE, 5e-1),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rule_is_rejected(mutant: Mutant) -> None:
    pair = Round(PLAIN_SETTING, SEED)
    drafts = pair.drafts(mutant.policy)
    assert pair.gap(the_rule(mutant.right), drafts) < EXACT
    assert pair.gap(mutant.wrong, drafts) > mutant.above


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        (wrong_rules.token, CHAIN),
        (wrong_rules.block, CHAIN),
        (wrong_rules.siblings, TREE),
    ],
)
def test_the_mutants_are_correct_without_their_mutation(rule: Verify, policy: Policy) -> None:
    pair = Round(PLAIN_SETTING, SEED)
    assert pair.gap(rule, pair.drafts(policy)) < EXACT


# Correct rules on drafts whose type is wrong.


def kept(draft: Draft, nodes: Sequence[int]) -> Draft:
    """Return a draft of some nodes that claims to hold all drawn nodes."""
    plain = draft.keep(list(nodes))
    return forged(plain.tokens, plain.parents, [draft.q[node] for node in nodes])


def softmax_q(pair: Round, draft: Draft) -> Draft:
    """Return the draft with the drafter's softmax as q, without processors and for tokens chosen in any way."""
    texts = [PROMPT + below(draft, parent) for parent in draft.parents]
    return forged(draft.tokens, draft.parents, [pair.drafter.model.logits(text).softmax(-1) for text in texts])


def by_q(draft: Draft) -> list[int]:
    """Return the children of the root, the most likely first."""
    return sorted(range(len(draft)), key=lambda node: -float(draft.q[node][draft.tokens[node]]))


def sorted_by_q(pair: Round, draft: Draft) -> Draft:
    return kept(draft, by_q(draft))


def best_two(pair: Round, draft: Draft) -> Draft:
    """Return a draft of the two most likely tokens, in the order in which they were drawn."""
    return kept(draft, sorted(by_q(draft)[:2]))


def without_unlikely(pair: Round, draft: Draft) -> Draft:
    """Return the chain up to its first token, except the very first, with a q below a quarter."""
    unlikely = (node for node in range(1, len(draft)) if draft.q[node][draft.tokens[node]] < 0.25)
    return kept(draft, range(next(unlikely, len(draft))))


@dataclass(frozen=True)
class Forgery:
    """A change of drafts before a correct rule is applied, and a policy whose drafts the rule accepts."""

    change: Callable[[Round, Draft], Draft]
    policy: Policy
    rule: str
    above: float
    honest: Policy
    setting: Setting = PLAIN_SETTING


def learned_from_the_draft(pair: Round, draft: Draft) -> Draft:
    """Return the draft with the q of a drafter that was updated on the drawn tokens before they were verified."""
    updated = ToyModel(hash((SEED, draft.tokens)))
    texts = [PROMPT + below(draft, parent) for parent in draft.parents]
    return forged(draft.tokens, draft.parents, [updated.logits(text).softmax(-1) for text in texts])


FORGERIES = [
    Forgery(softmax_q, CHAIN, "token", 1e-2, CHAIN, Setting(Sampling(0.7))),
    Forgery(softmax_q, CHAIN, "block", 1e-2, CHAIN, Setting(Sampling(0.7))),
    Forgery(softmax_q, CHOSEN_TREE, "token", 1e-1, TREE),
    Forgery(sorted_by_q, DrawnTree(PAIR_OF_SIBLINGS), "token", 1e-1, TREE),
    Forgery(best_two, DrawnTree(THREE_SIBLINGS), "token", 5e-2, TREE),
    Forgery(learned_from_the_draft, CHAIN, "token", 1e-1, CHAIN),
    Forgery(learned_from_the_draft, CHAIN, "block", 1e-1, CHAIN),
    Forgery(learned_from_the_draft, TREE, "token", 1e-1, TREE),
    Forgery(without_unlikely, CHAIN, "token", 1e-2, ConfidenceChain(0.5, GAMMA)),
    Forgery(without_unlikely, CHAIN, "block", 1e-2, ConfidenceChain(0.5, GAMMA)),
]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: f"{forgery.change.__name__}-{forgery.rule}")
def test_a_draft_that_was_changed_after_drawing_is_rejected(forgery: Forgery) -> None:
    pair = Round(forgery.setting, SEED)
    rule = the_rule(forgery.rule)
    drafts: Drafts = [(w, forgery.change(pair, draft)) for w, draft in pair.drafts(forgery.policy)]
    assert pair.gap(rule, pair.drafts(forgery.honest)) < EXACT
    assert pair.gap(the_rule("point-mass"), drafts) < EXACT, "the point-mass rule takes any draft"
    assert pair.gap(rule, drafts) > forgery.above


# Correct rules on correct drafts, in a decoder with another error.


class StaleContext(Round):
    """Processors read the committed text at every node instead of the text up to the node."""

    def p_PV(self, draft: Draft) -> Tensor:
        rows = [self.target.logits(PROMPT + below(draft, node)) for node in range(ROOT, len(draft))]
        return self.processors.scores(
            torch.stack(rows), lambda: contexts_of([list(PROMPT)] * len(rows), torch.device("cpu"))
        ).softmax(-1)


class IgnoresEos(Round):
    """The text continues after an EOS inside a draft."""

    def _cut(self, new: Tokens) -> Tokens:
        return new[: self.count]


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [(StaleContext, Setting(extra=(NoRepeatNGramLogitsProcessor(2),))), (IgnoresEos, Setting(eos=frozenset({2})))],
)
def test_a_wrong_decoder_around_a_right_rule_is_rejected(wrong: type[Round], setting: Setting) -> None:
    for kind, (low, high) in ((Round, (0, EXACT)), (wrong, (1e-2, 1))):
        pair = kind(setting, SEED)
        assert low <= pair.gap(the_rule("token"), pair.drafts(CHAIN)) < high


DIE = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)


def coin_then_die(rng: BranchingRng) -> tuple[bool, int]:
    return (True, rng.categorical(DIE)) if rng.bernoulli(0.25) else (False, 0)


def test_every_outcome_comes_with_its_probability() -> None:
    expected = {(False, 0): 0.75, (True, 0): 0.0625, (True, 1): 0.125, (True, 3): 0.0625}
    assert {result: weight for weight, result in outcomes(coin_then_die)} == expected


def test_certain_choices_have_one_outcome() -> None:
    assert list(outcomes(lambda rng: (rng.bernoulli(1.0), rng.bernoulli(0.0)))) == [(1.0, (True, False))]


def test_outcomes_continue_given_choices() -> None:
    assert {result: weight for weight, result in outcomes(coin_then_die, start=(1, 1))} == {(True, 1): 0.125}


def test_a_token_that_is_not_read_represents_all_outcomes() -> None:
    ((weight, token),) = outcomes(lambda rng: rng.categorical(DIE), leave_open=True)
    assert isinstance(token, Open)
    assert (weight, spread(token)) == (1.0, [(0, 0.25), (1, 0.5), (3, 0.25)])


@pytest.mark.parametrize(
    "look",
    [
        lambda token, rng: (token == 1, token),
        lambda token, rng: (token in {1, 2}, token),
        lambda token, rng: (bool(token), token),
        lambda token, rng: ("abcd"[token], token),
        lambda token, rng: (int(token) + 1, token),
        lambda token, rng: (rng.bernoulli(0.5), token),
        lambda token, rng: (rng.categorical(DIE), token),
    ],
    ids=["==", "in", "bool", "index", "int", "flip", "draw"],
)
def test_the_outcomes_of_a_token_that_is_read_are_enumerated(look: Callable[[Any, BranchingRng], Any]) -> None:
    found: tuple[dict, dict] = ({}, {})
    for leave_open, distribution in zip((True, False), found, strict=True):
        for weight, (seen, token) in outcomes(lambda rng: look(rng.categorical(DIE), rng), leave_open=leave_open):
            for value, share in spread(token):
                for other, rest in spread(seen):
                    add(distribution, (other, value), weight * share * rest)
    assert sum(found[0].values()) == pytest.approx(1)
    assert total_variation(*found) < 1e-15


def test_weights_that_are_not_a_distribution_are_refused() -> None:
    for wrong in (DIE - 1, DIE * 0, DIE * torch.nan):
        with pytest.raises(AssertionError):
            list(outcomes(lambda rng, wrong=wrong: rng.categorical(wrong)))
    with pytest.raises(AssertionError):
        list(outcomes(lambda rng: rng.bernoulli(float("nan"))))
