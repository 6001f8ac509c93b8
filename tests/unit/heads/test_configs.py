"""The entries of heads/configs.py fit the classes and functions that they name."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from conftest import make_llama

import draftsmith.heads
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.configs import DRAFTERS, VocabularyOption
from draftsmith.heads.dflash import PARTS
from draftsmith.heads.eagle3 import OPTIONS


@pytest.mark.parametrize("kind", DRAFTERS)
def test_entry_names_its_class_and_options(kind: str) -> None:
    entry, drafter = DRAFTERS[kind], HEADS[kind]
    assert drafter.type == kind
    assert getattr(draftsmith.heads, drafter.__name__) is drafter
    makers = [
        maker for base in drafter.__mro__ for maker in (base.__init__, getattr(base, "from_target", None)) if maker
    ]
    options = {name for maker in makers for name in inspect.signature(maker).parameters}
    keys = set(entry.section.model_fields) - {"type"}
    passed_on = {"eagle3": {*OPTIONS, "qk_norm"}, "dflash": {field.name for part in PARTS for field in fields(part)}}
    assert keys - {"draft_vocab_size"} <= options | passed_on.get(kind, set())
    assert ("draft_vocab_size" in options) == issubclass(entry.section, VocabularyOption)


WITH_VOCABULARY = [kind for kind, entry in DRAFTERS.items() if issubclass(entry.section, VocabularyOption)]


@pytest.mark.parametrize("kind", WITH_VOCABULARY)
def test_a_drafter_whose_tokens_are_chosen_later_is_the_one_built_with_them(kind: str) -> None:
    target, tokens = make_llama(num_hidden_layers=4), [3, 9, 20, 41]

    def built(chosen: list[int]) -> TrainableDrafter:
        torch.manual_seed(1)
        return HEADS[kind].from_target(target, draft_vocabulary=chosen)

    later = built([0, 1, 2, 3])
    later.choose_tokens(target, tokens)
    expected, found = built(tokens).state_dict(), later.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = draftsmith.heads.Nothing


def test_importing_the_package_loads_no_drafter() -> None:
    code = "import sys, draftsmith.heads; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
