"""Targets that scale their embeddings (Gemma 3): anchors and masks of a block alike, in exports too, or a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import test_round_trips as layouts
from parity.published_files import HEAD, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, written
from parity.test_exports import exported, made
from safetensors.torch import load_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from draftsmith import ConfigError, load_drafter
from draftsmith.heads.dflash import DFlash

BLOCK = torch.tensor([[7, 17, 17, 17]])


@pytest.fixture(scope="module")
def target() -> Gemma3ForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_hidden_layers": 6}
    sizes |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config = Gemma3TextConfig(**sizes, pad_token_id=0, tie_word_embeddings=False)
    return Gemma3ForCausalLM(config).eval().requires_grad_(False)


def test_a_new_mask_is_scaled_like_its_anchor(target: Gemma3ForCausalLM) -> None:
    body = DFlash.from_target(target, mask_token=17).body
    assert torch.equal(body.block(BLOCK[:, 0], 4), target.get_input_embeddings()(BLOCK))


@pytest.mark.parametrize(
    "layout", [layouts.zlab_dflash, layouts.specforge_dspark, layouts.speculators_dflash, layouts.deepspec_dspark]
)
def test_blocks_of_other_projects_are_plain_rows(
    layout: Callable[..., layouts.Folder], tmp_path: Path, target: Gemma3ForCausalLM
) -> None:
    """dflash 0.1.0, SpecForge, speculators, vLLM and SGLang take anchor and masks from the stored weight."""
    drafter = layouts.ours(layout(target), target, tmp_path)
    assert torch.equal(drafter.body.block(BLOCK[:, 0], 4), target.get_input_embeddings().weight[BLOCK])


def test_an_export_without_embeddings_names_the_masks_token(tmp_path: Path, target: Gemma3ForCausalLM) -> None:
    config, tensors = layouts.zlab_dflash(target)
    out = exported(layouts.ours((config, tensors), target, tmp_path), target, "sglang", tmp_path / "out").folder
    assert json.loads((out / "config.json").read_text())["dflash_config"]["mask_token_id"] == 17
    again = load_file(out / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_files_of_engines_with_plain_embeddings_are_refused(tmp_path: Path, target: Gemma3ForCausalLM) -> None:
    with pytest.raises(ConfigError, match="the target scales its embeddings; expected one that does not"):
        load_drafter(written(tmp_path / "d", *layouts.eagle1(target)), target)


@pytest.mark.parametrize(
    ("kind", "format", "options"),
    [("dflash", "vllm", {}), ("dflash", "sglang", {"sample_from_anchor": True}), ("hass", "sglang", {})],
)
def test_exports_for_engines_with_plain_embeddings_are_refused(
    kind: str, format: str, options: dict[str, Any], tmp_path: Path, target: Gemma3ForCausalLM
) -> None:
    drafter = made(kind, target, **options)
    if kind == "dflash":
        drafter.body.mask_embedding.copy_(target.get_input_embeddings()(BLOCK[0, 1]))
    with pytest.raises(ConfigError, match="a target that scales its embeddings; expected format=transformers"):
        exported(drafter, target, format, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
