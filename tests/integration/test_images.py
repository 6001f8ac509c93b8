"""Images from the command line: `generate`, `eval` and `check` with a vision-language target and its processor."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import printed, run, write_rows
from conftest import mostly_slow, write_recipe
from PIL import Image
from run_results import losses_of, taus_of
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from vision_models import NEEDS_TORCHVISION, save_image, save_target

from draftsmith.decode.passes import graphs

MOST = 12
PICTURES = (0, 4)
"""Seeds of images after which no two logits are close: the texts are the same on every CPU."""


def asked(*images: str, text: str = "ab") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A LLaVA, or the family with which a test is parametrized."""
    family = getattr(request, "param", "llava")
    if family in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision")
        pytest.importorskip("num2words")
    return save_target(tmp_path / "target", family)


EACH_PROCESSOR = pytest.mark.parametrize("target", ["llava", *NEEDS_TORCHVISION], indirect=True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file with an image by path, two images one of which is a data URI, no image, and two turns."""
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    names = [f"pictures/{save_image(tmp_path / 'data' / 'pictures' / f'{seed}.png', seed)}" for seed in PICTURES]
    uri = "data:image/png;base64," + base64.b64encode((tmp_path / "data" / names[1]).read_bytes()).decode()
    turns = asked(names[0])["messages"] + [{"role": "user", "content": "cd"}]
    rows = [asked(names[0]), asked(names[1], uri, text="b"), asked(text="abcd"), {"messages": turns}]
    return write_rows(tmp_path / "data" / "prompts.jsonl", rows)


def generated(target: Path, image: Path, text: str) -> list[int]:
    """Return the tokens of transformers' own `generate`."""
    processor = AutoProcessor.from_pretrained(target)
    parts = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": text}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    return model.generate(**inputs, max_new_tokens=MOST, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()


@EACH_PROCESSOR
@pytest.mark.parametrize("more", mostly_slow([None, "--compile"], None))
def test_generate_with_an_image(
    more: str | None, target: Path, prompts: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of compiled passes runs as it is, which takes no minutes."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    pictures = [prompts.parent / "pictures" / f"{seed}.png" for seed in PICTURES]
    texts = [generated(target, picture, "ab") for picture in pictures]
    expected = [AutoTokenizer.from_pretrained(target).decode(text, skip_special_tokens=True) for text in texts]
    assert expected[0] != expected[1]
    for picture, text in zip(pictures, expected, strict=True):
        options = ("--target", target, "--image", picture, "--max-new-tokens", MOST, "--drafter", "suffix")
        assert run("generate", "ab", *options, *filter(None, [more])) == 0
        assert capsys.readouterr().out.split("\n")[:2] == ["ab", text]


@EACH_PROCESSOR
def test_eval_with_images(target: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--target", target, "--prompts", prompts, "--drafter", "early-exit:layers=1")
    out = tmp_path / "eval"
    short = ("--batch-size", 2, "--temperature", 0, "--repeats", 1, "--max-new-tokens", 8)
    assert run("eval", *options, *short, "--out", out) == 0
    found = json.loads((out / "eval.json").read_text())
    assert {guard["guard"] for guard in found["guards"]} <= {"slow-baseline"}, "speed depends on the machine"
    assert found["plain"]["identical"] == found["plain"]["prompts"] == 4, "the target alone is `generate` with images"
    lines = map(json.loads, (out / "cells.jsonl").read_text().splitlines())
    cells = [line["cell"] for line in lines if "cell" in line]
    first = [text["tokens"] for cell in cells for text in cell["texts"] if (text["prompt"], cell["turn"]) == ("#1", 0)]
    assert first == [generated(target, prompts.parent / "pictures" / "0.png", "ab")[:8]] * 2
    assert {text["prompt"] for cell in cells for text in cell["texts"] if cell["turn"] == 1} == {"#4"}


@pytest.mark.slow
@EACH_PROCESSOR
def test_check_with_images(target: Path, prompts: Path, capsys: pytest.CaptureFixture) -> None:
    drafter = ("--drafter", "early-exit:layers=1", "--tokens", 1000)
    code, said, _ = printed(capsys, "check", "--target", target, "--prompts", prompts, *drafter)
    assert (code, "LOSSLESS" in said) == (0, True)


BAD_IMAGES = {
    "prompts.jsonl:1: image='https://example.org/a.png'; expected a file, or": asked("https://example.org/a.png"),
    "image='../secret.png' lies outside": asked("../secret.png"),
    "image='none.png' is no file in": asked("none.png"),
    "/prompts.jsonl cannot be read (cannot identify image": asked("prompts.jsonl"),
    "image=a data URI of 26 characters cannot be read": asked("data:image/png;base64,AAAA"),
    "the data URI is not in base64": asked("data:image/png,AAAA"),
    "a part of type 'video'": {"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]},
    "an image with keys ['type']; expected one": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
}


def test_bad_images_are_refused_in_one_line(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_image(tmp_path / "secret.png")
    for line, row in BAD_IMAGES.items():
        write_rows(prompts, [row])
        code, _, error = printed(capsys, "check", "--target", target, "--prompts", prompts, "--drafter", "suffix")
        assert (code, error.count("\n")) == (2, 1)
        assert line in error


def test_images_of_another_folder(target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A path may lead out of the folder of the prompts only where the option names a folder."""
    elsewhere = write_rows(tmp_path / "elsewhere.jsonl", [asked("pictures/0.png")])
    options = ("--target", target, "--prompts", elsewhere, "--drafter", "suffix", "--temperature", 0)
    assert run("check", *options) == 2
    assert "image='pictures/0.png' is no file in" in capsys.readouterr().err
    assert run("check", *options, "--images", prompts.parent) == 0
    assert "LOSSLESS" in capsys.readouterr().out
    assert run("check", *options, "--images", tmp_path / "none") == 2
    assert "expected a folder" in capsys.readouterr().err


def test_targets_and_commands_without_images(
    target: Path, prompts: Path, tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    picture = prompts.parent / "pictures" / "0.png"
    assert run("generate", "ab", "--target", tiny_target_folder, "--image", picture) == 2
    assert f"target={tiny_target_folder} cannot read images" in capsys.readouterr().err
    bare = save_target(tmp_path / "bare", processor=False)
    assert run("generate", "ab", "--target", bare, "--image", picture) == 2
    assert f"target={bare} cannot read images" in capsys.readouterr().err
    options = ("--target", target, "--drafter", "suffix", "--prompts", prompts, "--out", tmp_path / "f")
    assert run("forecast", *options) == 2
    assert "have images; expected prompts of text alone for a forecast" in capsys.readouterr().err


def recipe(place: Path, target: Path, response: str) -> Path:
    """Write a recipe with eight prompts, six of which have an image; return its file."""
    data = place / "train"
    data.mkdir()
    rows = []
    for seed in range(8):
        name = save_image(data / f"{seed}.png", seed)
        answer = {"role": "assistant", "content": "efgh"}
        question = asked(name, text="abcd"[seed % 4]) if seed % 4 else asked(text=f"text{seed}")
        rows.append({"messages": [*question["messages"], answer]})
    prompts = str(write_rows(data / "rows.jsonl", rows))
    values = {"prompts": prompts, "images": str(data), "prompt_tokens": 40, "response_tokens": 12, "response": response}
    return write_recipe(place, target, {"count": 2}, values, steps=3, batch_size=4, evaluate_every=3, draft_length=2)


EAGLE3, MEDUSA = {"type": "eagle3", "layers": [1, 1, 2]}, {"type": "medusa", "num_heads": 2}
DRAFT_MODEL = {
    "type": "draft_model",
    "config": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
               "num_attention_heads": 2, "max_position_embeddings": 256},
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "drafter", "response"),
    [
        ("llava", EAGLE3, "target"),
        pytest.param("llava", MEDUSA, "text", marks=pytest.mark.slow),
        pytest.param("llava", DRAFT_MODEL, "target", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", EAGLE3, "text", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", DRAFT_MODEL, "target", marks=pytest.mark.slow),
        pytest.param("smolvlm", MEDUSA, "target", marks=pytest.mark.slow),
    ],
    indirect=["target"],
)
def test_train_on_conversations_with_images(
    drafter: dict, response: str, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """From the recipe to a drafter that decodes prompts with images."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    assert run("train", recipe(tmp_path, target, response), f"drafter={json.dumps(drafter)}") == 0
    assert taus_of(tmp_path / "run")
    assert min(losses_of(tmp_path / "run")) > 0
    capsys.readouterr()
    picture = prompts.parent / "pictures" / "0.png"
    options = ("--target", target, "--image", picture, "--max-new-tokens", MOST)
    assert run("generate", "ab", *options) == 0
    alone = capsys.readouterr().out
    assert run("generate", "ab", *options, "--drafter", tmp_path / "run" / "drafter") == 0
    assert capsys.readouterr().out == alone
