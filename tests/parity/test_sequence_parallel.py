"""Processes that share a text compute the states, the loss and the gradients of one process."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import make_llama
from forked import run_group
from torch import nn
from unit.heads.test_families import make

from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, unrolled_attention
from draftsmith.heads.hidden_states import document_numbers
from draftsmith.heads.sequence_part import SequencePart
from draftsmith.train.models import check_target
from draftsmith.train.recipe import parse_recipe
from draftsmith.train.step import AgreementStep, Last

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
COUNT = 3


KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"noise": 0.0, "train_steps": 2},
    "eagle3": {"draft_vocabulary": list(range(3, 43)), "train_steps": 3, "num_hidden_layers": 2},
}
BLOCKS = ("dflash in windows of positions", "dflash with sinks", "dspark, recurrent", "dflash2", "lilicorr")
"""Block drafters of `FAMILIES`: windows of both kinds, causal or not, and all transitions."""


def loss_and_gradients(
    kind: str, part: SequencePart | None, objective: Objective, packed: bool
) -> dict[str, torch.Tensor]:
    """Train on two rows of 17 and 11 tokens, in float64."""
    target = make_llama(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2).double()
    torch.manual_seed(1)
    drafter = make(kind, target) if kind in BLOCKS else HEADS[kind].from_target(target, **KINDS[kind])
    drafter.double().train_further(anchors=4)
    ids_BT = torch.randint(2, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    seen_BT = torch.ones_like(ids_BT)
    seen_BT[1, 11:] = 0
    teacher = OnlineTeacher(target.requires_grad_(False), drafter.needs.layers)
    batch = Batch(ids_BT * seen_BT, seen_BT, seen_BT.bool() & (ids_BT > 15))
    if packed:
        batch = replace(batch, documents_BT=document_numbers([[3, 9, 5], [7, 4]], 17))
    torch.manual_seed(2)
    sums = AgreementStep(drafter, objective, teacher, part=part)(batch, 1.0, Last())
    sums.loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {**found, "loss": sums.loss.detach(), "alpha": sums.alpha_K, "count": sums.count_K.double()}


def require_parts(rank: int) -> None:
    """In one of three processes."""
    part = SequencePart(rank, COUNT, dist.group.WORLD)
    objectives = (Objective(feature_weight=0.5), Objective(kind="accepted_length", chunk_tokens=3))
    for kind, (packed, objective) in product([*KINDS, *BLOCKS], enumerate(objectives)):
        found, expected = (loss_and_gradients(kind, some, objective, bool(packed)) for some in (part, None))
        assert expected["count"].min() > 0
        for name, value in found.items():
            dist.all_reduce(value)
            torch.testing.assert_close(value, expected[name], msg=f"{kind} {objective} {name}", **CLOSE)
        assert found.keys() == expected.keys()


def test_three_processes_share_texts(tmp_path: Path) -> None:
    run_group(require_parts, COUNT, tmp_path)


def test_drafters_that_cannot_divide_a_text_are_refused() -> None:
    target, values = make_llama(num_hidden_layers=3), {"name": "m", "output": "m", "train": {"sequence_parallel": 2}}
    for kind in ("medusa", "mtp"):
        recipe = parse_recipe({**values, "drafter": {"type": kind}}, "test")
        with pytest.raises(ConfigError, match=f"=2 with drafter.type='{kind}'; expected 1, or a drafter of"):
            check_target(recipe, target, HEADS[kind].from_target(target))
    recipe, drafter = parse_recipe({**values, "drafter": {"type": "hass"}}, "test"), HEADS["hass"].from_target(target)
    check_target(recipe, target, drafter)
    drafter.body.config.layer_types, drafter.body.config.sliding_window = ["sliding_attention"], 3
    with pytest.raises(ConfigError, match="=2 with a sliding window; expected 1"):
        check_target(recipe, target, drafter)


@pytest.mark.parametrize("queries", [5, 17])
def test_queries_at_the_end_of_a_text(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, and in parts of two queries: the rows of attention over the whole text."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, 2, 17, 8), (2, 2, 17, 8), (2, 4, queries, 8)]
    q, k, v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(queries, 17, dtype=torch.bool).tril(17 - queries)
    out = nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    out.backward(g)
    monkeypatch.setattr(unrolled_attention, "QUERIES", 2)
    in_parts = unrolled_attention._text_in_parts(q, k, v, None)
    for found, gradients in (
        ((fused := unrolled_attention._text(q, k, v)), unrolled_attention._text_backward(g, q, k, v, *fused)),
        (in_parts, unrolled_attention._backward_in_parts(g, q, k, v, *in_parts, None)),
    ):
        torch.testing.assert_close(found[0], out.detach(), **CLOSE)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            torch.testing.assert_close(gradient, leaf.grad, **CLOSE)
