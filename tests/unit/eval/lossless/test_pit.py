"""The transform is uniform for every order, and its selections are the ones that leave it uniform."""

import itertools
from collections import defaultdict

import pytest
import torch
from conftest import make_llama
from drawn_tree import ChosenTree, DrawnTree
from exact.one_round import Round, Setting

from draftsmith.decode.policies import Chain, Policy
from draftsmith.decode.rules import RULES
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.decode.sequence import Round as RoundRecord
from draftsmith.eval.lossless.hypotheses import LEAST, chi_square
from draftsmith.eval.lossless.probabilities import DEPTH, SampledTarget, partition, transform
from draftsmith.eval.lossless.sampled_texts import pairs
from draftsmith.eval.prompts import Prompt

V = 6


@pytest.mark.parametrize("order", ["by p", "by another score", "with ties"])
def test_the_intervals_of_all_tokens_tile_the_unit_interval(order: str) -> None:
    """So u is uniform, exactly, when the token is drawn from p."""
    generator = torch.Generator().manual_seed(1)
    p_1V = torch.rand(1, V, generator=generator, dtype=torch.float64)
    p_1V[0, 2] = 0
    score_1V = {"by p": None, "by another score": torch.rand(1, V, generator=generator), "with ties": torch.ones(1, V)}
    tokens, p_VV = torch.arange(V), p_1V.expand(V, V)
    score = score_1V[order]
    score_VV = None if score is None else score.expand(V, V)
    low = transform(p_VV, tokens, torch.zeros(V), score_VV)
    high = transform(p_VV, tokens, torch.ones(V), score_VV)
    assert torch.allclose(high - low, p_1V[0] / p_1V.sum())
    places = sorted(zip(low.tolist(), high.tolist(), strict=True))
    assert places[0][0] == 0
    assert places[-1][1] == pytest.approx(1)
    assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(places))


def test_likely_tokens_come_first() -> None:
    p_1V = torch.tensor([[0.1, 0.7, 0.2]])
    assert transform(p_1V, torch.tensor([1]), torch.tensor([0.5])).item() == pytest.approx(0.35)
    score_1V = torch.tensor([[3.0, 1.0, 2.0]])
    assert transform(p_1V, torch.tensor([1]), torch.tensor([0.5]), score_1V).item() == pytest.approx(0.3 + 0.35)


def output(committed: list[int]) -> DecodeOutput:
    rounds = [RoundRecord(4, 4, count - 1, count, (), 0.0, 0.0, 0.0) for count in committed]
    return DecodeOutput([1], [0] * (1 + sum(committed)), rounds, 0.0, "length")


def test_pairs_by_hand() -> None:
    """Rounds of 2, 1, 1, 3 and 1 tokens after the prefill's: they start at 1, 3, 4, 5 and 8 of 9 tokens."""
    text, u_T = output([2, 1, 1, 3, 1]), torch.arange(9) / 10
    assert pairs(u_T, text).flatten().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def second_and_first(rule: str, policy: Policy) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Exactly: by first token the law of the second where the round reached it, and the law of accepted first ones."""
    pair = Round(Setting(), seed=7)
    second: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(5, dtype=torch.float64))
    first = torch.zeros(5, dtype=torch.float64)
    for weight, draft, verdict in pair.verified(RULES[rule], pair.drafts(policy)):
        kept = [draft.tokens[node] for node in verdict.path]
        if kept:
            second[kept[0]][[*kept, verdict.next_token][1]] += weight
            first[kept[0]] += weight
    return second, first


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        ("token", Chain(2)),
        ("block", Chain(2)),
        ("block", Chain(3)),
        ("point-mass", ChosenTree(((0,), (1,), (0, 0)))),
        ("token", DrawnTree(((0,), (1,), (0, 0)))),
        ("token", DrawnTree(((0,), (1,), (0, 0), (1, 0)))),
    ],
)
def test_the_place_in_a_round_is_a_fair_split_and_acceptance_is_not(rule: str, policy: Policy) -> None:
    pair = Round(Setting(), seed=7)
    second, first = second_and_first(rule, policy)
    assert len(second) >= 2
    for token, law in second.items():
        assert (law / law.sum() - pair.p_V((token,))).abs().max() < 1e-12
    assert (first / first.sum() - pair.p_V(())).abs().max() > 0.01


def toy_rows(strings: list[tuple[int, ...]]) -> torch.Tensor:
    """A target over `V` tokens whose p depends on all that stands before."""
    rows = []
    for string in strings:
        generator = torch.Generator().manual_seed(hash(string) % 2**62)
        rows.append((2 * torch.randn(V, dtype=torch.float64, generator=generator)).softmax(-1))
    return torch.stack(rows)


def test_end_tokens_are_one_and_nothing_follows_them() -> None:
    target, prompt, texts = make_llama(), Prompt("p", "x", [5, 9]), torch.tensor([[3, 2, 7]])
    plain, ending = (
        SampledTarget(target, Sampling(1.0), ends).p(prompt, texts)[0] for ends in (frozenset(), frozenset({2, 6}))
    )
    assert torch.allclose(ending[:2, 2], plain[:2, [2, 6]].sum(-1))
    assert torch.allclose(ending.sum(-1), torch.ones(3))
    assert ending[:, 6].tolist() == [0, 0, 0]
    assert ending[2].tolist() == [float(token == 2) for token in range(64)]


@pytest.mark.parametrize("count", [40, 300, 5000])
def test_cells_hold_every_string_and_its_probability(count: int) -> None:
    cells = partition(toy_rows, count)
    masses = torch.zeros_like(cells.probabilities_C)
    for place in range(V**DEPTH):
        string = tuple(place // V**level % V for level in range(DEPTH))
        mass = 1.0
        for level in range(DEPTH):
            mass *= float(toy_rows([string[:level]])[0, string[level]])
        masses[cells.cell(string)] += mass
    assert torch.allclose(masses, cells.probabilities_C)
    every = [tuple(place // V**level % V for level in range(DEPTH)) for place in range(V**DEPTH)]
    statistic, freedom, shift = cells.compared(every, toy_rows)
    assert (statistic > 0, freedom, shift) == (True, int((masses > 0).sum()) - 1, 0)
    used = masses[masses > 0] * count
    assert len(used) > 1
    assert used.min() >= LEAST - 1e-9


def test_chi_square_leaves_out_cells_that_expect_nothing() -> None:
    counts, expected = torch.tensor([0.0, 12.0, 8.0]), torch.tensor([0.0, 10.0, 10.0])
    assert chi_square(counts, expected) == (pytest.approx(0.8), 1)
