"""The teacher-forced pass says what the decoder would have drafted: the same q, at every anchor and draft position."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import pytest
import torch
from conftest import make_llama, make_t5
from torch import nn
from transformers import LlamaForCausalLM

from draftsmith.decode.costs import Costs
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.drafts.builder import DraftBuilder, probabilities
from draftsmith.decode.drafts.requests import Growing, Look, Request
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import BestFirst, Chain, ConfidenceChain, Policy, SampledTree
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.expected_rounds import accepted, of_rounds, replay, retrieved
from draftsmith.eval.forecast.forecast import BestPolicy, candidates, forecast, noisy, predict
from draftsmith.eval.settings import ForecastSettings
from draftsmith.eval.teacher_forced import acceptance_measure, agreement, sample_texts, target_text
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import EarlyExit
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.retrieval import Hybrid, PromptLookup, SuffixRetrieval

PROMPTS = [[5, 9, 12, 7, 30, 5, 9], [3, 3, 8], [40, 2, 17, 21]]
NEW, GAMMA = 14, 3
SAME = 1e-9
"""In fp64: a cached pass over a draft and one over the whole text round differently."""
HEADS_OF_TARGETS: dict[str, dict[str, object]] = {
    "medusa": {"num_heads": GAMMA},
    "medusa of few tokens": {"num_heads": GAMMA, "draft_vocabulary": list(range(0, 64, 2))},
    "eagle": {"train_steps": 1},
    "hass": {},
    "eagle3 of few tokens": {"draft_vocabulary": list(range(40))},
    "mtp": {},
    "peagle": {"num_tokens": GAMMA},
    "dflash": {"block_size": GAMMA + 1, "anchors": 2},
    "dflash with a selector": {"block_size": GAMMA + 1, "selector_rank": 2, "selector_top_k": 4},
    "dflash with Markov bias and confidence": {"block_size": GAMMA + 1, "markov_rank": 2, "confidence_head": True},
}
KINDS = ["draft_model", "draft_model with a larger vocabulary", "early-exit", *HEADS_OF_TARGETS]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return make_llama(3, num_hidden_layers=4, eos_token_id=None).double()


@torch.inference_mode()
def make_drafter(kind: str, target: nn.Module) -> Drafter:
    """With weights at which q is far from flat, and from what training starts with."""
    if kind == "early-exit":
        return EarlyExit(target, layers=2)
    if kind.startswith("draft_model"):
        size = 70 if "larger" in kind else 64
        drafter = DraftModel(make_llama(4, vocab_size=size).double())
        drafter.shared_vocabulary = 60 if "larger" in kind else None
        return drafter
    torch.manual_seed(6)
    drafter = HEADS[kind.split()[0]].from_target(target, **HEADS_OF_TARGETS[kind]).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter


@dataclass
class OnTheText(Policy):
    """Drafts the text itself and keeps q on the way; proposes nothing, so that every token becomes an anchor."""

    learns: ClassVar[bool] = False
    tokens: list[int]
    seen: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(token that was committed last, draft position): log q of the text's token, max q or the drafter's own guess."""

    def fresh(self) -> Self:
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        last, node = len(builder.sequence.tokens) - 1, ROOT
        for k in range(min(GAMMA, builder.room)):
            look: Look = yield Request([node])
            q_V = probabilities([builder], {0: [node]}, look.logits_nV)[0]
            token = self.tokens[last + 1 + k]
            self.seen[last, k] = float(q_V[token].log()), builder.estimates.get(node, float(q_V.max()))
            if k + 1 < min(GAMMA, builder.room):
                node = builder.choose(node, token)
        return builder.pruned([])

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_q_of_the_unrolled_states_is_the_decoders(kind: str, target: LlamaForCausalLM) -> None:
    drafter = make_drafter(kind, target)
    greedy, plain = Sampling(0.0), Processors(Sampling(1.0))
    texts = sample_texts(target, PROMPTS, greedy, max_new_tokens=NEW)
    tables = agreement(target, drafter, texts, GAMMA, acceptance_measure(plain))
    for text, table in zip(texts, tables, strict=True):
        policy = OnTheText(text.tokens)
        row = DecodeSequence(text.tokens[: text.prompt_length], len(text.tokens))
        decoding = DecodeLoop(TransformersTarget(target), drafter, policy, [row], Processors(greedy))
        with torch.inference_mode():
            decoding.prefill()
            while decoding.sequences:
                decoding.round()
        assert row.tokens == text.tokens
        assert len(policy.seen) > 2 * NEW
        for (last, k), (log_q, sure) in policy.seen.items():
            anchor = last - text.prompt_length
            if np.isneginf(log_q):
                assert np.isneginf(table["log_q"][anchor, k])
            else:
                assert table["log_q"][anchor, k] == pytest.approx(log_q, abs=SAME), f"anchor {anchor}, position {k}"
            assert table["sure"][anchor, k] == pytest.approx(sure, abs=SAME)


def decoded(target: nn.Module, drafter: Drafter, policy: Policy | None, sampling: Sampling) -> list[object]:
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return SpeculativeDecoder(target, drafter, policy=policy).generate_batch(PROMPTS, max_new_tokens=NEW, **settings)


GREEDY_POLICIES = (
    *(Chain(1), Chain(3), ConfidenceChain(0.3, 3)),
    *(BestFirst(5, 3), SampledTree(3, 3)),
)


@pytest.mark.parametrize("policy", GREEDY_POLICIES, ids=str)
@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle3 of few tokens"])
def test_greedy_rounds_are_the_decoders_own(kind: str, policy: Policy, target: LlamaForCausalLM) -> None:
    drafter, greedy = make_drafter(kind, target), Sampling(0.0)
    if kind == "draft_model":
        drafter = EarlyExit(target, layers=3)
    outs = decoded(target, drafter, policy, greedy)
    texts = [target_text(target, out.prompt_tokens, out.tokens, NEW) for out in outs]
    if isinstance(policy, (BestFirst, SampledTree)):
        found = [of_rounds(t, r) for t, r in zip(texts, replay(target, drafter, policy, texts, greedy, 2), strict=True)]
    else:
        tables = agreement(target, drafter, texts, 3, acceptance_measure(Processors(greedy)))
        found = [
            accepted(policy, table, text, greedy, reach=drafter.max_draft_length)
            for table, text in zip(tables, texts, strict=True)
        ]
    assert [one.rounds for one in found] == [len(out.rounds) for out in outs]
    assert policy.longest <= 3
    if not isinstance(policy, ConfidenceChain):  # its chains in vain are as long as q says beside the text
        for one, out in zip(found, outs, strict=True):
            assert sum(nodes * w for (nodes, _), w in one.work.items()) == sum(r.drafted for r in out.rounds)
            assert one.tested_K.sum() == sum(r.tested for r in out.rounds)
            assert one.accepted_K.sum() == sum(r.accepted for r in out.rounds)
    assert any(one.rounds < one.tokens for one in found)


@pytest.mark.parametrize("kind", ["early-exit", "mtp"])
def test_replayed_trees_are_those_of_a_sampled_text_too(kind: str, target: LlamaForCausalLM) -> None:
    drafter, sampling, policy = make_drafter(kind, target), Sampling(0.7, top_k=8, top_p=0.95), BestFirst(5, 3)
    outs = decoded(target, drafter, policy, sampling)
    texts = [target_text(target, out.prompt_tokens, out.tokens, NEW) for out in outs]
    found = replay(target, drafter, policy, texts, sampling, 3)
    assert [len(rounds) for rounds in found] == [len(out.rounds) for out in outs]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("drafter", [PromptLookup(max_ngram=2), SuffixRetrieval(min_match=1)], ids=["lookup", "suffix"])
def test_copies_are_known_after_every_token(drafter: Drafter, temperature: float, target: LlamaForCausalLM) -> None:
    sampling = Sampling(temperature)
    out = SpeculativeDecoder(target, drafter).generate(
        [5, 6, 5, 6, 5, 6, 5], max_new_tokens=60, temperature=temperature
    )
    text = target_text(target, out.prompt_tokens, out.tokens, 60)
    found = accepted(None, {}, text, sampling, retrieved=retrieved(drafter, text))
    assert found.rounds == len(out.rounds)
    assert sum(nodes * w for (nodes, _), w in found.work.items()) == sum(r.drafted for r in out.rounds)


@pytest.mark.parametrize("shortest", [1, 9], ids=["", "matches without a copy"])
def test_a_hybrid_copies_or_drafts(shortest: int, target: LlamaForCausalLM) -> None:
    drafter = Hybrid(EarlyExit(target, layers=3), SuffixRetrieval(min_match=shortest), min_match=2)
    out = SpeculativeDecoder(target, drafter, policy=Chain(2)).generate([5, 6] * 4, max_new_tokens=60)
    text = target_text(target, out.prompt_tokens, out.tokens, 60)
    settings = ForecastSettings(
        target="t", drafters={}, prompts="p", max_draft_length=2, max_new_tokens=60, policies=("chain:draft_length=2",)
    )
    plans = dict(predict(target, drafter, [text], settings, Sampling(0.0)).by_policy)
    assert plans[str(Chain(2))][0].rounds == len(out.rounds) < text.anchors


def test_an_eos_ends_replayed_rounds() -> None:
    target = make_llama(3, num_hidden_layers=4, eos_token_id=None).double()
    (first, *_) = sample_texts(target, PROMPTS, Sampling(0.0), max_new_tokens=NEW)
    target.generation_config.eos_token_id = first.tokens[-3]
    drafter = EarlyExit(target, layers=3)
    outs = decoded(target, drafter, BestFirst(4, 3), Sampling(0.0))
    texts = [target_text(target, out.prompt_tokens, out.tokens, NEW) for out in outs]
    assert any(len(text.tokens) < text.max_length for text in texts)
    replayed = replay(target, drafter, BestFirst(4, 3), texts, Sampling(0.0), 3)
    assert [len(rounds) for rounds in replayed] == [len(out.rounds) for out in outs]


def test_encoder_decoder_pairs() -> None:
    target, drafter = make_t5(2).double(), DraftModel(make_t5(1).double())
    target.generation_config.eos_token_id = None
    outs = SpeculativeDecoder(target, drafter, draft_length=2).generate_batch(PROMPTS, max_new_tokens=NEW)
    texts = [target_text(target, out.prompt_tokens, out.tokens, NEW) for out in outs]
    tables = agreement(target, drafter, texts, 2, acceptance_measure(Processors(Sampling(0.0))))
    found = [accepted(Chain(2), *pair, Sampling(0.0)).rounds for pair in zip(tables, texts, strict=True)]
    assert found == [len(out.rounds) for out in outs]
    replayed = replay(target, drafter, BestFirst(4, 2), texts, Sampling(0.0), 3)
    trees = SpeculativeDecoder(target, drafter, policy=BestFirst(4, 2)).generate_batch(PROMPTS, max_new_tokens=NEW)
    assert [len(rounds) for rounds in replayed] == [len(out.rounds) for out in trees]


def test_tables_reach_as_deep_as_the_deepest_policy(target: LlamaForCausalLM) -> None:
    settings = ForecastSettings(
        target="t",
        drafters={},
        prompts="p",
        max_draft_length=2,
        policies=("chain:draft_length=5", "best-first:size=8,depth=4"),
    )
    drafter = EarlyExit(target, layers=3)
    assert max(policy.longest for policy in candidates(drafter, settings) if policy is not None) == 5
    (text,) = sample_texts(target, PROMPTS[:1], Sampling(0.0), max_new_tokens=NEW)
    predicted = predict(target, drafter, [text], settings, Sampling(0.0))
    (rounds,) = dict(predicted.by_policy)["chain:draft_length=5"]
    assert len(rounds.tested_K) == 5
    assert not predicted.refused


@pytest.mark.parametrize(("tokens", "fits"), [(118, True), (119, False), (126, False)])
def test_texts_without_room_for_a_round_are_not_timed(
    tokens: int, fits: bool, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are timed after half of a continuation; of prompts of 126 tokens it fills the context of 128."""
    monkeypatch.setattr("draftsmith.eval.forecast.hardware.LENGTHS", (1,))
    monkeypatch.setattr("draftsmith.eval.forecast.hardware.TURNS", 2)
    monkeypatch.setattr("draftsmith.eval.forecast.hardware.measure_costs", lambda *_, **__: Costs({1: 1.0}, {1: 0.1}))
    policies = {"max_draft_length": 1, "policies": ("chain:draft_length=1",)}
    settings = ForecastSettings(target="t", drafters={"d": "x"}, prompts="p", temperatures=(0.0,), **policies)
    drafters, long = {"d": EarlyExit(target, layers=3)}, [[7] * tokens] * 2
    drafters["d"].draft_length_hint = 1
    assert forecast(target, drafters, [*long, PROMPTS[0]], settings).rows[0]["texts"] == 3
    if fits:
        assert forecast(target, drafters, long, settings).rows[0]["speed"][0]["timings"] == 2
        return
    with pytest.raises(ConfigError, match=f"prompts={tokens} tokens or more; expected one of at most 118"):
        forecast(target, drafters, long, settings)


def test_a_forecast_speedup_above_tau_is_noted() -> None:
    """A round commits tau tokens and takes at least one pass; a batch may gain more, since its texts end apart."""
    best: BestPolicy = {"temperature": 0.0, "batch_size": 1, "drafter": "d", "policy": "chain:draft_length=2"}
    best |= {"speedup": 2.31, "speedup_interval": [2.0, 2.5], "tau": 2.2}
    said = "speedup 2.31 above tau 2.20: only noise explains that; measure again on a quiet machine."
    assert noisy([best]) == [f"d (chain:draft_length=2) at T=0: {said}"]
    assert noisy([{**best, "batch_size": 4}, {**best, "tau": 2.4}, {**best, "drafter": None}]) == []
