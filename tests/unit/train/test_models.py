"""Parts that the trainer and `draftsmith data prepare` build alike, and drafters that start from a trained one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.train.models import frequent_tokens, make_drafter
from draftsmith.train.progress import Console
from draftsmith.train.recipe import parse_recipe

KEPT = [1, *range(2, 64, 2)]  # with EOS
DRAFTERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("draft_model", {}, {}),
    ("medusa", {}, {}),
    ("medusa", {"draft_vocab_size": 32}, {"draft_vocabulary": KEPT}),
    ("eagle", {}, {}),
    ("eagle3", {"layers": [1, 2], "draft_vocab_size": 32}, {"draft_vocabulary": KEPT}),
    ("mtp", {}, {}),
    ("mtp", {"num_modules": 2}, {}),
    ("mtp", {"draft_vocab_size": 32}, {"draft_vocabulary": KEPT}),
    ("hass", {"draft_vocab_size": 32}, {"draft_vocabulary": KEPT}),
    ("peagle", {"layers": [1, 2]}, {}),
    ("peagle", {"layers": [1, 2], "mask_before_fc": True}, {}),
    ("dflash", {"layers": [1, 2], "block_size": 4}, {}),
]


@pytest.fixture
def target(tiny_tokenizer: PreTrainedTokenizerFast) -> LoadedTarget:
    return LoadedTarget(make_llama().requires_grad_(False), tiny_tokenizer, "tiny", None)


def saved(drafter: TrainableDrafter, target: LoadedTarget, folder: Path) -> str:
    """Save a drafter of the target and return its folder."""
    made_for = describe_target(target.model, target.tokenizer, "tiny")
    save_drafter(drafter, folder, target=made_for, recipe=None, draft_length=2, tokenizer=target.tokenizer)
    return str(folder)


def made(target: LoadedTarget, drafter: dict[str, Any] | None = None, **more: str) -> Any:
    """Return the drafter of a recipe."""
    section = {} if drafter is None else {"drafter": drafter}
    return make_drafter(parse_recipe({"name": "n", "output": "o", **section, **more}, "test"), target)


@pytest.mark.parametrize(("kind", "options", "vocabulary"), DRAFTERS)
def test_training_starts_from_a_trained_drafter(
    kind: str, options: dict[str, Any], vocabulary: dict[str, Any], tmp_path: Path, target: LoadedTarget
) -> None:
    model = target.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = {key: value for key, value in options.items() if key != "draft_vocab_size"}
    drafter = HEADS[kind].from_target(model, **own, **vocabulary)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    any_tokens = {"draft_vocabulary": list(range(32))} if vocabulary else {}
    fresh = HEADS[kind].from_target(model, **own, **any_tokens)
    found = made(target, {"type": kind, **options}, start_from=saved(drafter, target, tmp_path / "saved"))

    weights, expected = found.state_dict(), drafter.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, weights[name])] == []
    flags = {name: parameter.requires_grad for name, parameter in fresh.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in found.named_parameters()} == flags
    assert any(flags.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_the_recipe_says_holds_for_a_trained_drafter(tmp_path: Path, target: LoadedTarget) -> None:
    """Options that change no shape: those of training are taken over, others must agree or be left out."""
    options = {"layers": [1, 2], "block_size": 4, "sample_from_anchor": True, "anchors": 9}
    folder = saved(HEADS["dflash"].from_target(target.model, **options), target, tmp_path / "saved")

    def found(**said: Any) -> Any:
        return made(target, {"type": "dflash", "layers": [1, 2], **said}, start_from=folder)

    kept = found()
    assert (kept.block_size, kept.max_draft_length, kept.anchors) == (4, 4, 9)
    assert found(sample_from_anchor=True, anchors=30).anchors == 30
    for key, value in (("sample_from_anchor", False), ("block_size", 8), ("layers", [1, 1])):
        own = kept.section()[key]
        said = f"drafter.{key}={value!r}; expected {own!r}, as start_from={folder} has"
        with pytest.raises(ConfigError, match=re.escape(said)):
            found(**{key: value})


def test_a_draft_vocabulary_has_the_ends_of_texts(tmp_path: Path, target: LoadedTarget) -> None:
    eos = target.tokenizer.eos_token_id
    target.model.generation_config.eos_token_id = [eos, 7, 9]

    def found(size: int, **more: str) -> Any:
        return made(target, {"type": "mtp", "draft_vocab_size": size}, **more)

    assert found(3).draft_vocab_size == 3
    with pytest.raises(ConfigError, match=r"draft_vocab_size=2; expected at least 3, the target's EOS tokens"):
        found(2)
    rows = [{"input_ids": [20, 21, 20, 22, 23], "spans": [[0, 5]]}]
    assert frequent_tokens(Dataset.from_list(rows), 4, target, Console(False)) == sorted([eos, 7, 9, 20])
    first, second = (
        saved(HEADS["mtp"].from_target(target.model, draft_vocabulary=tokens), target, tmp_path / str(tokens[0]))
        for tokens in ([eos, 20, 21], [20, 21, 22])
    )
    assert found(3, start_from=first).draft_vocab_size == 3
    with pytest.raises(ConfigError, match=r"start_from=.*: a draft vocabulary without EOS"):
        found(3, start_from=second)


def test_options_that_change_shapes_are_the_drafters_own(tmp_path: Path, target: LoadedTarget) -> None:
    """A drafter of the speculators package, whose masks have features."""
    drafter = HEADS["peagle"].from_target(target.model, layers=[1, 2], mask_before_fc=True)
    folder = saved(drafter, target, tmp_path / "saved")
    assert made(target, start_from=folder).mask_before_fc
    with pytest.raises(ConfigError, match=r"drafter\.mask_before_fc=False; expected True, as start_from="):
        made(target, {"type": "peagle", "mask_before_fc": False}, start_from=folder)
