"""The texts of the whole decoder, over several rounds, have the target's distribution: every outcome is enumerated."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar

import pytest
import torch
from conftest import make_llama, spread
from drawn_tree import ChosenTree, DrawnTree, widths_shape
from exact.enumeration import (
    BranchingRng,
    Tokens,
    add,
    draws_of,
    merged_runs,
    outcomes,
    string_distribution,
    total_variation,
    whole_runs,
    whole_runs_together,
)
from exact.one_round import DRAFTER_SEEDS, EXACT, PLAIN
from exact.toys import VOCAB, ToyDrafter, ToyModel, ToyTarget
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from draftsmith.decode.cache.committed import contexts_of
from draftsmith.decode.cache.rollback import RollbackLayer
from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.draws import NOT_DRAWN
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import AdaptiveChain, BestFirst, Chain, ConfidenceChain, Policy, SampledTree, experience
from draftsmith.decode.rules import RULES
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Stops
from draftsmith.decode.target import TransformersTarget
from draftsmith.errors import DraftsmithError
from draftsmith.heads import HEADS, DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_tree import ROOT, Draft

PROMPT, OTHER_PROMPT = (0, 3), (1, 4, 2)
PAIRS = 3
TOGETHER = 1024
"""Most texts in one batch, each with other outcomes of its draws."""
GREEDY, TOP_2, TOP_3 = Sampling(0.0), Sampling(1.0, top_k=2), Sampling(1.3, top_k=3)
NO_EOS: frozenset[int] = frozenset()

Logits = Callable[[Tokens], Tensor]


def text_of(prompt: Tokens, count: int, eos: frozenset[int] = NO_EOS) -> DecodeSequence:
    return DecodeSequence(list(prompt), len(prompt) + count, stops=Stops(eos))


def target_alone(
    logits: Logits, prompt: Tokens, count: int, processors: Processors, eos: frozenset[int] = NO_EOS
) -> dict[tuple[Tokens], float]:
    """Return the probability of every text of the target alone, as a batch of one."""

    def p(new: Tokens) -> list[float]:
        logits_1V, before = logits(prompt + new)[None], contexts_of([[*prompt, *new]], torch.device("cpu"))
        if processors.greedy:
            best = int(processors.scores(logits_1V, lambda: before).argmax())
            return [float(token == best) for token in range(VOCAB)]
        return processors.scores(logits_1V, lambda: before).softmax(-1)[0].tolist()

    return {(prompt + new,): weight for new, weight in string_distribution(p, count, eos)}


def toy_gap(
    seed: int,
    policy: Policy,
    rule: str | None,
    count: int,
    sampling: Sampling = TOP_3,
    eos: frozenset[int] = NO_EOS,
    extra: tuple[LogitsProcessor, ...] = (),
    kind: type[ToyDrafter] = ToyDrafter,
) -> float:
    """Return the total variation between the texts of the decoder and those of the target alone.

    Texts of the first pair are decoded alone, those of the others together.
    """
    p, drafter = ToyModel(seed), kind(ToyModel(DRAFTER_SEEDS + seed))
    processors = Processors(sampling, extra)

    def make(rows: int) -> DecodeLoop:
        texts = [text_of(PROMPT, count, eos) for _ in range(rows)]
        return DecodeLoop(ToyTarget(p), drafter, policy, texts, processors, rule and RULES[rule])

    actual = merged_runs(make, lambda loop, row: loop._target.read[row], operator.eq, 1 if seed == 0 else TOGETHER)
    assert sum(actual.values()) == pytest.approx(1, abs=EXACT)
    return total_variation(actual, target_alone(p.logits, PROMPT, count, processors, eos))


BRANCHED = ((0,), (1,), (0, 0))
DRAWN_TREES = (DrawnTree(BRANCHED), SampledTree(width=2, depth=2))
CHOSEN_TREES = (ChosenTree(BRANCHED), BestFirst(size=3, depth=2))
CASES = [
    *product(["token", "block"], [Chain(2), ConfidenceChain(0.5, 2)]),
    *product(["token"], DRAWN_TREES),
    *product(["point-mass"], [Chain(2), *CHOSEN_TREES]),
    *product([None], [Chain(2), *DRAWN_TREES, *CHOSEN_TREES]),
]


@pytest.mark.parametrize(("rule", "policy"), CASES, ids=str)
def test_several_rounds_are_lossless(rule: str | None, policy: Policy) -> None:
    """Four tokens after the first need at least two rounds. Without a rule, each draft gets the best one."""
    for seed in range(PAIRS):
        assert toy_gap(seed, policy, rule, count=5, sampling=TOP_2) < EXACT, f"pair {seed}"
    for seed in range(1, PAIRS):
        assert toy_gap(seed, policy, rule, count=4) < EXACT, f"pair {seed}"


@pytest.mark.parametrize("policy", [Chain(2), CHOSEN_TREES[0]], ids=str)
def test_a_lossy_rule_is_noticed(policy: Policy) -> None:
    """As a control: the error of typical acceptance is more than a tenth on each of these pairs."""
    for seed in range(PAIRS):
        assert toy_gap(seed, policy, "typical", count=4) > 0.1, f"pair {seed}"


@pytest.mark.parametrize("policy", [Chain(2), *DRAWN_TREES, *CHOSEN_TREES], ids=str)
def test_greedy_text_is_the_targets(policy: Policy) -> None:
    for seed in range(20):
        assert toy_gap(seed, policy, None, count=8, sampling=GREEDY) == 0, f"pair {seed}"


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0], CHOSEN_TREES[0]], ids=str)
def test_any_of_several_eos_in_mid_draft_ends_the_text(policy: Policy) -> None:
    for seed in range(PAIRS):
        assert toy_gap(seed, policy, None, count=4, eos=frozenset({0, 1})) < EXACT, f"pair {seed}"


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0], CHOSEN_TREES[0]], ids=str)
def test_processors_that_read_the_text_are_lossless(policy: Policy) -> None:
    extra = (RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2))
    for seed in range(PAIRS):
        assert toy_gap(seed, policy, None, count=4, extra=extra) < EXACT, f"pair {seed}"


FORBIDDEN, END = 1, 2


class Grammar(LogitsProcessor):
    """Allows one token never, none after it, and after the end none or those of the logits, by the sign of a logit.

    So a draft has places where p is empty, where q is, and where both are.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            new = text[len(PROMPT) :]
            if FORBIDDEN in new or (END in new and scores[row, 0] < 0):
                scores[row] = -torch.inf
        scores[:, FORBIDDEN] = -torch.inf
        return scores


def allowed(_: int, text: Tensor) -> list[int]:
    """Return the tokens that a grammar without dead ends before the end allows; none in all others."""
    new = text[len(PROMPT) :].tolist()
    return [] if FORBIDDEN in new or END in new else [token for token in range(VOCAB) if token != FORBIDDEN]


GRAMMARS = {"processor": Grammar(), "prefix function": PrefixConstrainedLogitsProcessor(allowed, num_beams=1)}


class Retrieves(ToyDrafter):
    """Retrieves drafts with the forbidden token and the end before other tokens, after every other text."""

    def retrieve(self, row: int, room: int) -> Draft | None:
        odd = len(self.context.sequences[row].tokens) % 2 == 1
        return Draft((4, FORBIDDEN, END, END, 3, 0), (ROOT, ROOT, ROOT, 0, 1, 2)) if odd and room >= 2 else None


@pytest.mark.parametrize(
    ("case", "setting"),
    spread([*CASES, (None, ChosenTree(widths_shape((3, 1))))], product([TOP_2, GREEDY], GRAMMARS)),
    ids=str,
)
def test_places_without_an_allowed_token_change_nothing(
    case: tuple[str | None, Policy], setting: tuple[Sampling, str]
) -> None:
    """Only drafts have them: no text goes on after its end, and none has the forbidden token."""
    (rule, policy), (sampling, grammar) = case, setting
    for seed in range(PAIRS):
        for kind in (ToyDrafter, Retrieves) if rule in (None, "point-mass") else (ToyDrafter,):
            gap = toy_gap(seed, policy, rule, 4, sampling, frozenset({END}), (GRAMMARS[grammar],), kind)
            assert gap < EXACT, f"pair {seed}, {kind.__name__}"


@pytest.mark.parametrize(("rule", "policy"), CASES, ids=str)
def test_a_text_that_needs_a_token_and_has_none_is_an_error(rule: str | None, policy: Policy) -> None:
    """The end ends no text here: those after which nothing is allowed raise with the probability that p gives them."""
    processors = Processors(TOP_2, (Grammar(),))
    model, drafter = ToyModel(0), ToyDrafter(ToyModel(DRAFTER_SEEDS))

    def decoded(rng: BranchingRng) -> Tokens:
        text = text_of(PROMPT, 4)
        loop = DecodeLoop(ToyTarget(model), drafter, policy, [text], processors, rule and RULES[rule])
        loop.draws_of = draws_of([rng])
        try:
            loop.prefill()
            while loop.sequences:
                loop.round()
        except DraftsmithError:
            return (*text.tokens, NOT_DRAWN)
        return tuple(text.tokens)

    def p(new: Tokens) -> list[float]:
        before = contexts_of([[*PROMPT, *new]], torch.device("cpu"))
        scores_1V = processors.scores(model.logits(PROMPT + new)[None], lambda: before)
        dead = bool(scores_1V.isneginf().all())
        return [0.0] * VOCAB + [1.0] if dead else scores_1V.softmax(-1)[0].tolist()

    actual: dict[Tokens, float] = {}
    for weight, tokens in outcomes(decoded):
        add(actual, tokens, weight)
    expected = {
        PROMPT + tuple(NOT_DRAWN if token == VOCAB else token for token in new): weight
        for new, weight in string_distribution(p, 4, frozenset({VOCAB}))
    }
    assert any(tokens[-1] == NOT_DRAWN for tokens in expected)
    assert total_variation(actual, expected) < EXACT


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("policy", [Chain(6), ChosenTree(widths_shape([2, 1, 1])), SampledTree(2, 6)], ids=str)
def test_drafts_longer_than_the_text_that_is_left(policy: Policy, count: int) -> None:
    for seed in range(PAIRS):
        assert toy_gap(seed, policy, None, count, sampling=PLAIN) < EXACT, f"pair {seed}"


STEEP, SHALLOW = Costs({1: 1.0, 8: 4.5}, {1: 0.1}), Costs({1: 1.0, 8: 1.35}, {1: 0.1})
STEEPER = Costs({1: 1.0, 8: 6.6}, {1: 0.2})


class Adaptive(AdaptiveChain):
    """Notes what it drafts."""

    lengths: ClassVar[set[int]] = set()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        self.lengths.add(len(draft))
        super().observe(builder, draft, result)


class Copies(ToyDrafter):
    """Retrieves a chain after every other text."""

    def retrieve(self, row: int, room: int) -> Draft | None:
        odd = len(self.context.sequences[row].tokens) % 2 == 1
        return Draft.chain([4, 2, 0][:room]) if odd else None


@pytest.mark.parametrize(
    ("policy", "kind"), [*product([Adaptive(STEEP, 3), Adaptive(STEEPER, 3)], [ToyDrafter, Copies])], ids=str
)
@pytest.mark.parametrize("eos", [NO_EOS, frozenset({2})], ids=["no EOS", "EOS"])
def test_policies_that_learn_are_lossless(
    policy: Policy, eos: frozenset[int], kind: type[ToyDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their drafts depend on every earlier round, so no histories are merged; those of the first pair are alone.

    Adaptive chains are empty where no draft pays, before and after the drafter was asked, and are tried again soon.
    """
    monkeypatch.setattr(experience, "PATIENCE", 1)
    policy = replace(policy, experience={})
    Adaptive.lengths.clear()
    processors = Processors(TOP_2)
    for seed in range(PAIRS):
        p, drafter = ToyModel(seed), kind(ToyModel(DRAFTER_SEEDS + seed))

        def make(rows: int, p: ToyModel = p, drafter: ToyDrafter = drafter) -> DecodeLoop:
            return DecodeLoop(ToyTarget(p), drafter, policy, [text_of(PROMPT, 5, eos) for _ in range(rows)], processors)

        actual = whole_runs_together(make, 1 if seed == 0 else TOGETHER)
        assert total_variation(actual, target_alone(p.logits, PROMPT, 5, processors, eos)) < EXACT, f"pair {seed}"
    if isinstance(policy, Adaptive):
        assert {0, 1} <= Adaptive.lengths


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0], CHOSEN_TREES[0], AdaptiveChain(SHALLOW, 2)], ids=str)
def test_texts_of_a_batch_are_lossless_and_independent(policy: Policy) -> None:
    """The joint distribution is a product of the target's, although texts share passes and end in different rounds."""
    p, drafter, processors = ToyModel(5), ToyDrafter(ToyModel(DRAFTER_SEEDS + 5)), Processors(TOP_2)
    sizes = ((PROMPT, 3), (OTHER_PROMPT, 3))

    def make() -> DecodeLoop:
        return DecodeLoop(ToyTarget(p), drafter, policy, [text_of(*size) for size in sizes], processors)

    one, other = (target_alone(p.logits, prompt, count, processors) for prompt, count in sizes)
    expected = {a + b: one[a] * other[b] for a, b in product(one, other)}
    assert total_variation(whole_runs(make), expected) < EXACT


# transformers models in fp64, with their caches and rollbacks.

TINY = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 16, "eos_token_id": None, "pad_token_id": None}
ROUNDING = 1e-12
"""Between two histories of one text: batch shapes differ, and with them the last bits of fp64."""
EXACT_ENOUGH = 1e-10
"""Looser than the toys': the cached and the uncached forward pass differ in the last bits of fp64."""


@dataclass
class Memory:
    """Cache entries of the target and of the drafter, and queued features, of a text of `length` tokens."""

    length: int
    target: list[Tensor]
    drafter: list[list[Tensor]]
    features_nF: Tensor | None


def _memory_of(loop: DecodeLoop, row: int) -> Memory:
    """Return copies: decoders share one drafter, whose cache the next history replaces."""
    features = loop._features
    held = None if features.values_BSF is None else features.values_BSF[row, : features.counts[row]].clone()
    drafter = [_entries(runner, row) for runner in _runners(loop._drafter)]
    return Memory(len(loop.sequences[row].tokens), _entries(loop._target._runner, row), drafter, held)


def _entries(runner: ModelRunner, row: int) -> list[Tensor]:
    """Return keys and values [H, length, D] of the committed tokens; later slots hold discarded drafts."""
    layers, length = runner.passes.cache.layers, runner.lengths[row]
    return [x[row, :, :length].clone() for layer in layers for x in (layer.keys, layer.values)]


def _memories_agree(a: Memory, b: Memory) -> bool:
    """Return whether the texts have equal entries of the tokens that both have read."""
    if any(x_HLD.shape[1] != memory.length - 1 for memory in (a, b) for x_HLD in memory.target):
        return False
    # A drafter may or may not have read the tokens that it drafted in the last round and that were accepted, and the
    # first token after the prompt.
    if any(x_HLD.shape[1] > a.length for own in (*a.drafter, *b.drafter) for x_HLD in own):
        return False
    if a.features_nF is not None and b.features_nF is not None:  # nor taken their features, which are the last ones
        common = min(len(a.features_nF), len(b.features_nF))
        ends = [features_nF[len(features_nF) - common :] for features_nF in (a.features_nF, b.features_nF)]
        if not torch.allclose(*ends, rtol=0, atol=ROUNDING):
            return False
    pairs = [(a.target, b.target), *zip(a.drafter, b.drafter, strict=True)]
    return all(_start_alike(x, y) for one, other in pairs for x, y in zip(one, other, strict=True))


def _start_alike(x_HLD: Tensor, y_HLD: Tensor) -> bool:
    """Return whether the entries of the tokens that both have are equal."""
    common = min(x_HLD.shape[1], y_HLD.shape[1])
    return torch.allclose(x_HLD[:, :common], y_HLD[:, :common], rtol=0, atol=ROUNDING)


def _runners(drafter: Drafter) -> list[ModelRunner]:
    """Return the drafter's runners, whatever the names of its attributes."""
    return [value for value in vars(drafter).values() if isinstance(value, ModelRunner)]


LATTICE: dict[str, object] = {"block_size": 3, "lilicorr_candidate_topk": 2, "lilicorr_hidden_size": 0}
LATTICE |= {"lilicorr_num_heads": 2, "lilicorr_factor_dim": 4}
HEADS_OF_TARGETS: dict[str, dict[str, object]] = {
    "medusa": {"num_heads": 2},
    "medusa of 3 tokens": {"num_heads": 2, "draft_vocabulary": [0, 2, 4]},
    "eagle": {},
    "eagle of 3 tokens": {"draft_vocabulary": [1, 3, 4]},
    "hass": {},
    "hass of 3 tokens": {"draft_vocabulary": [0, 1, 2]},
    "eagle3": {},
    "eagle3 of 3 tokens": {"draft_vocabulary": [1, 2, 4]},
    "mtp": {},
    "mtp of 3 tokens": {"draft_vocabulary": [0, 2, 4]},
    "mtp of two modules": {"num_modules": 2},
    "peagle": {"num_tokens": 2},
    "dflash": {"block_size": 3},
    "dflash with Markov bias and confidence": {"block_size": 3, "markov_rank": 2, "confidence_head": True},
    "dflash with a gated Markov bias": {"block_size": 3, "markov_rank": 2, "markov_type": "gated"},
    "dflash with a recurrent Markov bias": {"block_size": 3, "markov_rank": 2, "markov_type": "rnn"},
    "dflash with a lattice": LATTICE,
    "dflash with a lattice of 3 tokens": {"draft_vocabulary": [0, 2, 4], **LATTICE},
    "dflash 2": {"block_size": 3, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 2, "selector_top_k": 3},
}


@torch.inference_mode()
def _drafter(kind: str, target: nn.Module) -> Drafter:
    """Return a drafter with random weights that make q far from flat, from p, and from q at initialisation."""
    if kind == "draft_model":
        return DraftModel(make_llama(4, **TINY).double())
    torch.manual_seed(6)
    drafter = HEADS[kind.split()[0]].from_target(target, **HEADS_OF_TARGETS[kind]).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


PROCESSORS = Processors(Sampling(0.8, top_k=3))


def _llama(layers: int) -> LlamaForCausalLM:
    return make_llama(3, **TINY, num_hidden_layers=layers).double()


@cache
def _llama_alone(layers: int) -> dict[tuple[Tokens], float]:
    return _alone(_llama(layers))


@torch.inference_mode()
def _alone(target: nn.Module) -> dict[tuple[Tokens], float]:
    """Return the probability of every text of the target alone, from passes without a cache."""

    def logits(text: Tokens) -> Tensor:
        return target(input_ids=torch.tensor([text])).logits[0, -1]

    return target_alone(logits, PROMPT, 4, PROCESSORS)


def _llama_gap(kind: str, policy: Policy, at_once: int) -> float:
    layers = 4 if kind.split()[0] in ("eagle3", "peagle", "dflash") else 1
    target = _llama(layers)
    return total_variation(_decoded(target, _drafter(kind, target), policy, at_once), _llama_alone(layers))


@torch.inference_mode()
def _decoded(target: nn.Module, drafter: Drafter, policy: Policy, at_once: int = 1) -> dict[tuple[Tokens], float]:
    """Return the probability of every text of the decoder."""

    def make(rows: int) -> DecodeLoop:
        texts = [text_of(PROMPT, 4) for _ in range(rows)]
        return DecodeLoop(TransformersTarget(target), drafter, policy, texts, PROCESSORS)

    return merged_runs(make, _memory_of, _memories_agree, at_once)


OF_MODELS = [Chain(2), CHOSEN_TREES[1], ConfidenceChain(0.4, 2), *DRAWN_TREES]
ALONE = (("draft_model", OF_MODELS[0]), ("medusa", OF_MODELS[1]), ("mtp of 3 tokens", OF_MODELS[1]))
"""Drafters whose texts are decoded alone in `make test`; rows of a batch are those of all drafters."""


@pytest.mark.parametrize(("kind", "policy"), spread(["draft_model", *HEADS_OF_TARGETS], OF_MODELS), ids=str)
def test_transformers_models_are_lossless(kind: str, policy: Policy) -> None:
    """All histories are rows of one batch; their drafts and accepted paths differ."""
    assert _llama_gap(kind, policy, at_once=TOGETHER) < EXACT_ENOUGH


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        case if case in ALONE else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(["draft_model", *HEADS_OF_TARGETS], OF_MODELS)
    ],
    ids=str,
)
def test_a_text_alone_is_lossless(kind: str, policy: Policy) -> None:
    """A single text has no padding, and a chain needs no mask."""
    assert _llama_gap(kind, policy, at_once=1) < EXACT_ENOUGH


@pytest.mark.parametrize("policy", [Chain(2), DRAWN_TREES[0]], ids=str)
def test_a_soft_capped_target_and_a_draft_model_of_its_layers(policy: Policy) -> None:
    """Gemma 2 supports eager attention only; caps this low change most probabilities."""
    sizes = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 2}
    caps = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 4}
    torch.manual_seed(3)
    target = Gemma2ForCausalLM(Gemma2Config(**sizes, **caps, sliding_window=4, initializer_range=0.5)).double().eval()
    drafter = DraftModel.from_target(target, init="target_layers").double().eval()
    stored = DraftModel.from_config(drafter.model.config.to_dict())
    assert [made.model.config._attn_implementation for made in (drafter, stored)] == ["eager", "eager"]
    assert total_variation(_decoded(target, drafter, policy, TOGETHER), _alone(target)) < EXACT_ENOUGH


@pytest.mark.parametrize(("at_once", "kind"), [(1, "draft_model"), (TOGETHER, "medusa")])
def test_a_cache_that_loses_the_accepted_path_is_noticed(
    kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a control of the merging above: accepted nodes of a tree stay in the slots where they were read."""
    monkeypatch.setattr(RollbackLayer, "move", lambda *_: None)
    with pytest.raises(AssertionError, match="depends on more than the tokens"):
        _llama_gap(kind, DRAWN_TREES[0], at_once)
