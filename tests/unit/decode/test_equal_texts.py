"""Equal texts of a batch, and classes whose instances hold tensors: they are told apart by identity."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from conftest import make_t5

import draftsmith
from draftsmith import SpeculativeDecoder
from draftsmith.heads.draft_model import DraftModel

TENSORS = ("Tensor", "ProcessorInputs", "ndarray")


def dataclasses_of_package() -> Iterator[type]:
    for module in pkgutil.walk_packages(draftsmith.__path__, "draftsmith."):
        if module.name.endswith("__main__") or module.name.endswith("train.deepspeed"):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(module.name), is_dataclass):
            if isinstance(kind, type) and kind.__module__ == module.name:
                yield kind


def holds_tensors(annotation: object) -> bool:
    """Functions of tensors, and names of classes such as `StateTensors`, hold none."""
    return "Callable" not in str(annotation) and any(re.search(rf"\b{name}\b", str(annotation)) for name in TENSORS)


def test_dataclasses_with_tensors_are_compared_by_identity() -> None:
    """`in`, `index` and `==` over them would compare tensors number by number, and fail."""
    kinds = [
        kind for kind in dataclasses_of_package() if any(map(holds_tensors, inspect.get_annotations(kind).values()))
    ]
    assert len(kinds) > 15
    assert [kind.__qualname__ for kind in kinds if kind.__eq__ is not object.__eq__] == []


@pytest.mark.parametrize("seeds", [[1, 1, 1], [1, 2, 1]], ids=str)
def test_equal_texts_that_fill_the_drafters_context(seeds: list[int]) -> None:
    """Two equal prompts with equal states of the encoder, beside a text that the drafter still reads."""
    target = make_t5(2)
    drafter = DraftModel.from_target(target, num_hidden_layers=1, init="target_layers").eval()
    drafter.context_limit = 4
    sources = [[3, 4, 5], [3, 4, 5], [6, 7]]
    with torch.no_grad():
        states = [target.get_encoder()(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sources]
    starts = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0]]
    decoder = SpeculativeDecoder(target, drafter, draft_length=2)
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None, "temperature": 1.0}
    with pytest.warns(UserWarning, match="fill the"):
        batch = decoder.generate_batch(sources, seeds=seeds, decoder_input_ids=starts, encoder_states=states, **options)
    for text, source, start, seed in zip(batch, sources, starts, seeds, strict=True):
        alone = SpeculativeDecoder(
            target, None if len(start) > 4 else drafter, draft_length=2 if len(start) == 1 else None
        )
        expected = alone.generate_batch([source], seeds=[seed], decoder_input_ids=[start], **options)
        assert text.tokens == expected[0].tokens
