"""Drafts of different shapes are verified in few calls, with the result of each alone."""

import pytest
import torch

from draftsmith.decode.draws import draws_of
from draftsmith.decode.proposal import NO_DRAFT, Proposal, read_outcomes
from draftsmith.decode.sampling import SeededRng
from draftsmith.decode.verification import RULES, takes_mixed, verify_batch
from draftsmith.heads.draft_tree import ROOT, Draft, DraftBatch, Drawing

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
    drawing = Drawing(SeededRng(seed).categorical)
    for node in range(length):
        drawing.add(node - 1, distributions(1)[0])
    return drawing.draft()


@pytest.mark.parametrize(
    ("rule", "calls"), [(None, 3), ("point-mass", 3), ("typical", 6)], ids=["best", "point-mass", "typical"]
)
def test_results_are_those_of_each_draft_alone(rule: str | None, calls: int) -> None:
    """Drawn chains in one call, chosen drafts in another, and texts without a draft in a third one."""
    torch.manual_seed(0)
    chosen_rule, accepted = rule and RULES[rule], 0
    for trial in range(20):
        drafts = [*(drawn_chain(length, 10 * trial + length) for length in (3, 1, 4)), NO_DRAFT, *CHOSEN]
        widest = 1 + max(map(len, drafts))
        p_BQV = distributions(len(drafts) * widest).unflatten(0, (len(drafts), widest))
        together, alone = ([SeededRng(100 * trial + row) for row in range(len(drafts))] for _ in range(2))
        proposal = Proposal(drafts)
        groups = proposal.groups(together, CPU, mixed=takes_mixed(chosen_rule))
        assert len(groups) == calls
        outcomes = [
            (group, verify_batch(chosen_rule, p_BQV[group[0], : len(group[1]) + 1], group[1], group[2]))
            for group in groups
        ]
        results, _ = read_outcomes(outcomes, proposal, together, None)
        for row, (draft, result) in enumerate(zip(drafts, results, strict=True)):
            batch = DraftBatch.of([draft])
            group = ([0], batch, draws_of([alone[row]], 2 * len(draft) + 2, CPU))
            outcome = verify_batch(chosen_rule, p_BQV[row : row + 1, : len(draft) + 1], batch, group[2])
            ((expected,), _) = read_outcomes([(group, outcome)], Proposal([draft]), [alone[row]], None)
            assert (result.path, result.next_token) == (expected.path, expected.next_token)
            assert result.overlap == pytest.approx(expected.overlap)
            assert torch.equal(together[row].block(9), alone[row].block(9)), "the same numbers were drawn"
            accepted += result.accepted
    assert accepted > 20
