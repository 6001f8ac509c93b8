"""Drafts of all shapes and kinds are verified as one batch, with the result of each alone."""

import pytest
import torch
from exact.enumeration import drawn_draft
from exact.wrong_rules import Seeded

from draftsmith.decode.drafts.batch import NO_DRAFT, DraftBatch
from draftsmith.decode.draws import seeded_draws
from draftsmith.decode.verification import verify
from draftsmith.heads.draft_tree import ROOT, Draft

VOCAB = 7
CPU = torch.device("cpu")


def distributions(count: int) -> torch.Tensor:
    return (1.5 * torch.randn(count, VOCAB, dtype=torch.float64)).softmax(-1)


def drawn_tree(parents: tuple[int, ...], seed: int) -> Draft:
    """Return a tree whose siblings are not numbered one after the other: (ROOT, 0, ROOT) among others."""
    q = distributions(len(parents) + 1)
    return drawn_draft(parents, lambda parent: q[parent + 1], Seeded(seed))


def drawn_trees(seed: int) -> list[Draft]:
    shapes = [(ROOT, ROOT, 0), (ROOT, 0, ROOT, 1), (ROOT, ROOT, ROOT, 1, 1), (ROOT, 0, 0, ROOT, 3, 3)]
    return [drawn_tree(shape, seed + row) for row, shape in enumerate(shapes)]


def test_the_paths_of_all_nodes() -> None:
    drafts = [Draft.chain([1, 2, 3]), NO_DRAFT, Draft((1, 2, 5, 6), (ROOT, ROOT, 0, 2))]
    batch = DraftBatch.of(drafts)
    path_BPD = batch.paths(torch.arange(-1, 4).expand(3, -1))
    assert batch.depth == 3
    for row, draft in enumerate(drafts):
        for node in range(-1, len(draft)):
            path = [step for step in path_BPD[row, node + 1].tolist() if step >= 0]
            assert path == draft.path(node)


@pytest.mark.parametrize("shapes", ["one", "several"])
def test_a_rule_changes_neither_p_nor_q(shapes: str) -> None:
    torch.manual_seed(1)
    drafts = drawn_trees(5) if shapes == "several" else [drawn_tree((ROOT, ROOT, 0, 0), seed) for seed in (3, 8)]
    p_BPV = distributions(len(drafts) * 7).unflatten(0, (len(drafts), 7))[:, : 1 + max(map(len, drafts))]
    batch, draws = DraftBatch.of(drafts), seeded_draws(range(len(drafts)), [4] * len(drafts), CPU)
    before = p_BPV.clone(), batch.q_BNV.clone()
    outcomes = [verify(None, p_BPV, batch, draws).packed() for _ in range(2)]
    assert torch.equal(p_BPV, before[0])
    assert torch.equal(batch.q_BNV, before[1])
    assert torch.equal(outcomes[0].nan_to_num(9.0), outcomes[1].nan_to_num(9.0))
