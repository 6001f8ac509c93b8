"""Texts after a prompt with an image have the target's distribution given the image: every outcome is enumerated."""

import pytest
import torch
from conftest import make_llama
from exact.enumeration import Tokens, total_variation, whole_runs
from exact.test_lossless import target_alone, text_of
from exact.toys import VOCAB
from torch import Tensor
from transformers import PreTrainedModel, SuppressTokensLogitsProcessor
from vision_models import ImagePrompt, build, prompt

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain, Policy, SampledTree
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads import DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.heads.hidden_states import extended

COUNT = 4
IMAGE = VOCAB
"""The placeholder is a token after those that are generated."""
ROUNDING = 1e-10
EXTRA = [SuppressTokensLogitsProcessor([IMAGE])]


def small(family: str) -> PreTrainedModel:
    return build(family, 4, special=(IMAGE,), vocab_size=VOCAB + 1, num_hidden_layers=2)


def asked(family: str, seed: int) -> ImagePrompt:
    return prompt(family, seed, [1], [2, 3], image=IMAGE)


@torch.inference_mode()
def drafter_of(kind: str, target: PreTrainedModel) -> Drafter:
    """Return a drafter with random weights, some of whose tokens are accepted."""
    if kind == "draft_model":
        return DraftModel(make_llama(5, vocab_size=VOCAB + 1, eos_token_id=None, hidden_size=16).double())
    torch.manual_seed(6)
    drafter = Eagle3.from_target(target, layers=(1, 1, 2)).double().eval()
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


@torch.inference_mode()
def gap(family: str, kind: str, policy: Policy, *, seen: int = 0, read: int = 0) -> float:
    """Return the total variation between texts after the image `read` and those of the target after `seen`."""
    target, processors = small(family), Processors(Sampling(0.8, top_k=2), EXTRA)
    drafter, shown = drafter_of(kind, target), asked(family, seen)

    def logits(text: Tokens) -> Tensor:
        inputs = extended(shown.inputs, len(shown.ids), len(text))
        return target(input_ids=torch.tensor([text]), **inputs).logits[0, -1]

    def make() -> DecodeLoop:
        text = text_of(tuple(shown.ids), COUNT)
        text.inputs = asked(family, read).inputs
        return DecodeLoop(TransformersTarget(target), drafter, policy, [text], processors)

    return total_variation(whole_runs(make), target_alone(logits, tuple(shown.ids), COUNT, processors))


@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [
        ("qwen3_vl", "draft_model", Chain(2)),
        ("qwen2_5_vl", "eagle3", SampledTree(2, 2)),
        ("gemma3", "eagle3", Chain(2)),
        ("smolvlm", "draft_model", SampledTree(2, 2)),
    ],
    ids=str,
)
def test_texts_have_the_distribution_given_the_image(family: str, kind: str, policy: Policy) -> None:
    assert gap(family, kind, policy) < ROUNDING


def test_the_distribution_depends_on_the_image() -> None:
    """As a control: the texts after one image differ from those after another."""
    assert gap("qwen3_vl", "draft_model", Chain(2), seen=0, read=1) > 1e-2
