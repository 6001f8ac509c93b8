"""Training examples: rows that are left out, held-out prompts, packing."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import write_rows
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftsmith.distill import dataset
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import (
    FEATURES,
    LengthStatistics,
    hold_out,
    length_statistics,
    read_examples,
    require_embeddings,
)
from draftsmith.distill.load_target import LoadedTarget, load_tokenizer
from draftsmith.distill.packing import pack
from draftsmith.errors import ConfigError


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_rows(file, rows))


def source_of(prompts: str, count: int, prompt_tokens: int, response_tokens: int, **more: Any) -> DataSection:
    limits = {"count": count, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    return DataSection(prompts=prompts, **limits, **more)


def test_what_is_left_out_is_counted_by_reason(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["abc", "a" * 9, "abcd", "b" * 200, "abc"]
    more = [{"id": 0}, {"id": 1, "category": "code", "completion": ""}, {}, {"tools": []}, {}]
    source = write(tmp_path / "p.jsonl", [{"prompt": text, **keys} for text, keys in zip(texts, more, strict=True)])
    said: list[str] = []
    chat = Chat(loaded.tokenizer)
    rows = read_examples(chat, source_of(source, 10, 5, 8), 128, said.append)
    assert [len(ids) for ids in rows["input_ids"]] == [3, 4]
    assert said == [
        f"{source}: 2 of 5 have prompts longer than data.prompt_tokens=5: left out",
        f"{source}: 1 of 5 are the same as another: left out",
        f"{source}: keys of rows that are not used: id, category",
    ]
    again: list[str] = []
    assert read_examples(chat, source_of(source, 10, 5, 8), 128, again.append).to_list() == rows.to_list()
    assert again == said, "the same lines are printed for cached examples"
    reading: list[str] = []
    monkeypatch.setattr(dataset, "SECONDS", 0)
    read_examples(chat, source_of(source, 11, 5, 8), 128, reading.append)
    assert [line.partition(", at most ")[0] for line in reading[:2]] == [
        f"{source}: 1 rows read, 1 of 11 samples",
        f"{source}: 3 rows read, 2 of 11 samples",
    ]
    assert all(line.endswith(" left") for line in reading[:2])
    short = read_examples(chat, source_of(source, 10, 300, 8), 128, said.append)
    assert len(short) == 3
    assert said[-3] == (
        f"{source}: 1 of 5 do not fit the target's context of 128 with data.response_tokens=8 after them: left out"
    )
    with pytest.raises(ConfigError, match=r"leaves nothing to train on \(.* 5 of 5 have prompts longer"):
        read_examples(chat, source_of(source, 10, 2, 8), 128, said.append)


def test_rows_without_a_question_or_an_answer_are_left_out_and_counted(loaded: LoadedTarget, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
    rows = [[], [answer, user], [{**user, "content": " "}, answer], [user, {**answer, "content": ""}]]
    rows.append([{**user, "content": "ef"}, answer])
    source = write(tmp_path / "p.jsonl", [{"messages": messages} for messages in rows])
    for answered, left_out in ((True, 4), (False, 3)):  # the target answers what has no answer
        said: list[str] = []
        settings = source_of(source, 10, 9, 9, response="text" if answered else "target")
        assert len(read_examples(Chat(loaded.tokenizer, "plain"), settings, 128, said.append)) == 5 - left_out
        why = ("are empty", "begin with an answer", "have an empty question", "have an empty answer")
        assert said == [f"{source}: 1 of 5 {reason}: left out" for reason in why[:left_out]]


def test_rows_with_tokens_beyond_the_embeddings_are_left_out_and_counted(loaded: LoadedTarget, tmp_path: Path) -> None:
    """A tokenizer may have tokens that were added without resizing the model, such as Gemma 3's image token."""
    size = loaded.model.config.vocab_size
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    assert loaded.tokenizer.convert_tokens_to_ids("<|image|>") == size
    rows = [
        {"prompt": "ab", "completion": "c<|image|>"},
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "<|image|>", "completion": "c"},
    ]
    source = write(tmp_path / "p.jsonl", rows)
    for response, left, every in (("text", 2, 3), ("target", 1, 2)):
        said: list[str] = []
        settings = source_of(source, 10, 20, 20, response=response)
        assert len(read_examples(Chat(loaded.tokenizer, vocab_size=size), settings, 128, said.append)) == 1
        assert f"{source}: {left} of 3 have a token beyond the target's {size} embeddings: left out" in said
        assert len(read_examples(Chat(loaded.tokenizer, vocab_size=size + 1), settings, 128, lambda _: None)) == every
    with pytest.raises(ConfigError, match=rf"p\.jsonl:3: token {size} \('<\|image\|>'\); expected text without it"):
        require_embeddings([1, size], Chat(loaded.tokenizer, vocab_size=size), f"{source}:3")


def test_what_the_chat_template_refuses_is_left_out_and_counted(loaded: LoadedTarget, tmp_path: Path) -> None:
    """One row that cannot be shown does not stop a run; a template that cannot show most rows does."""
    user, answer = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
    loaded.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
        "{% for m in messages if m.content != 'hidden' %}{{ m.role[0] | upper }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    system, hidden = {"role": "system", "content": "s"}, {**answer, "content": "hidden"}
    rows = [[{**user, "content": letter}, answer, {**user, "weight": 0}, {**answer, "weight": 0}] for letter in "abcd"]
    rows[1:1] = [[system, user, answer], [{**user, "content": "ef"}, hidden], [system, user, answer, user]]
    settings = source_of(write(tmp_path / "p.jsonl", [{"messages": row} for row in rows]), 10, 9, 9, response="text")
    for _ in range(2):  # the second time from the cache
        said: list[str] = []
        assert len(read_examples(Chat(loaded.tokenizer), settings, 128, said.append)) == 4
        assert said == [
            f"{settings.prompts}: 2 of 7 are refused by the chat template (no system, please): left out",
            f"{settings.prompts}: 1 of 7 have an answer that the chat template does not show after the messages before "
            "it: left out",
            f"{settings.prompts}: 4 answers are marked by weight, train, loss, masked: not trained",
            f"{settings.prompts}: 4 answers are shown without a token that ends them: not trained to end",
        ]
    asked = settings.model_copy(update={"response": "target"})
    assert len(read_examples(Chat(loaded.tokenizer), asked, 128, lambda _: None)) == 5
    more = [{"messages": row} for row in [*rows, rows[1], rows[1]]]
    for stopped, of, count in ((more, "5 of 9", 10), (more + more[1:2] * 200, "96 of 100", 300)):
        settings = source_of(write(tmp_path / "p.jsonl", stopped), count, 9, 9, response="text")
        match = rf"{of} rows cannot be used, such as .*p\.jsonl:{9 if count == 10 else 100}: .* \(no system, please\)"
        with pytest.raises(ConfigError, match=match):
            read_examples(Chat(loaded.tokenizer), settings, 128, lambda _: None)


def test_what_is_far_too_long_is_not_tokenised(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    longest: list[int] = []

    class Watched(type(tiny_tokenizer)):
        def __call__(self, text: str, **options: object) -> object:
            longest.append(len(text))
            return super().__call__(text, **options)

    tiny_tokenizer.__class__ = Watched
    source = write(tmp_path / "p.jsonl", [{"prompt": text} for text in ("abc", "a" * 10_000_000)])
    said: list[str] = []
    assert len(read_examples(Chat(tiny_tokenizer), source_of(source, 10, 8, 8), None, said.append)) == 1
    assert said == [f"{source}: 1 of 2 have more than 2,048 characters: left out"]
    assert max(longest) == 3


def test_conversations_that_continue_differently_are_no_twins(loaded: LoadedTarget, tmp_path: Path) -> None:
    chats = [{"turns": ["ab", later]} for later in ("cd", "ef", "ef")]
    source, chat = write(tmp_path / "p.jsonl", chats), Chat(loaded.tokenizer, "plain")
    for every_turn, left in ((False, 1), (True, 2)):
        settings = source_of(source, 10, 9, 9, turns="all" if every_turn else "first")
        assert len(read_examples(chat, settings, 128, lambda _: None)) == left


def test_messages_of_tables_may_have_dates(loaded: LoadedTarget, tmp_path: Path) -> None:
    """WildChat's have the time of each message."""
    now = datetime(2023, 4, 9)
    user, answer = ({"role": role, "content": "ab", "timestamp": now} for role in ("user", "assistant"))
    Dataset.from_list([{"conversation": [user, answer, user]}]).to_parquet(tmp_path / "p.parquet")
    settings = source_of(str(tmp_path / "p.parquet"), 10, 9, 9, turns="all")
    (row,) = read_examples(Chat(loaded.tokenizer, "plain"), settings, 128, lambda _: None)
    turns = json.loads(row["turns"])["turns"]
    assert [[message["timestamp"] for message in turn] for turn in turns] == [["2023-04-09 00:00:00"]] * 2


def test_a_file_that_changed_is_read_again(loaded: LoadedTarget, tmp_path: Path) -> None:
    chat = Chat(loaded.tokenizer)
    for texts in (["abc"], ["abc", "abcd"]):
        source = write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
        assert len(read_examples(chat, source_of(source, 10, 9, 9), 128, lambda _: None)) == len(texts)


def test_examples_are_read_again_with_another_tokenizer(
    loaded: LoadedTarget, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Its vocabulary may be the same: the token that ends an answer and the tokens around a text are not in it."""
    source = write(tmp_path / "p.jsonl", [{"prompt": "ab", "response": "cd"}])

    def read(tokenizer: Any) -> list[int]:
        settings = source_of(source, 10, 9, 9, response="text")
        return read_examples(Chat(tokenizer), settings, 128, lambda _: None)[0]["input_ids"]

    again = load_tokenizer(str(tiny_target_folder))[0]
    again("ab", padding="max_length", max_length=9, truncation=True)
    assert read(loaded.tokenizer) == read(again) == [2, 3, 4, 5, 1]
    assert len(list((tmp_path / "cache" / "examples").glob("*/rows.arrow"))) == 1, "a tokenizer that was loaded again"
    again.eos_token = "9"
    assert read(again) == [2, 3, 4, 5, 63]
    again.backend_tokenizer.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", 63)])
    assert read(again) == [63, 2, 3, 4, 5, 63]


def test_conversations_that_begin_alike_are_held_out_together() -> None:
    rows = [
        {"input_ids": [i, i], "spans": [], "opening": opening, "turns": "", "images": ""}
        for i, opening in enumerate(["a", "b", "a", "c", "b", "d"])
    ]
    examples = Dataset.from_list(rows, features=FEATURES)
    kept, heldout = hold_out(examples, 2)
    assert kept["opening"] == ["a", "a", "c"]
    assert sorted(prompt.input_ids for prompt in heldout) == [[1, 1], [5, 5]]
    with pytest.raises(ConfigError, match=r"holds 4 usable prompts; expected more than evaluation\.count=4"):
        hold_out(examples, 4)


def test_packing_keeps_every_sample_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (200,), generator=generator).tolist()
    samples = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]
    rows = Dataset.from_list([{"input_ids": ids, "spans": [[0, 1], [0, len(ids)]]} for ids in samples])
    packed = pack(rows, 64)
    assert sum(lengths) / (64 * len(packed)) > 0.97
    found = []
    for row in packed:
        assert len(row["input_ids"]) == sum(row["documents"]) <= 64
        begin, spans = 0, []
        for length in row["documents"]:
            found.append(row["input_ids"][begin : begin + length])
            spans.append([begin + 1, begin + length])
            begin += length
        assert row["spans"] == spans, "a document's first token has nothing before it"
    assert sorted(found) == sorted(samples)
    assert len(pack(rows, 10)) >= sum(length > 5 for length in lengths), "longer ones have rows of their own"


def test_length_statistics() -> None:
    rows = Dataset.from_list([{"input_ids": list(range(n)), "spans": [[1, 2], [3, n]]} for n in range(4, 104)])
    statistics = length_statistics(rows)
    assert statistics == LengthStatistics(samples=100, tokens=5350, trained=5150, p5=9, p50=54, p95=99, longest=103)
