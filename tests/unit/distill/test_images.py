"""Images in messages: their layouts, how they are encoded, and where only text is read."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast
from vision_models import build, save_image, save_target

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.load_target import load_processor, load_target
from draftsmith.distill.sources import conversation
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import PromptRows, prompts_fingerprint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file beside an image `a.png`."""
    save_image(tmp_path / "a.png")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("{}\n")
    return prompts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png", "image": None},
        {"type": "image", "url": "./a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
    ],
)
def test_layouts_of_a_part(part: dict, file: Path) -> None:
    row = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]}
    asked = conversation(f"{file}:1", row)
    assert asked.images
    assert asked.messages[0]["content"] == [
        {"type": "image", "image": str(file.parent / "a.png")},
        {"type": "text", "text": "x"},
    ]
    assert not conversation(f"{file}:1", {"messages": [{"role": "user", "content": "x"}]}).images


def test_a_link_out_of_the_folder_is_refused(file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save_image(other / "b.png")
    (file.parent / "link.png").symlink_to(other / "b.png")
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "link.png"}]}]}
    with pytest.raises(ConfigError, match=r"image='link.png' lies outside"):
        conversation(f"{file}:1", row)
    with pytest.raises(ConfigError, match="of a data set without a folder; expected data URIs, or --images"):
        conversation("owner/data:1", row)


def test_tokens_are_those_of_the_processor(file: Path) -> None:
    target = save_target(file.parent / "target")
    processor, tokenizer = AutoProcessor.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "ab"}]
    asked = conversation(f"{file}:1", {"messages": [{"role": "user", "content": parts}]})
    ids, inputs = Chat(tokenizer, processor=processor).prompt_inputs(asked.messages, asked)
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert ids == [image] * 16 + tokenizer("abz")["input_ids"]
    assert inputs is not None
    assert {name: tuple(value.shape) for name, value in inputs.items() if name == "pixel_values"} == {
        "pixel_values": (1, 3, 8, 8)
    }
    text = conversation(f"{file}:1", {"messages": [{"role": "user", "content": "ab"}]})
    with pytest.raises(ConfigError, match="an image, and the target has no processor; expected a vision-language"):
        Chat(tokenizer).prompt_inputs(asked.messages, asked)
    template = file.parent / "own.jinja"
    own = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}q{% endfor %}{% endfor %}"
    template.write_text(own)
    ids, _ = Chat(tokenizer, str(template), processor=processor).prompt_inputs(asked.messages, asked)
    assert ids == [image] * 16 + tokenizer("qabq")["input_ids"], "--chat-template applies to the processor too"
    plain = Chat(tokenizer, processor=AutoProcessor.from_pretrained(target)).prompt_inputs(text.messages, text)
    assert plain == (tokenizer("abz")["input_ids"], None), "templates of processors read parts"


def test_prompts_differ_by_the_content_of_their_images(file: Path) -> None:
    target = save_target(file.parent / "target")
    processor, tokenizer = AutoProcessor.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    message = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    file.write_text(json.dumps({"messages": [message]}) + "\n")
    found = []
    for seed in (0, 0, 1):
        save_image(file.parent / "a.png", seed)
        rows = PromptRows.read(str(file))
        assert rows.images
        found.append(prompts_fingerprint(rows.encode(tokenizer, processor=processor)))
    assert found[0] == found[1] != found[2]
    assert not PromptRows.read("embedded").images


def test_the_class_that_reads_images(file: Path, tiny_target_folder: Path) -> None:
    """Where transformers has one class for text alone and another one for images, the second is loaded for images."""
    target = save_target(file.parent / "target")
    assert type(load_target(str(target)).model).__name__ == "LlavaForConditionalGeneration"
    hybrid = file.parent / "hybrid"
    build("qwen3_5").save_pretrained(hybrid)
    AutoTokenizer.from_pretrained(target).save_pretrained(hybrid)
    assert type(load_target(str(hybrid)).model).__name__ == "Qwen3_5ForCausalLM"
    assert type(load_target(str(hybrid), images=True).model).__name__ == "Qwen3_5ForConditionalGeneration"
    with pytest.raises(ConfigError, match=f"target={tiny_target_folder} cannot read images"):
        load_processor(str(tiny_target_folder))


def test_weights_are_equal_in_both_classes(file: Path) -> None:
    folder = file.parent / "hybrid"
    build("qwen3_5").save_pretrained(folder)
    AutoTokenizer.from_pretrained(save_target(file.parent / "target")).save_pretrained(folder)
    ids = torch.tensor([[3, 4, 5]])
    text, whole = (load_target(str(folder), images=images).model(ids).logits for images in (False, True))
    torch.testing.assert_close(text, whole)


def test_training_reads_text_only(file: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "ab"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}
    asked = conversation(f"{file}:1", row)
    for read in (lambda: Chat(tiny_tokenizer).prompt(asked), lambda: Chat(tiny_tokenizer).encode(asked, 8)):
        with pytest.raises(ConfigError, match=r"p.jsonl:1: an image; expected text: images are read by generate, eval"):
            read()
