"""Exports, read again, are the same drafter bit by bit, in every format and option."""

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from parity.published_files import DRAFTED, HEADS, INNER, KEPT, KV_HEADS, PROMPT, VOCAB
from recording import decoded_logits
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from draftsmith import load_drafter
from draftsmith.heads import HEADS as TYPES
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.formats.writers import LAYOUTS
from draftsmith.hub.export import Exported, export_drafter


def eight_layers() -> LlamaForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER}
    return make_llama(num_hidden_layers=8, **sizes).requires_grad_(False)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return eight_layers()


@torch.no_grad()
def made(kind: str, target: LlamaForCausalLM, **options: Any) -> TrainableDrafter:
    torch.manual_seed(3)
    drafter = TYPES[kind].from_target(target, **options).eval()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    drafter.requires_grad_(False)
    for parameter in trained:
        parameter += 0.1 * torch.randn_like(parameter)
    drafter.draft_length_hint = min(4, drafter.max_draft_length or 4)
    return drafter


def exported(
    drafter: TrainableDrafter, target: LlamaForCausalLM, format: str, out: Path, dtype: str | None = None
) -> Exported:
    return export_drafter(drafter, target, format, out, target_name="org/target", dtype=dtype)


BLOCK = {"block_size": 4, "layers": [2, 8], "num_hidden_layers": 1}
WRITTEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "eagle3, vllm": ("eagle3", {}, "vllm"),
    "eagle3 of 8 tokens, vllm": ("eagle3", {"draft_vocabulary": KEPT, "norm_before_residual": True}, "vllm"),
    "eagle3.1, vllm": ("eagle3", {"fc_norm": True, "norm_output": True, "layers": [1, 8]}, "vllm"),
    "eagle3, norm before fc, vllm": ("eagle3", {"norm_before_fc": True, "num_hidden_layers": 2}, "vllm"),
    "eagle3, sglang": ("eagle3", {"layers": [1, 4, 7]}, "sglang"),
    "eagle3 of 8 tokens, sglang": ("eagle3", {"draft_vocabulary": KEPT, "fc_norm": True}, "sglang"),
    "eagle, sglang": ("eagle", {}, "sglang"),
    "hass, sglang": ("hass", {}, "sglang"),
    "peagle, vllm": ("peagle", {"num_tokens": 3, "mask_token": 17, "draft_vocabulary": KEPT}, "vllm"),
    "dflash, vllm": ("dflash", BLOCK, "vllm"),
    "dflash with a trained mask, vllm": ("dflash", BLOCK | {"trained_mask": True}, "vllm"),
    "dspark, vllm": ("dflash", {**BLOCK, "markov_rank": 5, "confidence_head": True}, "vllm"),
    "dspark of 8 tokens from the anchor, vllm": (
        "dflash",
        {**BLOCK, "sample_from_anchor": True, "draft_vocabulary": KEPT, "markov_rank": 5},
        "vllm",
    ),
    "medusa, vllm": ("medusa", {"num_layers": 2}, "vllm"),
    "medusa of 8 tokens and one lm_head, vllm": (
        "medusa",
        {"num_layers": 2, "draft_vocabulary": KEPT, "shared_lm_head": True},
        "vllm",
    ),
}
"""Drafters made here; test_round_trips.py has the names, shapes and keys of files that other projects wrote."""
CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel", "dflash": "DFlashDraftModel"}
CLASSES |= {"dspark": "DSparkDraftModel"}
INTEGERS = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}


@pytest.mark.parametrize("kind", ["eagle", "hass"])
def test_rows_of_the_targets_lm_head_are_the_full_one_in_sglang(
    kind: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    """The drafter itself is written as one of the full lm_head, whose logits of these tokens are the same."""
    drafter = made(kind, target, draft_vocabulary=KEPT)
    written = exported(drafter, target, "sglang", tmp_path / "out")
    assert any("8 tokens" in note and "full lm_head" in note for note in written.serving.notes)
    again = load_drafter(written.folder, target)
    assert again.draft_vocabulary is None
    with torch.no_grad():
        rows, whole = (decoded_logits(each, target, PROMPT, DRAFTED) for each in (drafter, again))
    torch.testing.assert_close(rows[..., KEPT], whole[..., KEPT])
    assert rows.isneginf().sum(-1).eq(VOCAB - len(KEPT)).all()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_drafter_is_read_as_it_was(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """The same weights and logits, in the file's dtypes; what engines read of the config beside the layers."""
    kind, options, format = WRITTEN[name]
    drafter = made(kind, target, **options)
    out = exported(drafter, target, format, tmp_path / "out").folder
    (file,) = out.glob("*.safetensors")
    assert file.name == "model.safetensors"
    assert all(value.dtype == INTEGERS.get(part, torch.float32) for part, value in load_file(file).items())
    config = json.loads((out / "config.json").read_text())
    assert "draftsmith" not in config
    if algorithm := config.get("speculators_model_type"):
        own = config["speculators_config"]
        assert config["architectures"] == [CLASSES[algorithm]]
        assert (own["algorithm"], own["default_proposal_method"]) == (algorithm, "greedy")
        assert own["proposal_methods"][0]["speculative_tokens"] == drafter.draft_length_hint
        assert own["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    elif kind == "hass":
        assert config["architectures"] == ["LlamaForCausalLMEagle"]
    again = load_drafter(out, target)
    assert type(again) is (TYPES["eagle"] if kind == "hass" else type(drafter))
    assert again.draft_length_hint in (None, drafter.draft_length_hint)
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert set(ours) == set(theirs)
    solved = {"mask_hidden"} if kind == "peagle" else set()
    for part in set(ours) - solved:
        assert torch.equal(ours[part], theirs[part]), part
    with torch.no_grad():
        one, other = (decoded_logits(each, target, PROMPT, DRAFTED) for each in (drafter, again))
    # The mask state is solved for, so it is equal to fp32 precision; everything else is the same computation.
    assert torch.equal(one, other) if not solved else torch.allclose(one, other, atol=1e-5)


def test_every_layout_is_tested() -> None:
    """A line in LAYOUTS is a line in the table; draft models and the formats below have tests of their own."""
    tested = {(format, kind) for kind, _, format in WRITTEN.values()} | {("sglang", "dflash")}  # test_round_trips.py
    listed = {(format, kind) for format, layout in LAYOUTS.items() for kind in layout if kind != "draft_model"}
    assert {pair for pair in listed if pair[0] not in ("transformers", "gguf", "native")} == tested
    assert set(LAYOUTS["transformers"]) == set(TYPES)


# In other dtypes.


@pytest.mark.parametrize(
    "name",
    [
        "eagle3 of 8 tokens, vllm",
        "peagle, vllm",
        "dspark, vllm",
        "dspark of 8 tokens from the anchor, vllm",
        "medusa, vllm",
    ],
)
def test_in_half_precision(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Floats are rounded to the dtype, and d2t stays an integer."""
    kind, options, format = WRITTEN[name]
    drafter = made(kind, target, **options)
    before = {part: value.clone() for part, value in drafter.state_dict().items()}
    out = exported(drafter, target, format, tmp_path / "out", dtype="bfloat16").folder
    assert all(torch.equal(value, drafter.state_dict()[part]) for part, value in before.items()), "left as it was"
    tensors = load_file(out / "model.safetensors")
    whole = INTEGERS | {"mask_hidden": torch.float32}
    assert all(value.dtype == whole.get(part, torch.bfloat16) for part, value in tensors.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_drafter(out, target).state_dict()
    for part, value in drafter.state_dict().items():
        kept = part == "body.mask_embedding" and not options.get("trained_mask")  # the target's
        rounded = value.bfloat16().float() if value.is_floating_point() and not kept else value
        if part == "mask_hidden":  # it is solved for with the rounded fc, and not rounded itself
            assert torch.allclose(again["body.fc.weight"] @ again[part], value, atol=1e-5)
        else:
            assert torch.equal(again[part], rounded)


# Notes and commands.


def test_the_readme_says_how_to_start_it(tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = made("peagle", target, num_tokens=3)
    drafter.target_quality = {"kl": 0.01}
    made_of = export_drafter(drafter, target, "vllm", tmp_path / "peagle", target_name="org/target", revision="abc")
    text = (made_of.folder / "README.md").read_text()
    plan = '{"method": "eagle3", "parallel_drafting": true, "draft_sample_method": "probabilistic", '
    plan += '"model": ".", "num_speculative_tokens": 3}'
    assert f"vllm serve org/target --speculative-config '{plan}'" in text
    for words in ("at revision `abc`", "Serve that target, not the original"):
        assert words in text
    assert made_of.adapted
    assert str(made_of.folder) in made_of.usage
    sglang = exported(made("eagle3", target), target, "sglang", tmp_path / "sglang")
    for words in ("EAGLE3", "--speculative-num-steps 4", "--speculative-num-draft-tokens 5"):
        assert words in (sglang.folder / "README.md").read_text()
    assert not sglang.adapted


@pytest.mark.parametrize("format", ["vllm", "sglang", "transformers"])
def test_the_command_names_a_folder_with_spaces_and_quotes(
    format: str, tmp_path: Path, target: LlamaForCausalLM
) -> None:
    drafter = made("eagle3", target)
    out = exported(drafter, target, format, tmp_path / """it's "one" of 2""")
    if format == "transformers":
        constants = [part.value for part in ast.walk(ast.parse(out.usage)) if isinstance(part, ast.Constant)]
        assert str(out.folder) in constants
    else:
        words = shlex.split(out.usage.replace("\\\n", " "))
        plan = json.loads(words[words.index("--speculative-config") + 1])["model"] if format == "vllm" else ""
        assert str(out.folder) in [*words, plan]
