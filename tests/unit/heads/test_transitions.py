"""Logits of training and of the walk, from the same candidates and scores, in fp64."""

from typing import Any

import pytest
import torch
from conftest import make_llama

from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.lattice import LatticeOptions, LatticeReranker
from draftsmith.heads.layers import LayerConfig
from draftsmith.heads.transitions import Block, CandidateSelector, SelectorOptions

V, H, RANK, TOP, N = 12, 8, 3, 4, 6
LATTICE = LatticeOptions(TOP, lilicorr_hidden_size=8, lilicorr_num_heads=2, lilicorr_factor_dim=4)


def test_training_divides_among_candidates_what_the_states_give_them() -> None:
    """q of training is finite, gives other tokens what the unary logits do, and is the walk's among candidates."""
    torch.manual_seed(0)
    selector = CandidateSelector(V, V, H, SelectorOptions(RANK, TOP)).double()
    torch.nn.init.normal_(selector.successor_codebook)
    unary_NV, states_NH, before_N = torch.randn(N, V).double(), torch.randn(N, H).double(), torch.randint(V, (N,))
    values_NX, _ = selector.step(states_NH[:, :0], before_N, states_NH)
    walk_NV, trained_NV = (selector(unary_NV, values_NX, walks).softmax(-1) for walks in (True, False))
    plain_NV = unary_NV.softmax(-1)
    for n in range(N):
        kept = unary_NV[n].argsort(descending=True)[:TOP]
        context = selector.predecessor_codebook[before_N[n]] * (selector.hidden_projection.weight @ states_NH[n])
        scores = torch.stack([unary_NV[n, b] + selector.successor_codebook[b] @ context for b in kept])
        torch.testing.assert_close(walk_NV[n, kept], scores.softmax(-1))
        torch.testing.assert_close(trained_NV[n, kept], plain_NV[n, kept].sum() * scores.softmax(-1))
        others = [b for b in range(V) if b not in kept]
        torch.testing.assert_close(trained_NV[n, others], plain_NV[n, others])
        assert not walk_NV[n, others].any()


def test_the_states_that_give_a_lattice_its_candidates_are_trained_too() -> None:
    """The loss is forward KL of the logits of the walk and that of the logits without transitions."""
    target = make_llama(num_hidden_layers=4).double().requires_grad_(False)
    options: dict[str, Any] = {"lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 8, "lilicorr_num_heads": 2}
    options |= {"lilicorr_factor_dim": 4}
    torch.manual_seed(0)
    drafter = DFlash.from_target(target, block_size=4, **options).double()
    ids_BT = torch.randint(64, (2, 12))
    mask_BT = torch.ones_like(ids_BT).bool()
    signals = OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_BT, torch.ones_like(ids_BT), mask_BT))
    unrolled = drafter.unroll(signals)
    p_NV = target.lm_head(signals.hidden_BTH).flatten(0, 1).softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for k, entry in enumerate(unrolled):
        kept = entry.places_N >= 0
        states_nX, p_nV = entry.states_ND[kept], p_NV[entry.places_N[kept]]
        for logits_nV in (entry.head(states_nX), drafter.body.head(states_nX[:, :32])):
            expected = expected + 0.8**k * (p_nV * (p_nV.log() - logits_nV.log_softmax(-1))).sum()
    loss = Objective(position_decay=0.8)(unrolled, signals, target.lm_head).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert drafter.lilicorr is not None
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.lilicorr.layers.parameters())


def test_candidates_of_a_draft_vocabulary_are_known_by_their_tokens() -> None:
    """The scores after the third candidate are the same where tokens are other numbers than rows of the logits."""
    torch.manual_seed(0)
    lattice = LatticeReranker(H, 4, 1e-6, LATTICE).double()
    states_nKH, last_nH, table_VH = (torch.randn(*shape, H).double() for shape in ((N, 3), (N,), (V,)))
    log_probs_nKk, rows_nKk = torch.randn(N, 3, V).double().log_softmax(-1).topk(TOP)
    found: list[list[torch.Tensor]] = []
    for factor in (1, 2):
        block = Block(
            states_nKH,
            lambda: last_nH,
            lambda k: (log_probs_nKk, rows_nKk),
            lambda rows, factor=factor: rows * factor,
            lambda tokens, factor=factor: table_VH[tokens // factor],
        )
        carried, values = lattice.initial_state(block), []
        for k in range(3):
            before_n = factor * (rows_nKk[:, k - 1, 2] if k else torch.zeros(N).long())
            of_k_nX, carried = lattice.step(carried, before_n, states_nKH[:, k])
            values.append(of_k_nX)
        found.append(values)
    torch.testing.assert_close(*found)
    for k in range(1, 3):
        assert torch.equal(found[0][k][:, TOP:].long(), rows_nKk[:, k])
        assert not torch.isclose(found[0][k][:, :TOP], log_probs_nKk[:, k]).any()


def test_after_a_token_that_is_no_candidate_a_lattice_has_the_scores_of_the_logits() -> None:
    """Such tokens are drawn where q is that of the logits outside the candidates; the first position has one row."""
    torch.manual_seed(0)
    lattice = LatticeReranker(H, 4, 1e-6, LATTICE).double()
    states_nKH, last_nH, table_VH = (torch.randn(*shape, H).double() for shape in ((N, 3), (N,), (V,)))
    log_probs_nKk, rows_nKk = torch.randn(N, 3, V).double().log_softmax(-1).topk(TOP)
    block = Block(
        states_nKH, lambda: last_nH, lambda k: (log_probs_nKk, rows_nKk), lambda rows: rows, table_VH.__getitem__
    )
    others_nK = torch.tensor(
        [[next(v for v in range(V) if v not in row) for row in text] for text in rows_nKk.tolist()]
    )
    carried = lattice.initial_state(block)
    for k in range(3):
        of_k_nX, carried = lattice.step(carried, others_nK[:, k - 1], states_nKH[:, k])
        assert torch.equal(of_k_nX[:, TOP:].long(), rows_nKk[:, k])
        if k > 0:
            torch.testing.assert_close(of_k_nX[:, :TOP], log_probs_nKk[:, k])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector_rank": 2, "selector_top_k": V + 1}, f"selector_top_k={V + 1}; expected at most the {V} tokens"),
        ({"selector_rank": 2, "selector_top_k": 3, "markov_rank": 2}, "selector_rank=2; expected 0 with a markov_rank"),
        ({"lilicorr_candidate_topk": 2, "selector_rank": 2, "selector_top_k": 3}, "lilicorr_candidate_topk=2;"),
        ({"lilicorr_candidate_topk": V + 1}, f"lilicorr_candidate_topk={V + 1}; expected at most the {V} tokens"),
        ({"lilicorr_candidate_topk": 4, "draft_vocab_size": 3}, "lilicorr_candidate_topk=4; expected at most the 3"),
        ({"lilicorr_candidate_topk": 2, "lilicorr_num_heads": 3}, "lilicorr_num_heads=3; expected a divisor of"),
        ({"conv_kernel_size": 5}, "conv_kernel_size=5; expected at most the block size 4"),
        ({"conv_kernel_size": 2, "conv_group_size": 3}, f"conv_group_size=3; expected a divisor of the width {H}"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    body = LayerConfig(vocab_size=V, hidden_size=H, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(ConfigError, match=message):
        DFlash(body, layers=(1,), block_size=4, anchors=1, **options)
