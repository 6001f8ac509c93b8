"""`draftsmith export` and `draftsmith import`: from a checkpoint to another engine's folder and back."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import printed, write_prompts
from conftest import make_llama
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.hub.export import stored_dtype

STAGE = "  stage: comparing the drafter with the target\n"


@pytest.fixture
def saved(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """Save a target, and a drafter that was made for it; return both and their folders."""

    def save(kind: str, length: int, sizes: dict[str, int], **options: Any) -> tuple[Any, str, Any, str]:
        target = make_llama(**sizes).requires_grad_(False)
        target.save_pretrained(tmp_path / "target")
        tiny_tokenizer.save_pretrained(tmp_path / "target")
        torch.manual_seed(1)
        drafter, folder = HEADS[kind].from_target(target, **options), tmp_path / "drafter"
        made_for = describe_target(target, tiny_tokenizer, str(tmp_path / "target"))
        save_drafter(drafter, folder, target=made_for, recipe=None, draft_length=length, tokenizer=tiny_tokenizer)
        return target, str(tmp_path / "target"), drafter, str(folder)

    return save


@pytest.fixture
def pair(saved: Callable[..., Any]) -> tuple[LlamaForCausalLM, str, str]:
    target, folder, _, drafter = saved("eagle3", 4, {"num_hidden_layers": 8}, draft_vocabulary=list(range(0, 64, 2)))
    return target, folder, drafter


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_there_and_back(
    format: str,
    pair: tuple[LlamaForCausalLM, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands of the card run in the folder that it is in, under any name."""
    target, target_folder, drafter = pair
    out = tmp_path / "out"
    code, said, err = printed(capsys, "export", drafter, "--format", format, "--target", target_folder, "--out", out)
    assert (code, err) == (0, "")
    tensors = load_file(out / "model.safetensors")
    assert f"{len(tensors)} tensors, {sum(value.numel() for value in tensors.values()):,} numbers, for" in said
    assert "README.md, config.json, model.safetensors" in said
    *_, before, last, following = said.splitlines()
    assert str(out) in before + last
    port = 8000 if format == "vllm" else 30000
    served = f"eval server http://localhost:{port} --target {target_folder} --model {target_folder}"
    assert following == f"next: draftsmith {served}"
    out = out.rename(tmp_path / "moved")
    card = (out / "README.md").read_text()
    (imported,) = re.findall("`draftsmith (import .*)`", card)
    assert '"model": "."' in card or "draft-model-path . " in card
    monkeypatch.chdir(out)
    code, said, err = printed(capsys, *shlex.split(imported))
    assert (code, "not read" in said) == (0, False)
    back = Path("../imported")
    assert err.startswith(STAGE), "and lines that say how long is left"
    assert f"next: draftsmith eval --target {target_folder} --drafter {back}" in said
    assert "self-test: alpha 0." in said
    assert all(torch.equal(value, load_file(back / "model.safetensors")[name])
               for name, value in load_file(Path(drafter) / "model.safetensors").items())  # fmt: skip
    section = json.loads((back / "config.json").read_text())["draftsmith"]
    # The other layout has no place for a draft length.
    assert (section["draft_length"], section["recipe"]) == (4 if format == "vllm" else 3, None)
    assert section["target"]["name"] == target_folder
    assert load_drafter(back, target).draft_length_hint == section["draft_length"]


def test_unknown_keys_are_said(
    pair: tuple[LlamaForCausalLM, str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, target, drafter = pair
    common = ["--target", target, "--out"]
    assert printed(capsys, "export", drafter, "--format", "sglang", *common, tmp_path / "out")[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config |= {"novel": 1, "num_beams": 1, "torch_dtype": "float32"}
    config["eagle_config"]["odd\x1b"] = 2
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    asked = write_prompts(tmp_path / "prompts.jsonl", *(f"Text {number}" for number in range(3)))
    published = ["import", tmp_path / "out", *common]
    code, said, _ = printed(capsys, *published, tmp_path / "back", "--prompts", asked)
    assert code == 0
    assert "\nnote: keys of config.json that are not read: novel, eagle_config.odd" in said
    assert " tokens of 3 texts\n" in said
    assert "\x1b" not in said
    code, said, _ = printed(capsys, *published, tmp_path / "again", "--no-self-test")
    assert (code, "not read: novel" in said) == (0, True)
    for option, value in {"--prompts": asked, "--chat-template": "plain"}.items():
        code, _, err = printed(capsys, *published, tmp_path / "third", "--no-self-test", option, value)
        assert (code, f"{option}={value} with --no-self-test" in err) == (2, True)


def test_the_dtype_is_that_of_the_checkpoint_or_as_asked(
    saved: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The target stays what it is: its weights, as those of most, have numbers that float16 rounds away."""
    target, target_folder, drafter, folder = saved("eagle3", 4, {"num_hidden_layers": 8})
    for parameter in target.parameters():
        parameter.view(-1)[::3] *= 1e-7
    target.save_pretrained(target_folder)
    made_for = describe_target(target, None, target_folder)
    save_drafter(drafter, Path(folder), target=made_for, recipe=None, draft_length=4)
    common = ["--target", target_folder, "--out"]
    for dtype in ("float32", "bfloat16", "float16"):
        asked = [] if dtype == "float32" else ["--dtype", dtype]
        assert printed(capsys, "export", folder, "--format", "sglang", *asked, *common, tmp_path / dtype)[0] == 0
        assert stored_dtype(tmp_path / dtype) == dtype
    assert "--dtype bfloat16" in (tmp_path / "bfloat16" / "README.md").read_text()
    assert printed(capsys, "import", tmp_path / "float16", "--gamma", "6", *common, tmp_path / "back")[0] == 0
    assert stored_dtype(tmp_path / "back") == "float16"
    back = load_drafter(tmp_path / "back", target)
    assert back.draft_length_hint == 6
    state = back.state_dict()
    assert all(torch.equal(value.half().float(), state[name]) for name, value in drafter.state_dict().items()
               if value.is_floating_point())  # fmt: skip


def test_an_imported_draft_model_keeps_its_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Families have one tokenizer and embeddings of several sizes."""
    target = make_llama(vocab_size=72).requires_grad_(False)
    for model, name in ((target, "target"), (make_llama(1), "[plain]")):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    arguments = ["import", str(tmp_path / "[plain]"), "--target", str(tmp_path / "target")]
    capsys.readouterr()  # transformers' progress bars
    code, said, err = printed(capsys, *arguments, "--out", str(tmp_path / "[back]"))
    assert code == 0
    assert err.startswith(STAGE), "and lines that say how long is left"
    assert f"{tmp_path}/[back]: a drafter of type draft_model" in said
    plain, back = (load_drafter(tmp_path / name, target, tiny_tokenizer) for name in ("[plain]", "[back]"))
    assert back.shared_vocabulary == plain.shared_vocabulary == len(tiny_tokenizer)
    with pytest.raises(ConfigError, match="has a vocabulary of 64; expected the target's 72"):
        load_drafter(tmp_path / "[back]", target)


def test_mistakes_are_told_in_one_line_before_any_work(
    pair: tuple[LlamaForCausalLM, str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, target, drafter = pair
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    export = ["export", drafter, "--target", target, "--out", str(tmp_path / "new")]
    wrong = {
        "format='native'; expected vllm, sglang, gguf, transformers": [*export, "--format", "native"],
        "/file/new cannot be made in": [*export[:-1], str(tmp_path / "full" / "file" / "new"), "--format", "vllm"],
        "expected a folder with config.json": ["export", str(tmp_path / "empty"), *export[2:], "--format", "vllm"],
        "is a draftsmith checkpoint": ["import", drafter, *export[2:]],
    }
    for message, arguments in wrong.items():
        code, _, err = printed(capsys, *arguments)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert message in err
        assert not (tmp_path / "new").exists()


def test_an_imported_draft_length_stays_within_reach(
    saved: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Medusa heads: no more tokens than heads."""
    _, target, _, drafter = saved("medusa", 2, {}, num_heads=2)
    common = ["--target", target, "--out"]
    assert printed(capsys, "export", drafter, "--format", "vllm", *common, tmp_path / "out")[0] == 0
    published = ["import", str(tmp_path / "out"), *common, str(tmp_path / "back")]
    code, _, err = printed(capsys, *published, "--gamma", "3")
    assert (code, "gamma=3; expected at most 2" in err) == (2, True)
    code, said, _ = printed(capsys, *published, "--no-self-test")
    assert (code, "self-test" in said) == (0, False)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["draftsmith"]["draft_length"] == 2


def test_a_draft_model_leaves_nothing_of_ours_behind(
    saved: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its export is any transformers model: no section, but the tokenizer; and comes back as ours."""
    target, target_folder, drafter, folder = saved("draft_model", 2, {}, num_hidden_layers=1)
    common = ["--target", target_folder, "--out"]
    for format in ("transformers", "vllm", "sglang"):
        out = tmp_path / format
        assert printed(capsys, "export", folder, "--format", format, *common, out)[0] == 0
        assert (out / "tokenizer.json").is_file()
        assert not any(str(tmp_path) in file.read_text() for file in out.glob("*.json"))
    assert printed(capsys, "import", str(tmp_path / "vllm"), *common, str(tmp_path / "back"))[0] == 0
    again = load_drafter(tmp_path / "back", target).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in drafter.state_dict().items())
