"""Texts that are shorter than the draft: every family unrolls all of its positions, and the late ones train nothing."""

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.distill.objective import AgreementSums, Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.train.step import collate

FAMILIES = {
    "draft_model": {},
    "medusa": {"num_heads": 4},
    "eagle": {"train_steps": 4},
    "hass": {"train_steps": 4},
    "eagle3": {"train_steps": 4},
    "eagle3, 32 tokens": {"train_steps": 4, "draft_vocabulary": list(range(0, 64, 2))},
    "mtp": {"train_steps": 4},
    "mtp, modules": {"num_modules": 4},
    "peagle": {"num_tokens": 5},
    "peagle, one token": {"num_tokens": 1},
    "dflash": {"block_size": 5},
    "dspark": {"block_size": 5, "markov_rank": 3, "confidence_head": True},
}
OBJECTIVES = [Objective(), Objective(kind="lk_lambda"), Objective(kind="accepted_length")]
LONG = {"input_ids": [5, 9, 33, 2, 11, 9, 8, 23, 60], "spans": [[2, 9]]}
SHORT = {
    "two tokens": {"input_ids": [7, 30], "spans": [[1, 2]]},
    "three tokens": {"input_ids": [7, 30, 4], "spans": [[1, 3]]},
    "one token, nothing to learn": {"input_ids": [7], "spans": []},
    "two tokens, nothing to learn": {"input_ids": [7, 30], "spans": []},
}


def made(name: str) -> tuple[LlamaForCausalLM, TrainableDrafter]:
    """In fp64, where sums in another order agree to many digits; dropout and noise are off."""
    target = make_llama(num_hidden_layers=6).requires_grad_(False).double()
    kind = {"dspark": "dflash"}.get(name, name.split(",")[0])
    torch.manual_seed(3)
    return target, HEADS[kind].from_target(target, **FAMILIES[name]).double().eval()


def trained(
    objective: Objective, drafter: TrainableDrafter, target: LlamaForCausalLM, rows: list[dict]
) -> tuple[AgreementSums, dict[str, Tensor | None]]:
    """Sums and gradients of one part of a batch."""
    drafter.zero_grad()
    batch = collate(Dataset.from_list(rows), list(range(len(rows))), torch.device("cpu"))
    signals = OnlineTeacher(target, drafter.needs.layers).signals(batch)
    sums = objective(drafter.unroll(signals), signals, target.get_output_embeddings(), [0.5] * 5)
    sums.loss.backward()
    return sums, {name: value.grad for name, value in drafter.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("row", SHORT)
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_batch_add_up(name: str, row: str) -> None:
    """A short and a long text in separate batches give the sums of one padded batch, at every draft position."""
    target, drafter = made(name)
    for objective in OBJECTIVES:
        short, of_short = trained(objective, drafter, target, [SHORT[row]])
        long, of_long = trained(objective, drafter, target, [LONG])
        both, of_both = trained(objective, drafter, target, [SHORT[row], LONG])
        assert all(gradient is not None for gradient in of_short.values()), "no process may wait for a gradient"
        for key in ("loss", "alpha_K", "match_K", "count_K"):
            parts = [getattr(sums, key).double() for sums in (short, long, both)]
            torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=1e-9, atol=1e-12)
        for key, gradient in of_both.items():
            torch.testing.assert_close(of_short[key] + of_long[key], gradient, rtol=1e-7, atol=1e-10)
        assert all(count <= max(0, len(SHORT[row]["input_ids"]) - 1) for count in short.count_K.tolist())
        if not SHORT[row]["spans"]:
            assert not any(gradient.any() for gradient in of_short.values())
