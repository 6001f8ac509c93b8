"""Policies: the tokens and shapes of their drafts, and their end where another token lowers speed."""

import dataclasses
import json
import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.drafts.requests import Growing, Request
from draftsmith.decode.draws import seeded_draws
from draftsmith.decode.policies import (
    AdaptiveChain,
    BestFirst,
    Chain,
    ConfidenceChain,
    Policy,
    SampledTree,
    check_policy,
    policy_named,
)
from draftsmith.decode.policies.experience import Calibration, RetrievedAcceptance
from draftsmith.decode.profiling import WIDTHS, measure_costs
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.retrieval import Hybrid, SuffixRetrieval

VOCAB = 6
GREEDY = Processors(Sampling(0.0))
FLAT = Costs(verify={1: 1.0, 64: 1.0}, draft={1: 1e-6})
"""Verification costs the same for any width and drafting costs nothing: every token is worth drafting."""
STEEP = Costs(verify={1: 1.0, 64: 64.0}, draft={1: 0.5})
"""One more token costs as much as one more pass: no token is worth drafting."""


class Table(Drafter):
    """Logits that depend on the last token only."""

    type = "table"

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator) * scale

    def begin(self, rows: list[int]) -> Tensor:
        return self.logits[:1]

    def extend(self, level: Level) -> Tensor:
        return self.logits[level.tokens_Bn]


def draft(policy: Policy, *, greedy: bool = True, room: int = 8, seed: int = 0, table: Table | None = None) -> Draft:
    processors = Processors(Sampling(0.0 if greedy else 1.0))
    builder = DraftBuilder(DecodeSequence([1, 0], 50), room, processors)
    proposer, draws = Proposer(table or Table(), processors), seeded_draws([seed], [2], torch.device("cpu"))
    return proposer.build([policy], [builder], [None], draws)[0]


def path_weights(shown: Draft, table: Table) -> list[float]:
    """Return the probability of each node's path under the table."""
    q, weights = table.logits.softmax(-1), []
    for node in range(len(shown)):
        before = [0, *(shown.tokens[step] for step in shown.path(node))]
        weights.append(math.prod(float(q[a, b]) for a, b in pairwise(before)))
    return weights


ALL = [Chain(3), ConfidenceChain(0.3, 6), AdaptiveChain(FLAT, 5), SampledTree(3, 3), BestFirst(size=8, depth=4)]


@pytest.mark.parametrize("policy", ALL, ids=str)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("room", [1, 2, 8])
def test_drafts_are_trees_that_fit(policy: Policy, greedy: bool, room: int) -> None:
    for seed in range(5):
        shown = draft(policy.fresh(), greedy=greedy, room=room, seed=seed)
        assert len(shown) >= 1
        assert shown.depth <= room
        assert all(parent < node for node, parent in enumerate(shown.parents))
        assert shown.drawn != (greedy or isinstance(policy, BestFirst))
        pairs = list(zip(shown.parents, shown.tokens, strict=True))
        assert len(set(pairs)) == len(pairs), "siblings differ"


def test_best_first_is_the_best_of_all_prefixes() -> None:
    """Compared with all paths of up to three tokens."""
    for seed in range(20):
        table = Table(seed)
        q = table.logits.softmax(-1)
        weights = []
        for depth in (1, 2, 3):
            for path in product(range(VOCAB), repeat=depth):
                steps = zip((0, *path), path, strict=False)
                weights.append(math.prod(float(q[a, b]) for a, b in steps))
        shown = draft(BestFirst(size=9, depth=3), table=table)
        assert sorted(path_weights(shown, table)) == pytest.approx(sorted(sorted(weights)[-9:]))


def test_confidence_stops_before_an_unsure_token_is_drawn() -> None:
    q = Table().logits.softmax(-1)
    threshold = float(q.max(-1).values.median())
    for seed in range(30):
        shown = draft(ConfidenceChain(threshold, 8), greedy=False, seed=seed)
        before = [0, *shown.tokens]
        assert all(float(q[token].max()) >= threshold for token in before[1 : len(shown)])
        if len(shown) < 8:
            assert float(q[before[len(shown)]].max()) < threshold


@pytest.mark.parametrize("greedy", [True, False])
def test_drafts_grow_while_tokens_are_worth_their_cost(greedy: bool) -> None:
    assert draft(AdaptiveChain(FLAT, 8), greedy=greedy).depth >= 4
    assert len(draft(AdaptiveChain(STEEP, 8), greedy=greedy)) == 0


def rounds_of(policy: Policy, drafter: Drafter) -> list[int]:
    """Return the number of draft tokens of each round of a text."""
    decoder = SpeculativeDecoder(make_llama(initializer_range=0.3), drafter, policy=policy)
    out = decoder.generate([9, 4, 3], max_new_tokens=60, eos_token_id=None)
    return [record.drafted for record in out.rounds]


def test_a_chain_is_empty_where_no_draft_pays_and_is_tried_again_ever_more_seldom() -> None:
    costs = Costs({1: 1.0, 2: 1.83, 64: 57.0}, {1: 0.05})
    wrong = rounds_of(AdaptiveChain(costs), DraftModel(make_llama(7)))
    tried = [place for place, length in enumerate(wrong) if length]
    assert max(wrong) == 1
    assert tried[:3] == [4, 13, 30], "after 4, 8 and 16 rounds without a draft"


def test_a_policy_without_a_draft_notices_that_drafts_pay() -> None:
    """Tokens that it tries and that are accepted are followed by others at once."""
    policy = AdaptiveChain(Costs({1: 1.0, 2: 1.6, 64: 38.0}, {1: 0.05}))
    for _ in range(8):  # it has seen the drafter fail
        policy.experience[True].survival.observe(0.8, 1, False)
    right = rounds_of(policy, DraftModel(make_llama(initializer_range=0.3)))
    assert right[:6] == [0, 0, 0, 0, 1, 1]
    assert 0 not in right[4:-1]


def test_a_first_token_that_does_not_pay_alone_is_drafted_with_those_after_it() -> None:
    step = Costs({1: 1.0, 2: 2.0, 16: 2.05}, {1: 0.01})
    assert len(draft(AdaptiveChain(step))) > 1


def test_the_first_pass_of_a_drafter_counts_once() -> None:
    """A block drafter computes all of its tokens in it."""
    block = Costs({1: 1.0, 16: 1.1}, {1: 0.0}, first=0.6)
    assert len(draft(AdaptiveChain(block))) > 1
    assert len(draft(AdaptiveChain(dataclasses.replace(block, first=8.0)))) == 0
    assert block.drafting(0) == 0
    assert dataclasses.replace(block, draft={1: 0.2}).drafting(3) == pytest.approx(0.6 + 3 * 0.2)


@pytest.mark.parametrize("greedy", [True, False])
def test_retrieved_drafts_are_cut_where_they_do_not_pay(greedy: bool) -> None:
    found = Draft.chain([3, 4, 5, 3, 4, 5, 3, 4])
    flat, dear, steep = (AdaptiveChain(Costs({1: 1.0, 16: wide}, {1: 0.1})) for wide in (1.15, 4.0, 16.0))
    whole = flat.retrieved(found, greedy=greedy)
    assert 2 <= len(whole) <= 8
    assert whole.tokens == found.tokens[: len(whole)]
    assert len(steep.retrieved(found, greedy=greedy)) == 0
    for _ in range(20):
        flat.observe_retrieved(8, 8, 8, greedy=greedy)
        dear.observe_retrieved(8, 8, 0, greedy=greedy)
    assert len(flat.retrieved(found, greedy=greedy)) == 8
    assert len(dear.retrieved(found, greedy=greedy)) == 0
    assert len(dear.retrieved(Draft.chain([3] * 2), greedy=greedy)) > 0, "shorter matches are counted separately"
    assert len(dear.retrieved(found, greedy=not greedy)) > 0
    fork = Draft((3, 4), (-1, -1))
    assert flat.retrieved(fork, greedy=greedy) is fork


class WrongCopies(DraftModel):
    """Retrieves the same token, three times, after every text."""

    token: int

    def retrieve(self, row: int, room: int) -> Draft:
        return Draft.chain([self.token] * min(3, room))


def test_retrieved_drafts_that_are_refused_give_way_to_own_drafts() -> None:
    costs, target = Costs({1: 1.0, 16: 4.0}, {1: 0.05}), make_llama(initializer_range=0.3)
    settings = {"max_new_tokens": 80, "eos_token_id": None}
    own = SpeculativeDecoder(target).generate([9, 4, 3], **settings).tokens
    drafter = WrongCopies(target)
    drafter.token = next(token for token in range(64) if token not in own)
    out = SpeculativeDecoder(target, drafter, policy=AdaptiveChain(costs)).generate([9, 4, 3], **settings)
    accepted = [record.accepted for record in out.rounds]
    assert out.tokens == own
    assert accepted[:3] == [0, 0, 0], "copies come first"
    assert sum(accepted[-5:]) > 5, "the drafter is the target itself"


def test_own_drafts_are_preferred_where_they_gain_more() -> None:
    policy, found = AdaptiveChain(Costs({1: 1.0, 16: 1.15}, {1: 0.1})), Draft.chain([3, 4])
    assert len(policy.retrieved(found, greedy=True)) == 2
    policy.experience[True].gain = 3.0
    assert len(policy.retrieved(found, greedy=True)) == 0


def test_copies_in_a_batch_cost_every_text() -> None:
    costs, found = Costs({1: 1.0, 16: 4.0}, {1: 0.1}), Draft.chain([3, 4])
    alone, together = (AdaptiveChain(costs, batch_size=texts).retrieved(found, greedy=True) for texts in (1, 8))
    assert len(alone) == 2
    assert len(together) == 0, "the other texts are padded to this one's copy"


def test_what_policies_learn_fades() -> None:
    """Rates stay within [0, 1], and what was seen last counts more than ten times as many earlier observations."""
    learned, copied = Calibration(lambda q: q), RetrievedAcceptance(0.5)
    for outcome in (1.0, 0.0):
        for _ in range(600 if outcome else 60):
            learned.observe(0.97, outcome)
            copied.observe(4, 4, 4 * int(outcome))
        assert learned.rate(0.97) <= 1
    assert learned.rate(0.97) < 0.5
    assert copied.rate(4) < 0.5


class Unsure(Table):
    """Its own confidences are 0.9 in the first text, and `second` in another one."""

    second: float

    def begin(self, rows: list[int]) -> Tensor:
        return self.logits[:1].expand(len(rows), -1)

    def confidences(self) -> Tensor:
        return torch.tensor([[0.9], [self.second]])


@pytest.mark.parametrize(("second", "length"), [(0.1, 1), (0.5, 4)], ids=["below", "at the threshold"])
def test_a_chain_ends_by_the_confidence_in_its_own_text(second: float, length: int) -> None:
    drafter = Unsure()
    drafter.second = second
    builders = [DraftBuilder(DecodeSequence([1, 0], 50, number=n), 8, GREEDY) for n in (0, 1)]
    drafts = Proposer(drafter, GREEDY).build([ConfidenceChain(0.5, 4)] * 2, builders, [None, None], None)
    assert [len(one) for one in drafts] == [4, length]


def test_the_policy_learns_what_is_accepted() -> None:
    """With a drafter that is never accepted the chain becomes short, with one that always is it becomes long."""
    costs = Costs(verify={1: 1.0, 2: 1.1, 64: 7.3}, draft={1: 0.1})
    target = make_llama(initializer_range=0.3)
    lengths = {}
    for name, drafter in {"right": make_llama(initializer_range=0.3), "wrong": make_llama(7)}.items():
        decoder = SpeculativeDecoder(target, DraftModel(drafter), policy=AdaptiveChain(costs, 12))
        decoder.calibrate([[5, 6, 7], [8, 9]], max_new_tokens=60, eos_token_id=None)
        out = decoder.generate([9, 4, 3], max_new_tokens=60, eos_token_id=None)
        lengths[name] = sum(record.drafted for record in out.rounds) / len(out.rounds)
    assert lengths["right"] > 6
    assert lengths["wrong"] < 2


def test_calibration_that_fails_changes_nothing(tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(
        tiny_target, DraftModel(make_llama(1)), policy=AdaptiveChain(Costs({1: 1.0}, {1: 0.1}))
    )
    policy = decoder.policy
    with pytest.raises(ConfigError, match="prompt=128 tokens"):
        decoder.calibrate([[5, 6, 7], [1] * 128], max_new_tokens=4)
    assert decoder.policy is policy


def test_a_seed_gives_the_same_text_whatever_was_decoded_before(tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), policy="adaptive")
    settings = {"temperature": 1.0, "max_new_tokens": 40, "eos_token_id": None}
    first = decoder.generate([5, 6], seed=3, **settings)
    decoder.generate([9] * 20, seed=4, **settings)
    again = decoder.generate([5, 6], seed=3, **settings)
    assert first.tokens == again.tokens
    timeless = [
        [dataclasses.replace(record, draft_seconds=0, verify_seconds=0, seconds=0) for record in out.rounds]
        for out in (first, again)
    ]
    assert timeless[0] == timeless[1]


@dataclasses.dataclass(frozen=True)
class Looks(Policy):
    """Asks for the `top` likeliest tokens after the root and drafts one of them, the last."""

    top: int

    def grow(self, builder: DraftBuilder) -> Growing:
        look = yield Request([ROOT], self.top)
        assert [len(one[0]) for one in (look.values, look.tokens)] == [self.top, self.top]
        builder.choose(ROOT, look.tokens[0][-1])
        return builder.draft()


def test_each_text_sees_as_many_tokens_as_it_asks_for() -> None:
    table = Unsure()
    table.second = 0.9
    builders = [DraftBuilder(DecodeSequence([1, 0], 50), 8, GREEDY) for _ in range(2)]
    drafts = Proposer(table, GREEDY).build([Looks(3), Looks(1)], builders, [None, None], None)
    likeliest = table.logits[0].argsort(descending=True).tolist()
    assert [one.tokens for one in drafts] == [(likeliest[2],), (likeliest[0],)]


def test_a_draft_model_keeps_what_was_accepted_of_a_pruned_tree(tiny_target: LlamaForCausalLM) -> None:
    """It is the target itself: tokens of other nodes in its cache would change what it drafts next."""
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), policy="best-first:size=5,depth=4")
    rounds = decoder.generate([5, 9, 33, 2], max_new_tokens=40, eos_token_id=None).rounds
    assert max(record.drafted - record.depth for record in rounds) > 0
    assert all(record.accepted == record.depth for record in rounds)


def test_a_draft_is_never_deeper_than_what_is_left(tiny_target: LlamaForCausalLM) -> None:
    for policy in ("chain:draft_length=30", "best-first:size=40,depth=30", "sampled-tree:width=5,depth=30"):
        for count in (1, 2, 3, 7):
            decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), policy=policy)
            out = decoder.generate([3] * (128 - count), max_new_tokens=50, temperature=0.5, eos_token_id=None)
            assert len(out.tokens) == count, "the context of 128 is full"
    heads = SpeculativeDecoder(tiny_target, Medusa.from_target(tiny_target, num_heads=2), policy="best-first:depth=9")
    assert max(record.depth for record in heads.generate([3], max_new_tokens=20).rounds) == 2


def test_costs_are_measured(tiny_target: LlamaForCausalLM) -> None:
    costs = measure_costs(tiny_target, DraftModel(make_llama(1)))
    assert set(costs.verify[1]) == set(costs.draft[1]) == set(WIDTHS)
    values = [costs.verify_seconds(width) for width in range(1, 20)]
    assert values == sorted(values)
    assert values[0] > 0
    assert measure_costs(tiny_target, DraftModel(make_llama(1)), verify={1: {1: 5.0}}).verify == {1: {1: 5.0}}


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs({1: 1.0, 3: 2.0, 5: 6.0}, {1: 0.5})
    assert [costs.verify_seconds(width) for width in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert costs.draft_seconds(9) == 0.5


def test_files_without_batch_sizes_are_read(tmp_path: Path) -> None:
    """Version 0.3 wrote seconds of one text by width alone."""
    old = {"verify": {"1": 1.0, "8": 1.7}, "draft": {"1": 0.1, "4": 0.4}, "round": 0.05, "first": 0.02}
    (tmp_path / "old.json").write_text(json.dumps(old))
    costs = Costs.load(tmp_path / "old.json")
    assert costs == Costs({1: 1.0, 8: 1.7}, {1: 0.1, 4: 0.4}, 0.05, 0.02)
    assert costs.round_seconds(7, 3) == pytest.approx(1.7 + 0.02 + 3 * 0.1 + 0.05)
    costs.save(tmp_path / "new.json")
    assert Costs.load(tmp_path / "new.json") == costs
    (tmp_path / "old.json").write_text(json.dumps(old | {"verify": {"1": 0.0}}))
    with pytest.raises(ConfigError, match=r"costs=.*old.json cannot be read"):
        Costs.load(tmp_path / "old.json")


def test_seconds_by_batch_size() -> None:
    """Between batch sizes they are interpolated; timed chains count instead of their passes."""
    costs = Costs(
        {1: {1: 1.0, 5: 2.0}, 4: {1: 2.0, 5: 6.0}}, {1: 0.1}, chains={1: {1: 0.5, 3: 0.7}, 4: {1: 1.0, 3: 2.0}}
    )
    assert costs.verify_seconds(3, 4) == 4.0
    assert costs.verify_seconds(3, 2.5) == (1.5 + 4.0) / 2
    assert costs.round_seconds(2, 2, 4) == pytest.approx(4.0 + 1.5)
    assert costs.share(4).verify_seconds(3) == 1.0
    flat, rising = Costs({1: 1.0, 9: 1.1}, {1: 0.3}), {1: {1: 0.3, 2: 1.5, 9: 10.0}}
    lengths = [Costs(flat.verify, flat.draft, chains=chains) for chains in ({}, rising)]
    policies = [AdaptiveChain(costs, draft_length=4) for costs in lengths]
    rate = (0.9).__pow__
    assert [policy._pays(0.7, range(2, 5), rate) for policy in policies] == [True, False], "a second token costs 1.2"


def test_a_pass_is_padded_where_a_wider_one_is_cheaper(tiny_target: LlamaForCausalLM) -> None:
    bumpy = Costs({1: 1.0, 2: 3.0, 3: 4.0, 5: 2.0, 8: 2.5}, {1: 1.0, 2: 3.0, 4: 1.5})
    assert [bumpy.verify_seconds(width) for width in (1, 2, 3, 4, 5, 8)] == [1.0, 2.0, 2.0, 2.0, 2.0, 2.5]
    assert bumpy.verify_widths == {2: 5, 3: 5, 4: 5}
    assert bumpy.draft_widths == {2: 4, 3: 4}
    read: list[int] = []
    tiny_target.model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for policy in ("chain:draft_length=2", "best-first:size=4,depth=2", "adaptive"):
        for prompt in ([5, 6, 7], [9] * 100):  # the second fills the context
            plain = SpeculativeDecoder(tiny_target).generate(prompt, max_new_tokens=40, eos_token_id=None).tokens
            decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), policy=policy, costs=bumpy)
            read.clear()
            assert decoder.generate(prompt, max_new_tokens=40, eos_token_id=None).tokens == plain
            assert not {2, 3, 4} & set(read[1:]), "every pass of these widths is padded to five"


def test_names_are_read_as_they_are_written() -> None:
    for policy in ALL:
        again = policy_named(str(policy), FLAT)
        assert str(again) == str(policy)
        assert type(again) is type(policy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chains", "policy='chains'; expected one of chain, confidence"),
        ("chain:draft_lenght=3", "did you mean draft_length?"),
        ("chain:draft_length=x", "draft_length='x'; expected a whole number"),
        ("chain:draft_length=0", "draft_length=0; expected >= 1"),
        ("confidence:threshold=2", "threshold=2.0; expected a probability"),
        ("dynamic-tree", "policy='dynamic-tree'; expected one of chain, confidence"),
        ("best-first:size=0", "size=0; expected >= 1"),
        ("best-first:size=100000", "size=100000; expected at most 1024"),
        ("best-first:depth=1000000000", "depth=1000000000; expected at most 1024"),
        ("optimal-tree", "policy='optimal-tree'; expected one of chain, confidence"),
        ("adaptive:draft_length=0", "draft_length=0; expected >= 1"),
        ("sampled-tree:width=10000000", "width=10000000; expected at most 1024"),
        ("chain:draft_length=10000000000", "draft_length=10000000000; expected at most 1024"),
    ],
)
def test_names_that_do_not_fit_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_policy(name)


def test_a_rule_that_does_not_fit_the_draft_is_refused(tiny_target: LlamaForCausalLM) -> None:
    """The refusal comes before decoding, whatever the drafter retrieves and however confident it is."""
    drafter = DraftModel(make_llama(1))
    with pytest.raises(
        ConfigError, match="rule='token' needs a draft whose tokens were drawn from q; this draft is a tree chosen"
    ):
        SpeculativeDecoder(tiny_target, drafter, policy="best-first", rule="token")
    SpeculativeDecoder(tiny_target, drafter, policy="sampled-tree", rule="token")
    with pytest.raises(ConfigError, match=r"rule='block' needs .* this draft is a tree drawn"):
        SpeculativeDecoder(tiny_target, drafter, policy="sampled-tree", rule="block")
    for copies in (Hybrid(drafter), SuffixRetrieval()):
        for rule in ("token", "block"):
            with pytest.raises(ConfigError, match=f"rule='{rule}' needs .* a {copies.type} drafter also retrieves"):
                SpeculativeDecoder(tiny_target, copies, rule=rule)
        for rule in ("point-mass", "typical"):
            SpeculativeDecoder(tiny_target, copies, rule=rule)
    for policy in ("chain", "confidence", AdaptiveChain(FLAT)):
        SpeculativeDecoder(tiny_target, drafter, policy=policy, rule="token")
    with pytest.raises(ConfigError, match="rule='tokens'; expected one of token, block"):
        SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), rule="tokens")
    assert not SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)), rule="typical").lossless
