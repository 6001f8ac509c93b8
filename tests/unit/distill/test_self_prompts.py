"""Prompts that the target writes itself."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from draftsmith.config import section_of
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection, Kind, SourceSection
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.distill.self_prompts import KINDS, has_signs, turn_header, write_self_prompts
from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import eos_tokens
from draftsmith.storage import cache_dir

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}Q{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}aQ{% endif %}"
)


@pytest.fixture
def target(tiny_target_folder: Path) -> LoadedTarget:
    return load_target(str(tiny_target_folder))


def chat_of(target: LoadedTarget, template: str | None = TEMPLATE) -> Chat:
    target.tokenizer.chat_template = template
    return Chat(target.tokenizer, ends=eos_tokens(target.model.config))


def section(longest: int, count: int) -> DataSection:
    return DataSection(prompts="self", prompt_tokens=longest, count=count, batch_size=8)


def written(target: LoadedTarget, count: int, *, seed: int = 0, longest: int = 40) -> list[str]:
    file = write_self_prompts(target, chat_of(target), section(longest, count), seed, progress=False)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
    return [row["messages"][0]["content"] for row in rows]


def test_the_header_is_what_the_template_shows_before_the_users_text(target: LoadedTarget) -> None:
    chat, bos = chat_of(target), target.tokenizer.convert_tokens_to_ids("9")
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", bos)])
    assert target.tokenizer.decode(turn_header(chat)) == "uQ", "the template has the special tokens"


def test_a_kind_is_a_system_prompt_before_the_turn(target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have room for as many tokens as without it, and are others; the file holds the users' turns alone."""
    chat, longest = chat_of(target), 40
    monkeypatch.setitem(KINDS, "code", "abc")  # the target reads 128 tokens
    plain, coded = turn_header(chat), turn_header(chat, "code")
    assert target.tokenizer.decode(coded) == "sQabc<eos>" + str(target.tokenizer.decode(plain))
    said: list[str] = []
    data = section(longest, 6).model_copy(update={"kind": "code"})
    file = write_self_prompts(target, chat, data, 0, progress=False, say=said.append)
    rows = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert [[message["role"] for message in row] for row in rows] == [["user"]] * 6
    assert [row[0]["content"] for row in rows] != written(target, 6)
    signs = sum(has_signs("code", row[0]["content"]) for row in rows)
    assert said[-1] == f"data: self code: {signs} of 6 prompts have words of code"
    assert write_self_prompts(target, chat, data, 0, progress=False, say=said.append) == file
    assert said[-1] == said[-2], "the next run prints it, too"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Fix this:\n```\nx = 1\n```", ["code"]),
        ("Tom has 3 red and 4 blue marbles. How many are there?", ["math"]),
        ("What is 12 * 7?", ["math"]),
        ("I was born in 1990 in a barcode factory.", []),
        ("A poem about autumn, please", ["writing"]),
        ("Summarize this article", ["extraction"]),
    ],
)
def test_words_tell_kinds(text: str, kinds: list[Kind]) -> None:
    assert [kind for kind in KINDS if has_signs(kind, text)] == kinds


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}uQ{{ m.content }}{% endfor %}", "shows no system prompt"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}uQ", "kind=math.*no s"),
    ],
)
def test_a_template_without_system_prompts_has_no_kinds(target: LoadedTarget, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        turn_header(chat_of(target, template), "math")


def test_kinds_are_of_prompts_that_the_target_writes() -> None:
    for given in ({"prompts": "a.jsonl", "kind": "code"}, {"prompts": [SourceSection(prompts="a.jsonl", kind="code")]}):
        with pytest.raises(ConfigError, match=r"kind=code with prompts=a\.jsonl; expected it with prompts='self' only"):
            section_of(DataSection, lambda path: ".".join(map(str, path)), given)
    mixed = DataSection(prompts=[SourceSection(prompts="self", kind=kind) for kind in ("code", "math")], count=10)
    assert [(source.kind, source.count) for source in mixed.sources] == [("code", 5), ("math", 5)]


def test_prompts_are_distinct_and_fit_and_belong_to_the_seed(target: LoadedTarget) -> None:
    prompts = written(target, 12)
    assert len({*filter(None, prompts)}) == 12
    assert all(len(chat_of(target).tokenizer(text)["input_ids"]) + len("uQaQ") + 1 <= 40 for text in prompts)
    assert written(target, 12) == prompts
    assert written(target, 12, seed=1) != prompts


def test_a_larger_count_keeps_the_prompts(target: LoadedTarget) -> None:
    few = written(target, 6)
    assert written(target, 20)[:6] == few


def test_every_text_is_counted_as_usable_or_with_the_reason_why_not(target: LoadedTarget) -> None:
    said: list[str] = []
    write_self_prompts(target, chat_of(target), section(24, 6), 0, progress=False, say=said.append)
    texts = [Dataset.from_file(str(rows))["input_ids"] for rows in cache_dir().glob("samples/*/*/rows-1.arrow")]
    assert max(map(len, chain.from_iterable(texts))) == 24, "header and text together"
    (line,) = said
    words = r"(\d+) (?:texts|usable|without|with|empty|repeated|longer)"
    sampled, *numbers = map(int, re.findall(words, line))
    assert "without an end" in line
    assert numbers[0] >= 6
    assert sum(numbers) == sampled


@pytest.mark.parametrize(
    ("template", "longest", "message"),
    [
        (None, 40, "without a chat template; expected a file of prompts"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 40, "shows nothing before the user's text"),
        ("{{ raise_exception('system first') }}", 40, r"refuses these turns \(.*system first"),
        (TEMPLATE, 2, "expected more than the 2 tokens of"),
        (TEMPLATE, 3, "texts 0 are usable"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    target: LoadedTarget, template: str | None, longest: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_self_prompts(target, chat_of(target, template), section(longest, 4), 0, progress=False)


def test_a_target_too_short_for_a_kind_is_refused(target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "code", 130 * "a")
    data = section(40, 4).model_copy(update={"kind": "code"})
    with pytest.raises(ConfigError, match="a target that reads more than 13"):
        write_self_prompts(target, chat_of(target), data, 0, progress=False)


def test_a_template_of_the_tokenizer_alone_is_used_with_its_options(target: LoadedTarget) -> None:
    target.tokenizer.chat_template = "{{ word }}{% for m in messages %}u{{ m.content }}{% endfor %}"
    chat = Chat(target.tokenizer, options={"word": "Z"})
    assert target.tokenizer.decode(turn_header(chat)) == "Zu"
