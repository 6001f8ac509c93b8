"""Forecasts of learning are measured on texts that it has not seen, and the drafter stays as it was."""

import numpy as np
import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM

from draftsmith.decode.sampling import Sampling
from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.learning import learning_lines, points_of
from draftsmith.eval.teacher_forced import TargetText, sample_texts
from draftsmith.heads import DraftModel
from draftsmith.heads.ngram import SuffixRetrieval
from draftsmith.train.online.outlook import outlook_by

PROMPTS = [[int(x) for x in torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(i))] for i in range(48)]
SAMPLED = Sampling(1.0)


def _pair() -> tuple[LlamaForCausalLM, DraftModel]:
    target = make_llama(eos_token_id=None, max_position_embeddings=256).requires_grad_(False)
    drafter = DraftModel.from_target(target, init="target_layers", num_hidden_layers=2).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in drafter.named_parameters():
        if "mlp" in name:
            weight.add_(0.25 * torch.randn(weight.shape, generator=generator))
    return target, drafter


def _texts(target: LlamaForCausalLM, count: int) -> list[TargetText]:
    return sample_texts(target, PROMPTS[:count], SAMPLED, max_new_tokens=60)


def test_tau_rises_on_other_texts_and_the_drafter_stays() -> None:
    target, drafter = _pair()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    outlook = outlook_by(target, 64, 0)("d", drafter, _texts(target, 48), SAMPLED)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert outlook["texts"] == {"learned": 24, "judged": 12, "apart": 12}
    points = outlook["points"]
    assert (points[0]["steps"], points[0]["gain"], points[0]["gain_interval"]) == (0, 0.0, [0.0, 0.0])
    assert points[-1]["steps"] >= 64
    assert len(points) == 9
    assert points[-1]["adopted"] >= 1
    assert points[-1]["gain_interval"][0] > 0
    assert outlook["passes"] == pytest.approx(64 * 8 / 24)
    assert outlook["expected"] is not None
    steps, tau, (low, high) = outlook["expected"]
    assert steps == 2 * points[-1]["steps"]
    assert low <= tau <= high
    lines = learning_lines(outlook)
    assert f"64: {points[-1]['tau']:.2f} ({points[-1]['adopted']})" in lines[0]
    assert lines[2].startswith(f"twice the steps ({steps}) would bring about tau {tau:.2f}")


def test_few_texts_and_drafters_without_weights_are_refused() -> None:
    target, drafter = _pair()
    with pytest.raises(ConfigError, match=r"learn with 20 texts, which leave 5 rows of 64 tokens to judge updates on"):
        outlook_by(target, 8, 0)("d", drafter, _texts(target, 20), SAMPLED)
    long = sample_texts(target, PROMPTS[:12], SAMPLED, max_new_tokens=140)
    with pytest.raises(ConfigError, match=r"learn with 12 texts, of which 3 are .* expected at least 4: --count 16"):
        outlook_by(target, 8, 0)("d", drafter, long, SAMPLED)
    with pytest.raises(ConfigError, match="type 'suffix', which has no weights"):
        outlook_by(target, 8, 0)("d", SuffixRetrieval(), [], SAMPLED)


def test_gains_are_paired_and_few_points_give_no_expectation() -> None:
    rounds_EP = np.full((3, 4), 10.0)
    tokens_EP = np.array([[20.0, 30, 40, 50], [22, 33, 44, 55], [24, 36, 48, 60]])
    points, expected = points_of([0, 8, 16], [0, 1, 2], tokens_EP, rounds_EP)
    assert expected is None
    assert [point["tau"] for point in points] == pytest.approx([3.5, 3.85, 4.2])
    for point, gain in zip(points, (0, 0.1, 0.2), strict=True):
        assert point["gain"] == pytest.approx(gain)
        assert point["gain_interval"] == pytest.approx([gain, gain]), "texts differ, their gains do not"
