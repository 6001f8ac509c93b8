"""The statistics beside a naive reference in fp64, written from the definitions, token by token."""

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import make_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from draftsmith.errors import ConfigError
from draftsmith.eval import teacher_forced
from draftsmith.eval.diagnostics import LEAST_Q, calibration_error, diagnose
from draftsmith.heads import DraftModel, Medusa
from draftsmith.heads.base import Drafter
from draftsmith.heads.retrieval import PromptLookup

TEXTS = [([5, 9, 12, 7, 30, 5, 9, 44, 3, 17], 3), ([3, 3, 8, 60, 61, 2], 1), ([9, 9], 1)]
HEADS = 2
KEYS = ("forward_kl", "reverse_kl", "tv", "top1_agreement", "entropy_overlap", "ece", "cosine")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return make_llama(3).double()


@torch.inference_mode()
def make_medusa(target: nn.Module, vocabulary: list[int] | None = None) -> Medusa:
    torch.manual_seed(0)
    drafter = Medusa.from_target(target, num_heads=HEADS, draft_vocabulary=vocabulary).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter


@torch.inference_mode()
def pairs(target: nn.Module, drafter: Drafter, position: int) -> list[tuple[Tensor, Tensor, float]]:
    """(p logits, q logits, cosine) of draft position 1, 2, ... after every token of every text."""
    found = []
    for tokens, prompt in TEXTS:
        ids = torch.tensor([tokens])
        hidden = target.model(ids).last_hidden_state[0]
        for anchor in range(prompt, len(tokens) - 1):
            place = anchor + position - 1  # where p of the drafted token stands
            if place > len(tokens) - 2:
                continue
            p = target.lm_head(hidden[place])
            if isinstance(drafter, DraftModel):
                q, cosine = drafter.model(torch.tensor([tokens[: place + 1]])).logits[0, -1], math.nan
            else:
                state = drafter.blocks[position - 1](hidden[anchor - 1])
                q = drafter.lm_heads.full(position - 1, state[None])[0]
                cosine = float(state @ hidden[place] / state.norm() / hidden[place].norm())
            found.append((p, q, cosine))
    return found


def naive(found: list[tuple[Tensor, Tensor, float]], temperature: float) -> dict[str, float]:
    sums = {key: 0.0 for key in KEYS}
    bins: dict[int, list[tuple[float, float]]] = {}
    for p_logits, q_logits, cosine in found:
        p, q = ((x / temperature).softmax(-1).tolist() for x in (p_logits, q_logits))
        log_p, log_q = ([math.log(max(x, LEAST_Q)) for x in row] for row in (p, q))
        sums["forward_kl"] += sum(a * (b - c) for a, b, c in zip(p, log_p, log_q, strict=True))
        sums["reverse_kl"] += sum(a * (c - b) for a, b, c in zip(q, log_p, log_q, strict=True))
        sums["tv"] += sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        sums["top1_agreement"] += p.index(max(p)) == q.index(max(q))
        entropies = [-sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((p, log_p), (q, log_q))]
        sums["entropy_overlap"] += 1 - abs(entropies[0] - entropies[1]) / sum(entropies)
        sums["cosine"] += cosine
        bins.setdefault(int(max(q) * 10), []).append((max(q), p[q.index(max(q))]))
    for entries in bins.values():
        confidence, outcome = (np.mean([entry[i] for entry in entries]) for i in (0, 1))
        sums["ece"] += len(entries) * abs(confidence - outcome)
    return {key: value / len(found) for key, value in sums.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("kind", ["medusa", "medusa of few tokens", "draft_model"])
def test_statistics_are_those_of_the_definitions(kind: str, temperature: float, target: LlamaForCausalLM) -> None:
    if kind == "draft_model":
        drafter = DraftModel(make_llama(4).double())
    else:
        drafter = make_medusa(target, list(range(0, 64, 2)) if "few" in kind else None)
    result = diagnose(target, drafter, {"all": TEXTS}, temperature=temperature, draft_length=HEADS)["all"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result, "plain JSON values"
    assert [row["position"] for row in result["positions"]] == [1, 2]
    cosines, alphas = [], []
    for row in result["positions"]:
        found = pairs(target, drafter, row["position"])
        expected = naive(found, temperature or 1.0)
        assert row["tokens"] == len(found)
        for key in KEYS:
            if key == "cosine" and kind == "draft_model":
                assert row[key] is None
            else:
                assert row[key] == pytest.approx(expected[key], abs=1e-10), key
        for p, q, cosine in found:
            p, q = ((x / (temperature or 1.0)).softmax(-1) for x in (p, q))
            cosines.append(cosine)
            alphas.append(float(torch.minimum(p, q).sum()))
    if kind == "draft_model":
        assert result["cosine_correlation"] is None
    else:
        assert result["cosine_correlation"] == pytest.approx(np.corrcoef(cosines, alphas)[0, 1], abs=1e-9)


def test_a_drafter_that_is_the_target(target: LlamaForCausalLM) -> None:
    result = diagnose(target, DraftModel(target), {"all": TEXTS}, temperature=1.0, draft_length=1)["all"]
    row = result["positions"][0]
    assert row["forward_kl"] == row["tv"] == pytest.approx(0, abs=1e-12)
    assert row["top1_agreement"] == row["entropy_overlap"] == pytest.approx(1)
    assert row["ece"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["medusa", "draft_model"])
def test_groups_that_share_texts_are_as_by_themselves(
    kind: str, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of one row too; `done` counts each text once, parts of one among them."""
    drafter = make_medusa(target) if kind == "medusa" else DraftModel(make_llama(4).double())
    options = {"temperature": 1.0, "draft_length": HEADS}
    groups = {"all": TEXTS, "one": TEXTS[:1], "none": [([1, 2], 1)]}
    expected = {name: diagnose(target, drafter, {name: groups[name]}, **options)[name] for name in ("all", "one")}
    monkeypatch.setattr(teacher_forced, "BLOCK", 1)
    parts: list[float] = []
    found = diagnose(target, drafter, groups, **options, done=parts.append)
    assert found.keys() == expected.keys(), "a group without two new tokens is left out"
    for name, result in found.items():
        for row, other in zip(result["positions"], expected[name]["positions"], strict=True):
            assert row == pytest.approx(other, abs=1e-12)
    assert sum(parts) == pytest.approx(len(TEXTS) + 1)


def test_calibration_error_of_known_numbers() -> None:
    """0.25 and 0.35 share no bin; 0.91 and 0.99 do, and err in opposite ways."""
    assert calibration_error(np.array([0.25, 0.35, 0.91, 0.99]), np.array([0.5, 0.35, 1.0, 0.9])) == pytest.approx(
        (0.25 + 0 + 0) / 4, abs=1e-12
    )
    assert calibration_error(np.array([1.0]), np.array([0.0])) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_length": 0}, "draft_length=0; expected >= 1"),
        ({"temperature": -1.0}, "temperature=-1.0; expected >= 0"),
        ({"texts": [([1, 2], 1), ([3, 4, 5], 2)]}, "texts=2 without two new tokens in any"),
        ({"drafter": PromptLookup()}, "drafter of type 'prompt-lookup'; expected one with logits"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(
    changes: dict[str, object], message: str, target: LlamaForCausalLM
) -> None:
    options = {"drafter": make_medusa(target), "texts": TEXTS, "temperature": 1.0, "draft_length": 1} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        diagnose(target, options.pop("drafter"), {"all": options.pop("texts")}, **options)
