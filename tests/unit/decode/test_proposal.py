"""Drafts of different shapes are verified in few calls, with the result of each alone."""

import pytest
import torch
from exact.enumeration import drawn_draft
from exact.wrong_rules import Seeded

from draftsmith.decode.draws import seeded_draws
from draftsmith.decode.proposal import NO_DRAFT, Group, Proposal, p_of, read_outcomes, united
from draftsmith.decode.verification import RULES, verify_batch
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft, DraftBatch

VOCAB = 7
CPU = torch.device("cpu")
CHOSEN = [
    Draft.chain([1, 2, 3]),
    Draft.chain([4]),
    Draft((1, 2, 5, 6), (ROOT, ROOT, 0, 1)),
    Draft((3, 0, 4), (ROOT, 0, 0)),
]


def distributions(count: int) -> torch.Tensor:
    return (1.5 * torch.randn(count, VOCAB, dtype=torch.float64)).softmax(-1)


def drawn_chain(length: int, seed: int) -> Draft:
    return drawn_draft(range(-1, length - 1), lambda _: distributions(1)[0], Seeded(seed))


def drawn_tree(parents: tuple[int, ...], seed: int) -> Draft:
    """Return a tree whose siblings are not numbered one after the other: (ROOT, 0, ROOT) among others."""
    q = distributions(len(parents) + 1)
    return drawn_draft(parents, lambda parent: q[parent + 1], Seeded(seed))


def drawn_trees(seed: int) -> list[Draft]:
    shapes = [(ROOT, ROOT, 0), (ROOT, 0, ROOT, 1), (ROOT, ROOT, ROOT, 1, 1), (ROOT, 0, 0, ROOT, 3, 3)]
    return [drawn_tree(shape, seed + row) for row, shape in enumerate(shapes)]


def some_drafts(kind: str, seed: int) -> list[Draft]:
    chains = [*(drawn_chain(length, seed + length) for length in (3, 1, 4)), NO_DRAFT]
    return chains + (CHOSEN if kind == "chosen" else drawn_trees(seed))


@pytest.mark.parametrize(
    ("kind", "rule", "calls"),
    [
        ("chosen", None, 3),
        ("chosen", "point-mass", 3),
        ("chosen", "typical", 3),
        ("drawn", None, 3),
        ("drawn", "traversal", 3),
        ("drawn", "point-mass", 6),
    ],
)
def test_results_are_those_of_each_draft_alone(kind: str, rule: str | None, calls: int) -> None:
    """Drawn chains in one call, chosen drafts or drawn trees in another, and texts without a draft in a third one."""
    torch.manual_seed(0)
    chosen_rule, accepted = rule and RULES[rule], 0
    for trial in range(20):
        drafts = some_drafts(kind, 10 * trial)
        widest = 1 + max(map(len, drafts))
        p_BQV = distributions(len(drafts) * widest).unflatten(0, (len(drafts), widest))
        seeds, lengths = [100 * trial + row for row in range(len(drafts))], [5 + row for row in range(len(drafts))]
        proposal = Proposal(drafts)
        groups = proposal.groups(seeded_draws(seeds, lengths, CPU), CPU, chosen_rule)
        assert len(groups) == calls
        outcomes = [(group, verify_batch(chosen_rule, p_of(group, p_BQV), *group[1:])) for group in groups]
        results = read_outcomes(outcomes, proposal, None)
        for row, (draft, result) in enumerate(zip(drafts, results, strict=True)):
            group = ([0], DraftBatch.of([draft]), seeded_draws([seeds[row]], [lengths[row]], CPU))
            outcome = verify_batch(chosen_rule, p_BQV[row : row + 1, : len(draft) + 1], *group[1:])
            (expected,) = read_outcomes([(group, outcome)], Proposal([draft]), None)
            assert (result.path, result.next_token) == (expected.path, expected.next_token)
            assert result.overlap == pytest.approx(expected.overlap)
            accepted += result.accepted
    assert accepted > 20


def groups_of(drafts: list[Draft]) -> list[Group]:
    draws = seeded_draws(range(len(drafts)), [3] * len(drafts), CPU)
    return Proposal(drafts).groups(draws, CPU, None)


def test_trees_that_have_little_in_common_are_verified_apart() -> None:
    """Together they would need p and q of more than twice the nodes of the largest one."""
    wide, deep = tuple([ROOT] * 6), (ROOT, 0, 1, 2, 3, 4, 4)
    both = [wide, deep, (ROOT, 0, ROOT), deep]
    drafts = [drawn_tree(shape, row) for row, shape in enumerate(both * 3)]
    assert len(united([wide, deep])[0]) == len(wide) + len(deep) - 1 <= 2 * len(deep)
    assert len(groups_of(drafts)) == 1
    other = (ROOT, ROOT, 1, 1, 1, 1, 1)
    drafts += [drawn_tree(other, 40 + row) for row in range(3)]
    groups = groups_of(drafts)
    assert sorted(row for rows, _, _ in groups for row in rows) == list(range(len(drafts)))
    assert 1 < len(groups) < 4
    mingled = [drawn_tree(shape, row) for row, shape in enumerate([wide, deep, other] * 4)]
    parts = groups_of(mingled)
    assert len(parts) == 2, "equal shapes come together, wherever they stand"
    assert all(len(batch) <= 2 * max(len(drafts[row]) for row in rows) for rows, batch, _ in groups)


def test_the_smallest_shape_that_contains_others() -> None:
    parents, own = united([(ROOT, ROOT, 0), (ROOT, 0, ROOT, 1)])
    assert parents == (ROOT, ROOT, 0, 2)
    assert own == [[0, 1, 2, NO_NODE], [0, 2, 1, 3]]
