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


@pytest.mark.parametrize(("kind", "options", "vocabulary"), DRAFTERS)
def test_training_starts_from_a_trained_drafter(
    kind: str,
    options: dict[str, Any],
    vocabulary: dict[str, Any],
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = make_llama().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = {key: value for key, value in options.items() if key != "draft_vocab_size"}
    saved = HEADS[kind].from_target(model, **made, **vocabulary)
    for parameter in saved.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    described = describe_target(model, tiny_tokenizer, "tiny")
    save_drafter(saved, tmp_path / "saved", target=described, recipe=None, draft_length=2, tokenizer=tiny_tokenizer)

    drafter = {"type": kind, **options}
    values = {"name": "n", "output": "o", "drafter": drafter, "start_from": str(tmp_path / "saved")}
    any_tokens = {"draft_vocabulary": list(range(32))} if vocabulary else {}
    fresh = HEADS[kind].from_target(model, **made, **any_tokens)
    found = make_drafter(parse_recipe(values, "test"), LoadedTarget(model, tiny_tokenizer, "tiny", None))

    weights, expected = found.state_dict(), saved.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, weights[name])] == []
    flags = {name: parameter.requires_grad for name, parameter in fresh.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in found.named_parameters()} == flags
    assert any(flags.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_the_recipe_says_holds_for_a_trained_drafter(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Options that change no shape: those of training are taken over, others must agree or be left out."""
    model = make_llama().requires_grad_(False)
    options = {"layers": [1, 2], "block_size": 4, "sample_from_anchor": True, "anchors": 9}
    saved = HEADS["dflash"].from_target(model, **options)
    described = describe_target(model, tiny_tokenizer, "tiny")
    save_drafter(saved, tmp_path / "saved", target=described, recipe=None, draft_length=2, tokenizer=tiny_tokenizer)

    def found(**said: Any) -> Any:
        drafter = {"type": "dflash", "layers": [1, 2], **said}
        values = {"name": "n", "output": "o", "drafter": drafter, "start_from": str(tmp_path / "saved")}
        return make_drafter(parse_recipe(values, "test"), LoadedTarget(model, tiny_tokenizer, "tiny", None))

    kept = found()
    assert (kept.block_size, kept.max_draft_length, kept.anchors) == (4, 4, 9)
    assert found(sample_from_anchor=True, anchors=30).anchors == 30
    for key, value in (("sample_from_anchor", False), ("block_size", 8), ("layers", [1, 1])):
        own = kept.section()[key]
        said = f"drafter.{key}={value!r}; expected {own!r}, as start_from={tmp_path / 'saved'} has"
        with pytest.raises(ConfigError, match=re.escape(said)):
            found(**{key: value})


def test_a_draft_vocabulary_has_the_ends_of_texts(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model, eos = make_llama().requires_grad_(False), tiny_tokenizer.eos_token_id
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [eos, 7, 9]
    target = LoadedTarget(model, tiny_tokenizer, "tiny", None)

    def found(size: int, **more: str) -> Any:
        drafter = {"type": "mtp", "draft_vocab_size": size}
        return make_drafter(parse_recipe({"name": "n", "output": "o", "drafter": drafter, **more}, "test"), target)

    assert found(3).draft_vocab_size == 3
    with pytest.raises(ConfigError, match=r"draft_vocab_size=2; expected at least 3, the target's EOS tokens"):
        found(2)
    rows = [{"input_ids": [20, 21, 20, 22, 23], "spans": [[0, 5]]}]
    assert frequent_tokens(Dataset.from_list(rows), 4, target, Console(False)) == sorted([eos, 7, 9, 20])
    described = describe_target(model, tiny_tokenizer, "tiny")
    for tokens in ([eos, 20, 21], [20, 21, 22]):
        saved, folder = HEADS["mtp"].from_target(model, draft_vocabulary=tokens), tmp_path / str(tokens[0])
        save_drafter(saved, folder, target=described, recipe=None, draft_length=2, tokenizer=tiny_tokenizer)
    assert found(3, start_from=str(tmp_path / str(eos))).draft_vocab_size == 3
    with pytest.raises(ConfigError, match=r"start_from=.*: a draft vocabulary without EOS"):
        found(3, start_from=str(tmp_path / "20"))


def test_options_that_change_shapes_are_the_drafters_own(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A drafter of the speculators package, whose masks have features."""
    model = make_llama().requires_grad_(False)
    saved = HEADS["peagle"].from_target(model, layers=[1, 2], mask_before_fc=True)
    described = describe_target(model, tiny_tokenizer, "tiny")
    save_drafter(saved, tmp_path / "saved", target=described, recipe=None, draft_length=2, tokenizer=tiny_tokenizer)
    loaded = LoadedTarget(model, tiny_tokenizer, "tiny", None)
    values = {"name": "n", "output": "o", "start_from": str(tmp_path / "saved")}
    assert make_drafter(parse_recipe(values, "test"), loaded).mask_before_fc
    refused = parse_recipe({**values, "drafter": {"type": "peagle", "mask_before_fc": False}}, "test")
    with pytest.raises(ConfigError, match=r"drafter\.mask_before_fc=False; expected True, as start_from="):
        make_drafter(refused, loaded)
