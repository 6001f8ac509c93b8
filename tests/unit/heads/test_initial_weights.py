"""Untrained drafters predict no worse than a constant distribution, whatever the sizes of the target's states."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from conftest import make_llama, spread
from torch import Tensor
from transformers import LlamaForCausalLM
from unit.heads.test_families import FAMILIES

from draftsmith import SpeculativeDecoder
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.heads import HEADS
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.initial_weights import Regression, best_state, copied_share, fit_start, frequencies, typical_sizes

STARTED = {
    **{
        name: FAMILIES[name]
        for name in (
            *("medusa", "medusa, 32 tokens", "eagle", "hass", "eagle3"),
            *("eagle3, 32 tokens", "eagle3.1", "mtp", "mtp of 3 modules", "peagle", "dflash", "dflash, 32 tokens"),
        )
    },
    "peagle, masks before fc": ("peagle", {"num_tokens": 3, "mask_before_fc": True}),
    "dspark": ("dflash", {"block_size": 4, "markov_rank": 3}),
}


@torch.no_grad()
def plain() -> LlamaForCausalLM:
    """A target whose states have a constant part, as those of published models; its tokens differ in frequency."""
    target = make_llama(num_hidden_layers=6)
    target.model.embed_tokens.weight[:, 3] += 2
    target.lm_head.weight.mul_(3)
    return target


@torch.no_grad()
def large_gain() -> LlamaForCausalLM:
    """Like Gemma 3: large gains, one much larger than the others."""
    target = plain()
    target.model.norm.weight.mul_(5)
    target.model.norm.weight[7] = 40
    return target


@torch.no_grad()
def tiny_lm_head() -> LlamaForCausalLM:
    """Large gains and an lm_head that is as much smaller: the probabilities of `plain`."""
    target = plain()
    target.model.norm.weight.mul_(50)
    target.lm_head.weight.div_(50)
    return target


TARGETS = {make.__name__: make for make in (plain, large_gain, tiny_lm_head)}


NEXT_STATE = {
    **{name: FAMILIES[name] for name in ("eagle", "hass", "mtp", "mtp of 3 modules")},
    "mtp, 32 tokens": ("mtp", {"draft_vocabulary": list(range(32))}),
}


def replace_rows(signals: TeacherSignals, rows: slice) -> TeacherSignals:
    """Return the signals of some texts of a batch."""
    parts = {name: value[rows] for name, value in vars(signals).items() if isinstance(value, Tensor)}
    return replace(signals, **parts)


class Samples(NamedTuple):
    """A target, texts that it sampled, and the counts of their tokens."""

    target: LlamaForCausalLM
    first_BT: Tensor
    others_BT: Tensor
    counts_V: Tensor


@cache
def samples(name: str) -> Samples:
    target = TARGETS[name]()
    prompts = [[2 + seed % 60] for seed in range(96)]
    outputs = SpeculativeDecoder(target).generate_batch(
        prompts, max_new_tokens=23, temperature=1.0, eos_token_id=None, seeds=0
    )
    texts_BT = torch.tensor([prompt + list(output.tokens) for prompt, output in zip(prompts, outputs, strict=True)])
    return Samples(target, texts_BT[:48], texts_BT[48:], texts_BT[:, 1:].flatten().bincount(minlength=64))


def signals_of(target: LlamaForCausalLM, drafter: TrainableDrafter, ids_BT: Tensor) -> TeacherSignals:
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    mask_BT[:, -1] = False
    return OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_BT, torch.ones_like(ids_BT), mask_BT))


@torch.no_grad()
def loss_by_position(drafter: TrainableDrafter, signals: TeacherSignals, target: LlamaForCausalLM) -> Tensor:
    """KL divergence by draft position, in nats."""
    torch.manual_seed(0)
    losses = []
    unrolled = drafter.unroll(signals)
    for k in range(len(unrolled)):
        sums = Objective()(unrolled[k : k + 1], signals, target.lm_head)
        losses.append(sums.loss / sums.count_K[0])
    return torch.stack(losses)


@torch.no_grad()
def best_constant_loss(signals: TeacherSignals, target: LlamaForCausalLM, tokens_D: Tensor | None) -> float:
    """KL divergence of the mean of p, the best constant q for these positions, weighted by p of the vocabulary."""
    p_NV = target.lm_head(signals.hidden_BTH[signals.mask_BT]).softmax(-1)
    p_ND = p_NV if tokens_D is None else p_NV[:, tokens_D]
    q_D, within_ND = p_ND.mean(0) / p_ND.mean(0).sum(), p_ND / p_ND.sum(-1, keepdim=True)
    return float((p_ND * (within_ND.clamp_min(1e-30).log() - q_D.log())).sum(-1).mean())


@pytest.mark.parametrize(("family", "target"), spread(STARTED, TARGETS))
def test_no_worse_than_a_constant(family: str, target: str) -> None:
    """On texts that the start was not fitted to, and without a tensor that the drafter did not have."""
    model, first_BT, others_BT, counts_V = samples(target)
    kind, options = STARTED[family]
    torch.manual_seed(0)
    drafter = HEADS[kind].from_target(model, **options).eval()
    shapes = {name: value.shape for name, value in drafter.state_dict().items()}
    fit_start(drafter, signals_of(model, drafter, first_BT), frequencies(counts_V))
    assert {name: value.shape for name, value in drafter.state_dict().items()} == shapes
    signals = signals_of(model, drafter, others_BT)
    losses = loss_by_position(drafter, signals, model)
    tokens_D = None if drafter.draft_vocabulary is None else drafter.draft_vocabulary.tokens_D
    assert losses.mean() <= best_constant_loss(signals, model, tokens_D) + 0.3, losses


@pytest.mark.parametrize(("family", "target"), spread(NEXT_STATE, TARGETS))
def test_drafters_that_read_the_next_token_begin_with_the_next_state(family: str, target: str) -> None:
    """Of what a constant leaves open, the regression on the state and the token explains at least a quarter."""
    model, first_BT, others_BT, counts_V = samples(target)
    kind, options = NEXT_STATE[family]
    drafter = HEADS[kind].from_target(model, **options).eval()
    first = signals_of(model, drafter, first_BT)
    few, more = (replace_rows(first, rows) for rows in (slice(0, 4), slice(4, None)))
    fit_start(drafter, few, frequencies(counts_V), iter([more]))
    signals = signals_of(model, drafter, others_BT)
    tokens_D = None if drafter.draft_vocabulary is None else drafter.draft_vocabulary.tokens_D
    losses = loss_by_position(drafter, signals, model)
    assert losses.mean() <= 0.75 * best_constant_loss(signals, model, tokens_D), losses


def test_a_regression_takes_neighbours_of_one_document_that_have_states() -> None:
    """Rows in a layout of two documents and padding give the least squares of their own pairs, in as many batches."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, 9, (6, 40), generator=generator)
    hidden_BTH = torch.randn(6, 40, 3, generator=generator)
    attention_BT = torch.ones_like(ids_BT)
    attention_BT[1, 30:] = 0
    documents_BT = (torch.arange(40) >= 17).long().expand(6, 40)
    hidden_BTH[2, 5] = torch.inf
    hidden_BTH[0, 39] = 0
    pairs = [
        (row, place)
        for row in range(6)
        for place in range(39)
        if place != 16
        and not (row == 1 and place >= 29)
        and not (row == 2 and place in (4, 5))
        and (row, place) != (0, 38)
    ]
    table = torch.randn(9, 4, generator=generator)

    def inputs(states_nH: Tensor, tokens_n: Tensor) -> Tensor:
        return torch.cat([states_nH, table[tokens_n]], -1)

    rows, places = torch.tensor(pairs).T
    z_nF = inputs(hidden_BTH[rows, places], ids_BT[rows, places + 1]).double()
    y_nH = hidden_BTH[rows, places + 1].double()
    gram_FF = z_nF.T @ z_nF
    gram_FF.diagonal().mul_(1 + 0.5 * 7 / len(pairs))
    expected = torch.linalg.solve(gram_FF, z_nF.T @ y_nH).T.float()
    whole = TeacherSignals(ids_BT, attention_BT, hidden_BTH, attention_BT.bool(), documents_BT=documents_BT)
    split = [replace_rows(whole, slice(row, row + 1)) for row in range(6)]
    torch.testing.assert_close(Regression.of([whole], inputs).weight_HF, expected, rtol=1e-4, atol=1e-5)
    five = Regression.of(split[:5], inputs).weight_HF  # 16 tokens for each of 7 inputs are enough after four rows
    torch.testing.assert_close(five, Regression.of(split[:4], inputs).weight_HF, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("target", TARGETS)
def test_masks_of_one_state_do_not_hide_how_much_the_lm_head_varies(target: str) -> None:
    """DFlash's masks have one state at first, at which any share of the copied lm_head gives the same logits."""
    model, first_BT, _, counts_V = samples(target)
    torch.manual_seed(0)
    drafter = HEADS["dflash"].from_target(model, block_size=4, draft_vocabulary=list(range(64))).eval()
    signals = signals_of(model, drafter, first_BT)
    fit_start(drafter, signals, frequencies(counts_V))
    states_nH = signals.hidden_BTH[signals.mask_BT]
    (head, *_) = drafter.own_lm_heads()
    assert copied_share(head(states_nH / typical_sizes(states_nH)), frequencies(counts_V)) > 0.9
    assert copied_share(model.lm_head(states_nH), frequencies(counts_V)) < 0.5, "that of the target varies more"


def test_frequencies_of_tokens_that_never_occurred() -> None:
    """Of ten tokens two occurred once: a fifth of the probability is shared by all tokens."""
    counts_V = torch.tensor([5, 3, 1, 1, 0])
    expected = torch.tensor([0.8 * 0.5 + 0.04, 0.8 * 0.3 + 0.04, 0.8 * 0.1 + 0.04, 0.8 * 0.1 + 0.04, 0.04])
    torch.testing.assert_close(frequencies(counts_V), expected)
    assert frequencies(torch.zeros(4)).min() > 0


def test_the_best_state_gives_the_frequencies() -> None:
    """With as many states as tokens the logits can be anything; with fewer the gradient of the KL vanishes."""
    torch.manual_seed(0)
    wanted_V = torch.softmax(2 * torch.randn(24), -1)
    whole = torch.nn.Linear(24, 24, bias=False).requires_grad_(False)
    torch.nn.init.orthogonal_(whole.weight)  # the number of steps to a solution depends on no CPU's rounding
    torch.testing.assert_close(whole(best_state(whole, wanted_V, 24)).softmax(-1), wanted_V, atol=2e-3, rtol=0)
    narrow = torch.nn.Linear(8, 24, bias=False).requires_grad_(False)
    q_V = narrow(best_state(narrow, wanted_V, 8)).softmax(-1)
    torch.testing.assert_close((q_V - wanted_V) @ narrow.weight, torch.zeros(8), atol=2e-3, rtol=0)


def test_sizes_of_columns_ignore_single_positions() -> None:
    torch.manual_seed(0)
    inputs_nF = torch.randn(400, 3) * torch.tensor([1.0, 50.0, 1000.0])
    inputs_nF[0] = 1e5
    torch.testing.assert_close(typical_sizes(inputs_nF), torch.tensor([1.0, 50.0, 1000.0]), rtol=0.2, atol=0)
    assert copied_share(1e-3 * inputs_nF[1:, :2], torch.tensor([0.5, 0.5])) == 1.0
