"""Images in messages: their layouts, how they are encoded, and where only text is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_llama
from datasets import Dataset
from transformers import AutoProcessor, AutoTokenizer
from vision_models import build, save_image, save_target

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import conversation
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import read_examples
from draftsmith.distill.load_target import LoadedTarget, load_processor, load_target
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import PromptRows, prompts_fingerprint
from draftsmith.train.training_data import with_prompts


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
    image = {"type": "image", "image": str(file.parent / "a.png")}
    assert asked.messages[0]["content"] == [image, {"type": "text", "text": "x"}]
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
    assert inputs["pixel_values"].shape == (1, 3, 8, 8)
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
        found.append(prompts_fingerprint(rows.encode(tokenizer, processor=processor)[0]))
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


@pytest.fixture
def chat(file: Path) -> Chat:
    target = save_target(file.parent / "target")
    return Chat(AutoTokenizer.from_pretrained(target), processor=AutoProcessor.from_pretrained(target))


def rows_of(file: Path, *messages: dict) -> None:
    file.write_text(json.dumps({"messages": list(messages)}) + "\n")


QUESTION = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "ab"}]}
SETTINGS = {"count": 10, "prompt_tokens": 40, "response_tokens": 20, "response": "text"}


def examples(file: Path, chat: Chat, **changes: Any) -> Dataset:
    data = DataSection(**{**SETTINGS, "prompts": str(file), "images": str(file.parent), **changes})
    return read_examples(chat, data, None, lambda _: None)


def test_answers_after_an_image_are_trained(file: Path, chat: Chat) -> None:
    later = {"role": "user", "content": "cd"}
    rows_of(file, QUESTION, {"role": "assistant", "content": "ef"}, later, {"role": "assistant", "content": "gh"})
    (row,) = examples(file, chat)
    image = chat.tokenizer.convert_tokens_to_ids("<image>")
    assert row["input_ids"] == [image] * 16 + chat.tokenizer("abzefcdzgh")["input_ids"]
    assert [chat.tokenizer.decode(row["input_ids"][start:end]) for start, end in row["spans"]] == ["ef", "gh"]
    inputs = chat.row_inputs(row["images"], row["input_ids"])
    assert inputs is not None
    assert inputs["pixel_values"].shape == (1, 3, 8, 8)
    (prompt,) = examples(file, chat, response="target")
    assert prompt["input_ids"] == row["input_ids"][:19]
    assert chat.row_inputs("", row["input_ids"]) is None
    target = LoadedTarget(make_llama(), chat.tokenizer, "tiny", None, processor=chat.processor)
    (every,) = with_prompts(examples(file, chat, train_on="all"), target)
    assert every["spans"] == [[17, len(row["input_ids"])]], "neither a placeholder nor the token after it is trained"
    assert every["answers"] == row["spans"]


def test_an_image_that_changes_is_read_again_and_never_mixed(file: Path, chat: Chat) -> None:
    rows_of(file, QUESTION, {"role": "assistant", "content": "ef"})
    (before,) = examples(file, chat)
    save_image(file.parent / "a.png", 1)
    with pytest.raises(ConfigError, match="an image has changed since its text was read; expected the same images"):
        chat.row_inputs(before["images"], before["input_ids"])
    (after,) = examples(file, chat)
    assert after["images"] != before["images"], "the cache of examples notices the file"
    assert chat.row_inputs(after["images"], after["input_ids"]) is not None


def test_rows_that_differ_by_their_image_are_two(file: Path, chat: Chat) -> None:
    save_image(file.parent / "b.png", 1)
    other = {"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "ab"}]}
    lines = [json.dumps({"messages": [question]}) for question in (QUESTION, other, QUESTION)]
    file.write_text("\n".join(lines) + "\n")
    assert len(examples(file, chat, response="target")) == 2


def test_an_image_after_an_answer_is_left_out(file: Path, chat: Chat) -> None:
    rows_of(file, {"role": "user", "content": "x"}, {"role": "assistant", "content": "ef"}, QUESTION,
            {"role": "assistant", "content": "gh"})  # fmt: skip
    with pytest.raises(ConfigError, match="1 of 1 have an image after an answer: left out"):
        examples(file, chat)
