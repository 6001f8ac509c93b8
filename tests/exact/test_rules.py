"""A round of every rule, on every shape that it accepts, has the target's distribution: all outcomes are enumerated."""

from dataclasses import replace
from functools import lru_cache

import pytest
from conftest import mostly_slow
from drawn_tree import ChosenTree, DrawnTree, widths_shape
from exact.one_round import EXACT, GAMMA, PLAIN, Round, Setting, gaps, the_rule
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.batch import NO_DRAFT
from draftsmith.decode.policies import AdaptiveChain, BestFirst, Chain, ConfidenceChain, Policy, SampledTree
from draftsmith.decode.rules import RULES
from draftsmith.decode.sampling import Sampling

PAIRS = 10

SETTINGS = {
    "T=1": Setting(),
    "T=0.7 top-p": Setting(Sampling(0.7, top_p=0.8)),
    "top-k": Setting(Sampling(1.3, top_k=3)),
    "truncated draft vocabulary": Setting(banned_q=frozenset({0, 4})),
    "zeros in q and p": Setting(banned_p=frozenset({1}), banned_q=frozenset({2, 4})),
    "p = q": Setting(equal=True),
    "disjoint": Setting(banned_p=frozenset({0, 1}), banned_q=frozenset({2, 3, 4})),
    "EOS in mid-draft": Setting(eos=frozenset({2})),
    "independent q": Setting(independent=True),
    "processors that read the text": Setting(
        extra=(RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2))
    ),
}
GREEDY_SETTINGS = {
    name: Setting(
        Sampling(0.0), s.extra, banned_p=s.banned_p, banned_q=s.banned_q, eos=s.eos, independent=s.independent
    )
    for name, s in SETTINGS.items()
    if s.sampling == PLAIN and not s.equal  # greedy runs have no warpers, and one outcome when p = q
}

# Two children of the root, and one child of the first: the smallest tree with siblings and depth.
BRANCHED = ((0,), (1,), (0, 0))
# Costs with which the adaptive policies draft different shapes; a test below checks this.
STEEP = Costs({1: 1.0, 8: 4.5}, {1: 0.1})
# Large enough that only costs limit the size of a tree.

CHAINS = {
    "chain": Chain(GAMMA),
    "confidence": ConfidenceChain(threshold=0.5, draft_length=GAMMA),
    "adaptive": AdaptiveChain(STEEP, draft_length=GAMMA),
}
DRAWN_TREES = {"chain": Chain(GAMMA), "static": DrawnTree(BRANCHED), "sampled": SampledTree(width=2, depth=GAMMA)}
CHOSEN_TREES = {"static best": ChosenTree(BRANCHED), "best-first": BestFirst(size=3, depth=GAMMA)}
SHAPES = {
    "token": {**CHAINS, **DRAWN_TREES},
    "block": CHAINS,
    "point-mass": {
        **CHOSEN_TREES,
        "chain": Chain(GAMMA),
        "sampled": DRAWN_TREES["sampled"],
    },
}
CELLS = [(rule, shape) for rule, shapes in SHAPES.items() for shape in shapes]
GREEDY_SHAPES = {**CHAINS, **CHOSEN_TREES}


# One level deeper, for chains and for trees in which the end of one branch depends on what was drawn in another.
DEEP = GAMMA + 1
DEEP_CHAIN = Chain(DEEP)
DEEP_TREE = DrawnTree((*BRANCHED, (0, 0, 0)))
DEEP_CELLS = [
    *((rule, DEEP_CHAIN) for rule in SHAPES),
    ("token", DEEP_TREE),
]


@lru_cache(maxsize=PAIRS)
def one_round(setting: Setting, seed: int, gamma: int = GAMMA) -> Round:
    """Cached, since rules on the same setting share drafts."""
    return Round(setting, seed, gamma)


@pytest.mark.parametrize(("rule", "shape"), CELLS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_round_is_exact(rule: str, shape: str, setting: str) -> None:
    """Of the first pair, the rule also enumerates the token after the path, which no rule reads."""
    pairs, policy = [one_round(SETTINGS[setting], seed) for seed in range(PAIRS)], SHAPES[rule][shape]
    assert max(gaps(pairs[:1], RULES[rule], policy, leave_open=False)) < EXACT
    assert max(gaps(pairs[1:], RULES[rule], policy, leave_open=True)) < EXACT


CHOSEN_AND_CHAIN = {"adaptive": CHAINS["adaptive"], **CHOSEN_TREES}
MIXTURES: dict[str, tuple[str | None, dict[str, Policy]]] = {
    "chains, token": ("token", CHAINS),
    "chains, block": ("block", CHAINS),
    "chains and trees, token": ("token", {**CHAINS, **DRAWN_TREES}),
    "point-mass": ("point-mass", CHOSEN_AND_CHAIN),
    "chosen": (None, CHOSEN_TREES),
    "chains and chosen": (None, CHOSEN_AND_CHAIN),
    "drawn": (None, DRAWN_TREES),
    "drawn and chosen": (None, {"sampled": DRAWN_TREES["sampled"], **CHOSEN_TREES}),
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_of_different_shapes_are_exact_together(mixture: str, setting: str) -> None:
    """A text without a draft is among them, as at the end of a text."""
    rule, policies = MIXTURES[mixture]
    for seed in range(3):
        pair = one_round(SETTINGS[setting], seed)
        kinds = [*(pair.drafts(policy) for policy in policies.values()), [(1.0, NO_DRAFT)]]
        drafts = [(weight / len(kinds), draft) for kind in kinds for weight, draft in kind]
        assert pair.gap(rule and RULES[rule], drafts, together=True) < EXACT, f"pair {seed}"


@pytest.mark.parametrize("shape", GREEDY_SHAPES)
@pytest.mark.parametrize("setting", GREEDY_SETTINGS)
def test_a_greedy_round_is_the_targets(shape: str, setting: str) -> None:
    for seed in range(PAIRS):
        pair = one_round(GREEDY_SETTINGS[setting], seed)
        drafts = pair.drafts(GREEDY_SHAPES[shape])
        assert pair.gap(the_rule("greedy"), drafts) == 0, f"pair {seed}"


@pytest.mark.parametrize("widths", mostly_slow([(2, 2), (3, 1)], (3, 1)), ids=str)
@pytest.mark.parametrize("setting", ["T=1", "truncated draft vocabulary", "disjoint", "top-k"])
def test_a_round_on_a_wider_tree_is_exact(widths: tuple[int, ...], setting: str) -> None:
    """Where q has two or three tokens, three siblings exhaust it: the last draws return nothing."""
    policy = DrawnTree(widths_shape(widths))
    pairs = [one_round(SETTINGS[setting], seed) for seed in range(1 if setting == "T=1" else 3)]
    assert max(gaps(pairs, RULES["token"], policy, leave_open=True)) < EXACT


@pytest.mark.parametrize(("rule", "policy"), DEEP_CELLS, ids=str)
@pytest.mark.parametrize("setting", ["T=1", "EOS in mid-draft", "zeros in q and p"])
def test_a_round_on_a_deeper_draft_is_exact(rule: str, policy: Policy, setting: str) -> None:
    pairs = [one_round(SETTINGS[setting], seed, DEEP) for seed in range(3)]
    assert max(gaps(pairs, RULES[rule], policy, leave_open=True)) < EXACT


@pytest.mark.parametrize("policy", [CHAINS["confidence"], CHAINS["adaptive"], *list(DRAWN_TREES.values())[2:]], ids=str)
def test_policies_that_look_at_q_draft_different_shapes(policy: Policy) -> None:
    """This shows that the tests above cover several shapes."""
    shapes = {draft.parents for seed in range(PAIRS) for _, draft in one_round(SETTINGS["T=1"], seed).drafts(policy)}
    assert len(shapes) > 1


@pytest.mark.parametrize("policy", [CHAINS["chain"], DEEP_CHAIN], ids=str)
def test_a_drafter_that_is_the_target_is_always_accepted(policy: Chain) -> None:
    """q is computed after the same tokens as p; other tokens would not bias the text, but would be rejected."""
    for seed in range(PAIRS):
        pair = one_round(replace(SETTINGS["processors that read the text"], equal=True), seed, policy.draft_length)
        accepted = pair.expected_accepted(the_rule("token"), pair.drafts(policy))
        assert accepted == pytest.approx(policy.draft_length, abs=EXACT)


def test_the_block_rule_accepts_at_least_as_much_as_the_token_rule() -> None:
    gains = []
    for seed in range(PAIRS):
        pair = one_round(SETTINGS["T=1"], seed)
        drafts = pair.drafts(CHAINS["chain"])
        more, less = (pair.expected_accepted(the_rule(rule), drafts) for rule in ("block", "token"))
        gains.append(more - less)
    assert min(gains) > -EXACT
    assert max(gains) > 1e-3, "the two rules accept the same: one may be the other under another name"
