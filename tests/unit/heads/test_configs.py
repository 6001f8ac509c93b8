"""The entries of heads/configs.py fit the classes and functions that they name."""

import inspect
import subprocess
import sys

import pytest

import draftsmith.heads
from draftsmith.heads import HEADS
from draftsmith.heads.configs import DRAFTERS, VocabularyOption


@pytest.mark.parametrize("kind", DRAFTERS)
def test_entry_names_its_class_and_options(kind: str) -> None:
    entry, drafter = DRAFTERS[kind], HEADS[kind]
    assert drafter.type == kind
    assert getattr(draftsmith.heads, drafter.__name__) is drafter
    keys = set(entry.section.model_fields) - {"type"}
    options = inspect.signature(drafter.from_target).parameters
    taken = set(options) - {"target", "draft_vocabulary"} | ({"draft_vocab_size"} & keys)
    assert keys == taken if "options" not in taken else keys > taken - {"options"}
    assert ("draft_vocabulary" in options) == issubclass(entry.section, VocabularyOption)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = draftsmith.heads.Nothing


def test_importing_the_package_loads_no_drafter() -> None:
    code = "import sys, draftsmith.heads; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
