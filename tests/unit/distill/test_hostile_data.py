"""Untrusted prompt files and chat templates: refused with the line, or left out, and never waited for."""

import gzip
import json
import os
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import conversation
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import read_examples
from draftsmith.distill.samples import samples_of
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError

ROW = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}


def refusal(source: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        print([conversation(place, row) for place, row in read_source(str(source))])
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[" * 100_000, "p.jsonl:1: not JSON (more than 64 levels)"),
        ('{"prompt": "\\ud800"}', "p.jsonl:1: not JSON (unpaired surrogate"),
        ('{"messages": [{"from": [], "value": []}]}', "p.jsonl:1: message 1 is from []"),
        ('{"prompt": ' + "1" * 5000 + "}", "p.jsonl:1: not JSON (Exceeds the limit"),
    ],
)
def test_lines_that_are_refused(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    assert why in refusal(file)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "a"}\n' * 1000))
    packed[20:30] = bytes(10)
    (tmp_path / "p.jsonl.gz").write_bytes(packed)
    assert "cannot be read as text" in refusal(tmp_path / "p.jsonl.gz")
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("[]")
    assert "expected a file, a folder or a data set of the Hub" in refusal(tmp_path / "saved")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not a regular file" in refusal(tmp_path / "pipe.jsonl")


def test_what_is_far_too_long_is_not_tokenised(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    longest: list[int] = []

    class Watched(type(tiny_tokenizer)):
        def __call__(self, text: str, **options: object) -> object:
            longest.append(len(text))
            return super().__call__(text, **options)

    tiny_tokenizer.__class__ = Watched
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "a" * 10_000_000)))
    said: list[str] = []
    data = DataSection(prompts=str(source), count=10, prompt_tokens=8, response_tokens=8)
    rows = read_examples(Chat(tiny_tokenizer), data, None, said.append)
    assert len(rows) == 1
    assert said == [f"{source}: 1 of 2 have more than 2,048 characters: left out"]
    assert max(longest) == 3


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('') }}", "refuses it (TemplateError)"),
        ("{{ 1 / 0 }}", "refuses it (division by zero)"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "refuses it (maximum recursion depth"),
        ("{% generation %}{% endgeneration %}", "the chat template"),
        ('{{ "\\ud800" }}{{ messages[0].content }}{{ messages | length }}', "unpaired surrogate"),
        ("{{ messages[0].content * 4000000 }}", "characters; expected at most"),
    ],
)
def test_templates_that_are_refused(template: str, why: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tiny_tokenizer.chat_template = template
    asked = conversation("f:1", ROW)
    with pytest.raises(ConfigError) as refused:
        Chat(tiny_tokenizer).prompt(asked) if "generation" not in template else samples_of(
            Chat(tiny_tokenizer), asked, 9
        )
    assert str(refused.value).startswith("f:1: ")
    assert why in str(refused.value)
