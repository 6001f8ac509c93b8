"""Proof by enumeration that the decoder's output distribution is the target's; and that wrong rules are caught."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import make_llama
from exact.enumeration import (
    ToyDrafter,
    ToyModel,
    ToyTarget,
    decoder_distribution,
    outcomes,
    target_distribution,
    total_variation,
)

from draftsmith.decode import decoder as decoder_module
from draftsmith.decode.chance import Chance
from draftsmith.decode.decoder import Decoding
from draftsmith.decode.processors import Sampling
from draftsmith.decode.target import TransformersTarget
from draftsmith.decode.verify import Verdict, residual, verify_token_rule
from draftsmith.heads import DraftModel, Medusa
from draftsmith.heads.draft import Draft

VOCAB, PROMPT = 5, (0, 3)
EXACT = 1e-12  # fp64 sums over at most 3,125 texts; a wrong rule is off by 1e-5 at the very least
PLAIN = Sampling(temperature=1.0)
NO_EOS: frozenset[int] = frozenset()


def toy_gap(
    p: ToyModel, drafter: ToyDrafter, gamma: int, count: int, sampling: Sampling = PLAIN, eos: frozenset[int] = NO_EOS
) -> float:
    """Total variation between what the decoder writes and what the target alone would."""

    def make(chance: Chance) -> Decoding:
        return Decoding(ToyTarget(p), drafter, gamma, list(PROMPT), len(PROMPT) + count, sampling, chance, eos)

    def same_state(a: Decoding, b: Decoding) -> bool:
        return a._target.read == b._target.read

    actual = decoder_distribution(make, same_state)
    expected = target_distribution(p.logits, PROMPT, count, sampling, eos, VOCAB)
    assert sum(actual.values()) == pytest.approx(1, abs=EXACT)
    return total_variation(actual, expected)


SETTINGS: dict[str, Sampling] = {
    "greedy": Sampling(0.0),
    "T=1": PLAIN,
    "T=0.7 top-p": Sampling(0.7, top_p=0.8),
    "top-k": Sampling(1.3, top_k=3),
}
# name: (banned in p, banned in q)
SUPPORTS: dict[str, tuple[frozenset[int], frozenset[int]]] = {
    "full": (frozenset(), frozenset()),
    "truncated draft vocabulary": (frozenset(), frozenset({0, 4})),
    "zeros in p": (frozenset({1, 2}), frozenset()),
    "disjoint": (frozenset({0, 1}), frozenset({2, 3, 4})),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("setting", SETTINGS)
def test_token_rule_is_lossless_on_twenty_pairs(setting: str, seed: int) -> None:
    drafter = ToyDrafter(ToyModel(1000 + seed))
    assert toy_gap(ToyModel(seed), drafter, gamma=2, count=4, sampling=SETTINGS[setting]) < EXACT


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("setting", ["T=1", "T=0.7 top-p", "top-k"])
def test_longer_draft_is_lossless(setting: str, seed: int) -> None:
    drafter = ToyDrafter(ToyModel(1000 + seed))
    assert toy_gap(ToyModel(seed), drafter, gamma=3, count=5, sampling=SETTINGS[setting]) < EXACT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_support_is_lossless(setting: str, support: str, seed: int) -> None:
    banned_p, banned_q = SUPPORTS[support]
    drafter = ToyDrafter(ToyModel(1000 + seed, banned=banned_q))
    p = ToyModel(seed, banned=banned_p)
    assert toy_gap(p, drafter, gamma=2, count=4, sampling=SETTINGS[setting]) < EXACT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [2, 3])
def test_eos_in_mid_draft_ends_the_text(gamma: int, seed: int) -> None:
    drafter = ToyDrafter(ToyModel(1000 + seed))
    assert toy_gap(ToyModel(seed), drafter, gamma, count=gamma + 2, eos=frozenset({2})) < EXACT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["equal", "independent", "point_mass"])
def test_kinds_of_drafts_are_lossless(kind: str, seed: int) -> None:
    p = ToyModel(seed)
    drafter = ToyDrafter(
        p if kind == "equal" else ToyModel(1000 + seed),
        independent=kind == "independent",
        point_mass=kind == "point_mass",
    )
    assert toy_gap(p, drafter, gamma=2, count=4) < EXACT


def test_whole_runs_without_merging_agree_too() -> None:
    """The same proof without copies or merged states: every branch re-runs the decoder from the prompt."""
    p, drafter = ToyModel(5), ToyDrafter(ToyModel(1005))
    sampling = Sampling(1.0, top_k=2)

    def run(chance: Chance) -> tuple[int, ...]:
        decoding = Decoding(ToyTarget(p), drafter, 3, list(PROMPT), len(PROMPT) + 5, sampling, chance)
        decoding.prefill()
        while decoding.stopped_by is None:
            decoding.round()
        return tuple(decoding.tokens)

    actual: dict[tuple[int, ...], float] = {}
    for weight, text in outcomes(run):
        actual[text] = actual.get(text, 0.0) + weight
    assert total_variation(actual, target_distribution(p.logits, PROMPT, 5, sampling, NO_EOS, VOCAB)) < EXACT


# The real path: transformers models in fp64, their caches and roll-backs.

TINY = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 16, "eos_token_id": None, "pad_token_id": None}


def _caches_agree(a: Decoding, b: Decoding) -> bool:
    """The valid part of every cache is equal up to rounding: batch shapes differ between the two histories."""
    pairs = [(a._target._cache, b._target._cache)]
    if isinstance(a._drafter, DraftModel):
        pairs.append((a._drafter._cache, b._drafter._cache))
    for one, other in pairs:
        length = min(one.length, other.length)
        for x, y in zip(one.layers, other.layers, strict=True):
            if not torch.allclose(x.keys[:, :, :length], y.keys[:, :, :length], atol=1e-12):
                return False
    return a._target._cache.length == b._target._cache.length


@pytest.mark.parametrize("kind", ["draft_model", "medusa"])
@torch.inference_mode()
def test_transformers_models_are_lossless(kind: str) -> None:
    model = make_llama(3, **TINY, num_hidden_layers=1).double()
    if kind == "draft_model":
        drafter = DraftModel(make_llama(4, **TINY, num_hidden_layers=1).double())
    else:
        drafter = Medusa.from_target(model, num_heads=2).double()
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)) * 0.3)
    sampling = Sampling(0.8, top_k=3)

    def make(chance: Chance) -> Decoding:
        return Decoding(TransformersTarget(model), drafter, 2, list(PROMPT), len(PROMPT) + 4, sampling, chance)

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        return model(input_ids=torch.tensor([context])).logits[0, -1]

    actual = decoder_distribution(make, _caches_agree)
    expected = target_distribution(logits, PROMPT, 4, sampling, NO_EOS, VOCAB)
    # Looser than the toys': the cached and the uncached forward differ in the last bits of fp64.
    assert total_variation(actual, expected) < 1e-10


# Wrong rules, each of which the enumeration has to reject.

Rule = Callable[[torch.Tensor, Draft, Chance], Verdict]


def _always_residual_of_p(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """After a rejection draws from p instead of norm(max(p - q, 0))."""
    for i, token in enumerate(draft.tokens):
        if not chance.bernoulli(min(1.0, float(p_PV[i, token] / draft.q_NV[i, token]))):
            return Verdict(i, chance.categorical(p_PV[i]), ())
    return Verdict(len(draft), chance.categorical(p_PV[len(draft)]), ())


def _inverted_ratio(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Accepts with probability q/p."""
    for i, token in enumerate(draft.tokens):
        p, q = float(p_PV[i, token]), float(draft.q_NV[i, token])
        if p == 0 or not chance.bernoulli(min(1.0, q / p)):
            return Verdict(i, chance.categorical(residual(p_PV[i], draft.q_NV[i])), ())
    return Verdict(len(draft), chance.categorical(p_PV[len(draft)]), ())


def _off_by_one_p(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Compares each draft token with the distribution one position later."""
    shifted = torch.cat([p_PV[1:], p_PV[-1:]])
    return verify_token_rule(shifted, draft, chance)


def _bonus_from_previous_position(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Draws the bonus token from the p of the last draft token."""
    verdict = verify_token_rule(p_PV, draft, chance)
    if len(draft) and verdict.accepted == len(draft):
        return replace(verdict, next_token=chance.categorical(p_PV[len(draft) - 1]))
    return verdict


def _dropped_bonus(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Repeats the last draft token in place of the bonus."""
    verdict = verify_token_rule(p_PV, draft, chance)
    if len(draft) and verdict.accepted == len(draft):
        return replace(verdict, next_token=draft.tokens[-1])
    return verdict


def _reused_uniform(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Compares every draft token with one and the same uniform number."""
    ratios = [min(1.0, float(p_PV[i, t] / draft.q_NV[i, t])) for i, t in enumerate(draft.tokens)]
    # u falls between two of the sorted ratios: all ratios above it are accepted together.
    edges = sorted({0.0, 1.0, *ratios})
    widths = torch.tensor([high - low for low, high in pairwise(edges)], dtype=torch.float64)
    u = edges[chance.categorical(widths)]
    for i, ratio in enumerate(ratios):
        if u >= ratio:
            return Verdict(i, chance.categorical(residual(p_PV[i], draft.q_NV[i])), ())
    return Verdict(len(draft), chance.categorical(p_PV[len(draft)]), ())


def _q_before_temperature(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Uses another temperature for q in the ratio than the one that the tokens were drawn with."""
    if not len(draft):
        return verify_token_rule(p_PV, draft, chance)
    flatter = draft.q_NV.sqrt()
    return verify_token_rule(p_PV, replace(draft, q_NV=flatter / flatter.sum(-1, keepdim=True)), chance)


def _greedy_acceptance(p_PV: torch.Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Accepts whatever the target finds likelier than one in five."""
    for i, token in enumerate(draft.tokens):
        if p_PV[i, token] < 0.2:
            return Verdict(i, chance.categorical(residual(p_PV[i], draft.q_NV[i])), ())
    return Verdict(len(draft), chance.categorical(p_PV[len(draft)]), ())


MUTANTS: list[Rule] = [
    _always_residual_of_p,
    _inverted_ratio,
    _off_by_one_p,
    _bonus_from_previous_position,
    _dropped_bonus,
    _reused_uniform,
    _q_before_temperature,
    _greedy_acceptance,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda rule: rule.__name__.strip("_"))
def test_a_wrong_rule_is_rejected(mutant: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "verify_token_rule", mutant)
    assert toy_gap(ToyModel(7), ToyDrafter(ToyModel(1007)), gamma=2, count=4) > 1e-4


def test_deterministic_tokens_with_a_softmax_q_are_rejected() -> None:
    class Argmax(ToyDrafter):
        def propose(self, context: Decoding, draft_length: int) -> Draft:
            draft = ToyDrafter(self.model, point_mass=True).propose(context, draft_length)
            texts = [tuple(context.tokens) + draft.tokens[:k] for k in range(draft_length)]
            q_NV = torch.stack([self.model.logits(text) for text in texts]).softmax(-1)
            return replace(draft, q_NV=q_NV)

    assert toy_gap(ToyModel(7), Argmax(ToyModel(1007)), gamma=2, count=4) > 1e-4
