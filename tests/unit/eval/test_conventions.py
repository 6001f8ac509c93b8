"""The self-test of imported drafters: a drafter that is read by the wrong convention is told from one that is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.sampling import Sampling
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.eval.conventions import PROMPTS, readings_of
from draftsmith.eval.teacher_forced import sample_texts
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.train.batch import collate
from draftsmith.train.step import AgreementStep, Last


def fitted(
    kind: str, options: dict[str, Any], target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> TrainableDrafter:
    """Return a drafter that was trained on a few texts of the target, such as those of the self-test."""
    torch.manual_seed(0)
    drafter = HEADS[kind].from_target(target, **options)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    texts = sample_texts(target, prompts, Sampling(1.0), max_new_tokens=48)
    spans = [[[text.prompt_length, len(text.tokens)]] for text in texts]
    rows = Dataset.from_dict({"input_ids": [text.tokens for text in texts], "spans": spans})
    batch = collate(rows, [*range(len(texts))], torch.device("cpu"))
    step = AgreementStep(drafter, Objective(), OnlineTeacher(target, drafter.needs.layers))
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    for _ in range(160):
        optimizer.zero_grad()
        step(batch, 0.0, Last()).loss.backward()
        optimizer.step()
    return drafter.eval()


def other_first(drafter: Any) -> None:
    drafter.body.first = 0


def other_layer(drafter: Any) -> None:
    drafter.needs = replace(drafter.needs, layers=(2,))


def other_residual(drafter: Any) -> None:
    drafter.body.layers[0].norm_before_residual = True


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Any], None], str]] = {
    "first position": ("dflash", {"block_size": 4}, other_first, "sample_from_anchor=False"),
    "layers": ("eagle3", {"layers": [1], "train_steps": 2}, other_layer, "layer ids one lower"),
    "residual": ("eagle3", {"layers": [1], "train_steps": 2}, other_residual, "norm_before_residual=False"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_right_convention_is_found(name: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    kind, options, misread, convention = CASES[name]
    target = make_llama(num_hidden_layers=3).requires_grad_(False)
    drafter = fitted(kind, options, target, tiny_tokenizer)
    right, *others = readings_of(target, drafter, tiny_tokenizer)
    assert not any(reading.better for reading in others)
    misread(drafter)
    wrong, *others = readings_of(target, drafter, tiny_tokenizer)
    found = {reading.convention: reading for reading in others}
    assert [reading.convention for reading in others if reading.better] == [convention], found
    assert found[convention].alpha == pytest.approx(right.alpha)
    assert wrong.alpha < right.alpha - 0.02
    again = readings_of(target, drafter, tiny_tokenizer)[0]
    assert again.alpha == pytest.approx(wrong.alpha), "the drafter is left as it was"


@pytest.mark.parametrize(("context", "tokens"), [(12, 0), (20, 1), (60, 100)])
def test_short_contexts_limit_the_texts(context: int, tokens: int, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompts of 16 to 36 tokens; an import does not fail for want of room."""
    target = make_llama(max_position_embeddings=context, eos_token_id=None).requires_grad_(False)
    drafter = HEADS["eagle3"].from_target(target, layers=[1])
    found = readings_of(target, drafter, tiny_tokenizer)
    assert len(found) == (3 if tokens else 0)
    assert all(reading.tokens >= tokens for reading in found)
