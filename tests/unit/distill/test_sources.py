"""Formats of conversations, and the tokens of them that are trained on."""

import bz2
import gzip
import json
import lzma
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from piece_tokenizer import make_byte_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.chat_template import Chat, TemplateRefusal, template_text
from draftsmith.distill.conversation import conversation
from draftsmith.distill.encoded_text import EncodedText
from draftsmith.distill.samples import samples_of
from draftsmith.distill.sources import has_answers, read_source, source_stamp
from draftsmith.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
PLAIN = (
    "{% for m in messages %}{{ m.role[0]|upper }}{{ m.content }}E{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0]|upper }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}E"
    "{% endgeneration %}{% else %}{{ m.content }}E{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


def read(file: Path) -> list[tuple[str, dict[str, Any]]]:
    return list(read_source(str(file)))


def _damaged_gzip() -> bytes:
    packed = bytearray(gzip.compress(b'{"prompt": "a"}\n' * 1000))
    packed[20:30] = bytes(10)
    return bytes(packed)


BAD_FILES: dict[str, tuple[str, bytes | None]] = {
    "there is none": ("p.jsonl", None),
    "is empty": ("p.jsonl", b"\n\n"),
    "p.jsonl:2: not JSON": ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n'),
    "p.jsonl:3: list": ("p.jsonl", b'{"prompt": "a"}\n\n[1]\n'),
    "p.jsonl cannot be read as text": ("p.jsonl", b"\xff\xfe{}"),
    "p.jsonl:1: not JSON (more than 64 levels)": ("p.jsonl", b"[" * 100_000),
    "p.jsonl:1: not JSON (unpaired surrogate": ("p.jsonl", b'{"prompt": "\\ud800"}'),
    "p.jsonl:1: not JSON (Exceeds the limit": ("p.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}"),
    "p.jsonl:1: message 1 is from []": ("p.jsonl", b'{"messages": [{"from": [], "value": []}]}'),
    "p.jsonl.gz cannot be read as text": ("p.jsonl.gz", _damaged_gzip()),
    "p.json:2: int": ("p.json", b"[{}, 3]"),
    "p.parquet; expected a file, a folder or a data set of the Hub": ("p.parquet", b"no table"),
    "p.csv:2: more cells than": ("p.csv", b"a\n1,2\n"),
    "p.csv:3: not CSV": ("p.csv", b'a\n1\n"2'),
    "p.jsonl.zst is compressed; expected it decompressed, or a text as .gz": ("p.jsonl.zst", b"\xff"),
    "p.zip is compressed; expected it decompressed, or a text as .gz": ("p.zip", b"\xff"),
}


@pytest.mark.parametrize("said", BAD_FILES)
def test_bad_files_are_refused_with_the_line(said: str, tmp_path: Path) -> None:
    name, content = BAD_FILES[said]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        print([conversation(place, row) for place, row in read(tmp_path / name)])
    assert said in str(refused.value)


def test_folders_and_pipes_that_hold_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no file that ends in \.jsonl"):
        read(tmp_path)
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a file, a folder or a data set of the Hub"):
        read(tmp_path / "saved")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path / "pipe.jsonl")


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "array.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as out:
        out.write(lines)
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    for name in ("a.jsonl", "lines.json", "array.json", "b.jsonl.gz", "c.parquet"):
        found = read(tmp_path / name)
        assert [row for _, row in found] == rows, name
        assert found[1][0] == f"{tmp_path / name}:2"
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbffirst\r\n\n  \nsecond \n")
    assert read(tmp_path / "d.txt") == [
        (f"{tmp_path / 'd.txt'}:1", {"text": "first"}),
        (f"{tmp_path / 'd.txt'}:4", {"text": "second "}),
    ]
    assert len(read(tmp_path)) == 12, "a folder is all of its files"
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert [row for _, row in read(tmp_path / "saved")] == rows


def prompts_in(folder: Path, **how: str) -> list[str]:
    return [row["prompt"] for _, row in read_source(str(folder), **how)]


def write_rows(folder: Path, *names: str) -> None:
    """Write files of one row, whose prompt is the file's name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"prompt": name}))


def test_hidden_files_and_descriptions_of_data_sets_are_not_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, "rows.jsonl", "more/rows.jsonl", "config.json", "more/dataset_infos.json", "dataset_info.json")
    kept = ["more/rows.jsonl", "rows.jsonl"]
    assert prompts_in(tmp_path) == kept
    before = source_stamp(str(tmp_path))
    write_rows(
        tmp_path, ".ipynb_checkpoints/rows-checkpoint.jsonl", ".rows.jsonl", "__MACOSX/rows.jsonl", "more/.x/a.json"
    )
    assert prompts_in(tmp_path) == kept
    assert source_stamp(str(tmp_path)) == before
    visible = tmp_path / ".hidden" / "data"  # named by the user
    write_rows(visible, "rows.jsonl")
    assert prompts_in(visible) == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["test.jsonl", "train.jsonl"], {"train": ["train.jsonl"], "test": ["test.jsonl"]}),
        (["dev.jsonl", "rows.jsonl"], {"train": ["rows.jsonl"], "validation": ["dev.jsonl"], "dev": ["dev.jsonl"]}),
        (["test/a.jsonl", "train/a.jsonl"], {"train": ["train/a.jsonl"], "test": ["test/a.jsonl"]}),
        (["latest.json", "contest/a.jsonl"], {"train": ["contest/a.jsonl", "latest.json"], "latest": ["latest.json"]}),
        (
            ["test_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl", "train_sft-00000-of-00001-ab.jsonl"],
            {"train_sft": ["train_sft-00000-of-00001-ab.jsonl"], "test_sft": ["test_sft-00000-of-00001.jsonl"]},
        ),
        (["a-eval.v2.jsonl", "a-train.v2.jsonl"], {"train": ["a-train.v2.jsonl"], "evaluation": ["a-eval.v2.jsonl"]}),
    ],
)
def test_files_of_other_splits_are_not_read(names: list[str], splits: dict[str, list[str]], tmp_path: Path) -> None:
    """Else the rows of a test split are trained on."""
    folder = tmp_path / "test"  # the folder's own name is no split
    write_rows(folder, *names)
    for split, expected in splits.items():
        assert prompts_in(folder, split=split) == expected
        assert has_answers(str(folder), None, split) is False
    assert len({str(source_stamp(str(folder), None, split)) for split in splits}) == len(splits)
    with pytest.raises(ConfigError, match=r"test has no file of the split 'train_x'; expected one of \w+"):
        prompts_in(folder, split="train_x")


def test_a_saved_data_set_is_read_by_split_and_a_folder_by_subset(tmp_path: Path) -> None:
    data = {name: Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    DatasetDict(data).save_to_disk(tmp_path / "saved")
    assert [prompts_in(tmp_path / "saved", split=name) for name in data] == [["train"], ["test"]]
    with pytest.raises(ConfigError, match="saved has no split 'dev'; expected one of train, test"):
        prompts_in(tmp_path / "saved", split="dev")
    write_rows(tmp_path / "gsm", "main/train.jsonl", "socratic/train.jsonl", "socratic/test.jsonl")
    assert prompts_in(tmp_path / "gsm", subset="socratic") == ["socratic/train.jsonl"]
    for source, message in {
        "gsm": r"subset 'x'; expected one of \['main', 'socratic'\]",
        "gsm/main/train.jsonl": "is a f",
    }.items():
        with pytest.raises(ConfigError, match=message):
            prompts_in(tmp_path / source, subset="x")


def test_cells_of_csv_are_text(tmp_path: Path) -> None:
    """pandas would read some words as missing, and numbers and truth values without their spelling."""
    cells = ["None", "NA", "null", "nan", "N/A", "007", "1.0", "True", "yes, no", 'a "b"', "two\nlines", "#"]
    (tmp_path / "p.csv").write_text(
        "prompt,completion,system\n"
        + "".join(f'"q {n}","{cell.replace(chr(34), 2 * chr(34))}",\n' for n, cell in enumerate(cells))
    )
    assert [row for _, row in read(tmp_path / "p.csv")] == [
        {"prompt": f"q {n}", "completion": cell} for n, cell in enumerate(cells)
    ]
    assert has_answers(str(tmp_path / "p.csv"))
    assert read(tmp_path / "p.csv")[0][0] == f"{tmp_path / 'p.csv'}:2"
    (tmp_path / "p.csv").write_text("\ufeffprompt,completion\r\na,b\r\n\r\nc\r\n", newline="")
    assert [row for _, row in read(tmp_path / "p.csv")] == [{"prompt": "a", "completion": "b"}, {"prompt": "c"}]


def test_compressed_texts_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    texts = {".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows), ".csv": "prompt\na\nb\n"}
    for end, opener in {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.items():
        for kind, text in texts.items():
            with opener(tmp_path / f"p{kind}{end}", "wt") as out:
                out.write(text)
            assert [row for _, row in read(tmp_path / f"p{kind}{end}")] == rows
        damaged = tmp_path / f"q.txt{end}"
        damaged.write_bytes((tmp_path / f"p.csv{end}").read_bytes()[:-6])
        with pytest.raises(ConfigError, match=r"cannot be read as text"):
            read(damaged)
        damaged.unlink()
    assert len(read(tmp_path)) == 18


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]},
        {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "tool_calls": None}]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "response": "cd"},
        {"turns": ["ab"], "answer": "cd"},
        {"messages": [{"role": "user", "content": parts("a", "b")}, {"role": "assistant", "content": parts("cd")}]},
        {"prompt": [{"from": "human", "value": parts("ab")}], "chosen": [{**ANSWER, "content": parts("c", "d")}]},
        {"conversations": [{"role": "human", "content": "ab"}, {"role": "gpt", "content": "cd"}]},
        {"messages": [{"role": "User", "content": "ab"}, {"role": " Assistant", "content": "cd"}]},
        {"messages": [{"role": "user", "value": "ab"}, {"from": "model", "content": "cd"}]},
        {"messages": json.dumps([USER, ANSWER])},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
        {"turns": '["ab"]', "answer": "cd"},
        {"prompt": "ab", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "x"}]},
        {"prompt": [USER], "chosen": [USER, ANSWER]},
        {"chosen": [USER, ANSWER]},
        {"prompt": "ab", "completion": [ANSWER]},
        {"messages": [USER, ANSWER], "answer": "x"},
        {"messages": {"role": ["user", "assistant"], "content": ["ab", "cd"], "name": None}},
        {"conversations": {"from": ["human", "gpt"], "value": ["ab", "cd"], "weight": [1, 1.0]}},
        {"prompt": USER, "completion": ANSWER},
        {"messages": [USER, {**ANSWER, "tool_calls": [], "function_call": None}]},
        {"messages": [USER, {**ANSWER, "tool_calls": "[]", "train": True, "masked": False}]},
        {"system": " ", "prompt": "ab", "response": "cd"},
    ],
)
def test_layouts_of_conversations(row: dict[str, Any]) -> None:
    found = conversation("f:1", row)
    assert found.messages == [USER, ANSWER]
    assert found.asked == [USER]


@pytest.mark.parametrize(
    "row",
    [
        {"system": "s", "messages": [USER, ANSWER]},
        {"system_prompt": "s", "messages": [USER, ANSWER]},
        {"system": "s", "system_prompt": "s ", "conversations": [USER, ANSWER]},
        {"system": "s", "messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        {"system": "s", "messages": [{"role": "system", "content": ""}, USER, ANSWER]},
        {"system": "", "messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        {"system_prompt": "s", "question": "ab", "response": "cd"},  # OpenOrca
        {"system": "s", "turns": ["ab"], "answer": "cd"},
        {"system": "s", "prompt": [USER], "chosen": [USER, ANSWER]},
    ],
)
def test_a_system_message_is_read_once(row: dict[str, Any]) -> None:
    assert conversation("f:1", row).messages == [{"role": "system", "content": "s"}, USER, ANSWER]


def test_all_messages_of_an_answer_are_read() -> None:
    """TRL's conversational prompt and completion, with a tool."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result, last = {"role": "tool", "content": "x"}, {**ANSWER, "reasoning_content": "r"}
    for answer in ([call], [call, result, last]):
        for row in ({"prompt": [USER], "completion": answer}, {"messages": [USER, *answer]}):
            assert conversation("f:1", row).messages == [USER, *answer]


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("cd", {}),
        (["c", "d"], {}),
        ({"text": "cd"}, {}),
        ([{"text": "cd"}], {}),
        ([{"type": "output_text", "text": "cd"}], {}),
        ([{"type": "text", "text": None}, {"type": "input_text", "text": "cd"}], {}),
        ([{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "cd"}], {"reasoning_content": "r"}),
        (None, {"content": ""}),
    ],
)
def test_layouts_of_text_in_a_message(content: Any, read: dict[str, Any]) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": content}]}
    assert conversation("f:1", row).messages == [USER, {**ANSWER, **read}]


@pytest.mark.parametrize(
    "more", [{"reasoning": "r"}, {"reasoning": "r", "reasoning_content": ""}, {"reasoning_content": "r"}]
)
@pytest.mark.parametrize("content", ["cd", "", None])
def test_names_of_thinking(content: str | None, more: dict[str, str], tmp_path: Path) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": content, "tool_calls": None, **more}]}
    Dataset.from_list([row]).to_parquet(tmp_path / "p.parquet")
    for found in (row, *(row for _, row in read(tmp_path / "p.parquet"))):
        answer = conversation("f:1", found).messages[1]
        assert (answer["content"], answer["reasoning_content"]) == (content or "", "r")


@pytest.mark.parametrize(
    "text", ["\n[{}]\n", " [\n{}\n]", "\ufeff[{}]", "\ufeff{}\n", "{}\r\n\r\n{}\r\n", "\ufeff \n[{}]"]
)
def test_arrays_after_white_space_and_byte_order_marks(text: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "response": "b"}
    (tmp_path / "p.json").write_bytes(text.replace("{}", json.dumps(row)).encode())
    assert [found for _, found in read(tmp_path / "p.json")] == [row] * text.count("{}")


def test_arguments_of_tool_calls_are_objects() -> None:
    """OpenAI's format has them as text, which templates would write as text inside a text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo", "days": null}'}}
    for unchanged in ("", "{", {"city": "Oslo", "days": None}):
        other = {**call, "function": {"name": "f", "arguments": unchanged}}
        row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call, other]}]}
        found = conversation("f:1", row).messages[1]["tool_calls"]
        assert [each["function"]["arguments"] for each in found] == [{"city": "Oslo", "days": None}, unchanged]
        for calls in (json.dumps([call, other]), [json.dumps(call), json.dumps(other)]):
            as_text = {"role": "assistant", "content": "", "tool_calls": calls}
            assert conversation("f:1", {"messages": [USER, as_text]}).messages[1]["tool_calls"] == found
    early = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    (found,) = conversation("f:1", {"messages": [USER, early]}).messages[1]["tool_calls"]
    assert found["function"] == {"name": "f", "arguments": {"x": 1}}


def test_tables_do_not_give_tools_the_arguments_of_others(tmp_path: Path) -> None:
    """In a table every object has the keys of all, with nulls for those that it does not have."""

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "properties": {key: {"enum": ["a", None]} for key in arguments}}
        made = {"function": {"name": name, "arguments": arguments}}
        call = {"role": "assistant", "content": "", "tool_calls": [made]}
        return {"messages": [USER, call], "tools": [{"function": {"name": name, "parameters": schema}}]}

    rows = [row("weather", {"city": "Oslo"}), row("book", {"flight": "X1", "seats": 2}), {"messages": [USER, ANSWER]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    assert [found for _, found in read(tmp_path / "p.parquet")] == rows


def test_layouts_of_text() -> None:
    assert conversation("f:1", {"prompt": "ab", "response": "cd"}).messages == []
    assert conversation("f:1", {"turns": ["b", "c"]}).turns == [
        [{"role": "user", "content": "b"}],
        [{"role": "user", "content": "c"}],
    ]
    system = conversation("f:1", {"system": "s", "conversations": [{"from": "human", "value": "ab"}]})
    assert system.asked == [{"role": "system", "content": "s"}, USER]


@pytest.mark.parametrize(
    ("row", "text", "answer", "unused"),
    [
        ({"instruction": "ab", "input": "", "output": "cd", "text": "Q: ab A: cd"}, "ab", "cd", {"text"}),  # Alpaca
        ({"question": "ab", "answer": "cd", "text": "a passage"}, "ab", "cd", {"text"}),
        ({"instruction": "", "input": "ab", "output": "cd"}, "ab", "cd", set()),
        ({"input": "ab", "output": "cd"}, "ab", "cd", set()),
        ({"prompt": "ab", "response": "cd"}, "ab", "cd", set()),
        ({"question": "ab", "answer": "cd"}, "ab", "cd", set()),
        ({"instruction": "ab", "input": "x", "output": "cd"}, "ab\n\nx", "cd", set()),
        ({"text": "ab"}, "ab", None, set()),
        ({"prompt": "ab", "input": "x", "completion": "cd"}, "ab", "cd", {"input"}),
        ({"text": "ab", "output": "cd"}, "ab", "cd", set()),
        ({"text": "ab cd", "output": "cd"}, "ab cd", None, {"output"}),
        ({"prompt": "ab", "answer": 4}, "ab", "4", set()),
        ({"prompt": "ab", "answer": 4, "output": "cd"}, "ab", "cd", {"answer"}),
        ({"prompt": "ab", "answer": ["cd"]}, "ab", "cd", set()),
        ({"prompt": "ab", "response": [{"type": "text", "text": "cd"}]}, "ab", "cd", set()),
        ({"prompt": "ab", "response": {"text": "cd"}}, "ab", "cd", set()),
        ({"prompt": "ab", "answer": ["cd", "ef"]}, "ab", None, {"answer"}),
        ({"prompt": "ab", "answer": {"value": "cd", "aliases": []}}, "ab", "cd", set()),  # TriviaQA
        ({"prompt": "ab", "answer": {"start": [1], "texts": ["cd"]}}, "ab", None, {"answer"}),
        ({"prompt": "ab", "answer": True}, "ab", None, {"answer"}),
        ({"prompt": "ab", "completion": " "}, "ab", None, set()),
        ({"prompt": "ab", "tools": [{"name": "f"}], "completion": "cd", "id": 3}, "ab", "cd", {"tools", "id"}),
        ({"text": "ab", "system": "s"}, "ab", None, {"system"}),
    ],
)
def test_every_column_is_read_or_named(row: dict[str, Any], text: str, answer: str | None, unused: set[str]) -> None:
    if "system" in row:  # a text that contains its answer has no place for it
        row = {**row, "output": "b"}
        unused = {*unused, "output"}
    found = conversation("f:1", row)
    assert (found.text, found.answer, found.unused) == (text, answer, unused)


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": "s"}],
        ["s"],
        {"role": "system", "content": "s"},
        {"content": [{"type": "text", "text": "s"}]},
        {"type": "text", "text": "s"},
        [{"role": "system", "content": "s"}],
    ],
)
def test_a_system_column_of_other_forms_is_read(system: Any) -> None:
    found = conversation("f:1", {"system": system, "messages": [USER, ANSWER], "answer": "x"})
    assert found.messages == [{"role": "system", "content": "s"}, USER, ANSWER]
    assert found.unused == {"answer"}, "the messages end with an answer"
    assert conversation("f:1", {"system": system, "chosen": [USER, ANSWER]}).messages == found.messages
    with pytest.raises(ConfigError, match=r"f:1: 'system': content of int; expected text or parts with a type"):
        conversation("f:1", {"system": 3, "messages": [USER, ANSWER]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "x"}, r"f:4: keys \['answer'\]; expected a non-empty 'messages'"),
        ({"prompt": " "}, "expected a non-empty"),
        ({"turns": [" "]}, "expected a non-empty"),
        ({"messages": ["a"]}, "f:4: message 1 is str"),
        ({"messages": [{"role": "user"}]}, "f:4: message 1 has keys"),
        ({"conversations": [{"from": "nobody", "value": "a"}]}, "f:4: message 1 is from 'nobody'; expected one of h"),
        ({"messages": [USER, {"role": "narrator", "content": "a"}]}, "f:4: message 2 is from 'narrator'; expected one"),
        ({"messages": [{"role": 5, "content": "a"}]}, "f:4: message 1 is from 5; expected one of"),
        ({"messages": [{**USER, "content": 5}]}, "f:4: message 1: content of int; expected text or parts"),
        (
            {"messages": [{**USER, "content": [{"type": "video", "video": "a"}]}]},
            "f:4: message 1: a part of type 'vide",
        ),
        ({"messages": [{**USER, "content": [{"type": "tool_use", "text": "a"}]}]}, "a part of type 'tool_use' with k"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": {}}]}]}, "a part of type 'text' with keys"),
        ({"messages": str([USER])}, "f:4: 'messages' is a list of messages as Python text; expected JSON"),
        ({"prompt": str([USER])}, "f:4: 'prompt' is a list of messages as Python text; expected JSON"),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}, USER]}, "f:4: a system message and another"),
        ({"system": "s", "system_prompt": "t", "prompt": "ab"}, "f:4: 'system' and 'system_prompt' differ"),
        ({"messages": []}, "f:4: keys .*; expected a non-empty"),
        ({"messages": {"role": [], "content": []}}, "f:4: keys .*; expected a non-empty"),
        ({"messages": {"role": ["user"], "content": ["a", "b"]}}, "'messages' has lists of 1 of 'role', 2 of 'conten"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "x"}]}, "f:4: message 2: tool_calls='x'; expected a list of obj"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"f:4: message 2: weight=0\.5; expected 0 or 1"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "f:4: message 2: train='no'; expected 0 or 1, or true or"),
        ({"messages": [USER, {**ANSWER, "train_detail": []}]}, "f:4: message 2: 'train_detail' marks parts of a mess"),
        ({"messages": [USER], "tools": "{"}, "f:4: 'tools' is not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "f:4: 'tools' is dict; expected a list"),
    ],
)
def test_rows_that_are_no_conversation_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        conversation("f:4", row)


def encoded(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], **options: Any) -> list[tuple[str, list[str]]]:
    """Return the text of each sample, and of each of its spans."""
    samples = samples_of(Chat(tokenizer, **options), conversation("f:1", row), 9)
    return [(shown(tokenizer, s.input_ids), [shown(tokenizer, s.input_ids[a:b]) for a, b in s.spans]) for s in samples]


def shown(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids).replace("<eos>", ".")


def test_answers_of_text(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert encoded(tiny_tokenizer, {"prompt": "ab", "response": "cd"}) == [("abcd.", ["cd."])]
    with pytest.raises(ConfigError, match=r"f:1: messages, and .* no chat template; expected --chat-template .*plain"):
        encoded(tiny_tokenizer, {"messages": [USER, ANSWER]})
    assert encoded(tiny_tokenizer, {"messages": [USER, ANSWER]}, template="plain") == [("abcd.", ["cd."])]
    assert encoded(tiny_tokenizer, {"text": "abcdef"}) == [("abcdef", ["def"])]
    assert encoded(tiny_tokenizer, {"text": "a" * 30}) == [("a" * 30, ["a" * 21])]
    asked = {"prompt": [USER, ANSWER, USER]}
    for row in ({"prompt": "ab"}, {"messages": [USER]}, asked, {"prompt": "ab", "response": ""}):
        with pytest.raises(ConfigError, match=r"f:1: no answer; data\.response='text' expected"):
            encoded(tiny_tokenizer, row)


def test_text_that_begins_or_ends_with_special_tokens_has_them_once() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    twice = {"prompt": "<s><s>ab", "response": "cd</s>"}
    assert Chat(tokenizer).plain("<s><s>ab")[:3] == [bos, bos, *tokenizer("a")["input_ids"]], "it adds no BOS"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    ab, cd = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd"))
    for text in ("ab", "<s>ab"):
        assert Chat(tokenizer).plain(text) == [bos, *ab]
        assert samples_of(Chat(tokenizer), conversation("f:1", {"text": text + text}), 2)[0].input_ids[:3] == [bos, *ab]
    (found,) = samples_of(Chat(tokenizer), conversation("f:1", twice), 9)
    assert found == EncodedText([bos, bos, *ab, *cd, eos], [[4, 7]])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_every_answer_of_a_conversation_is_trained(template: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tiny_tokenizer.chat_template = template
    turns = {"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER, {**ANSWER, "content": "ef"}]}
    assert encoded(tiny_tokenizer, turns) == [("SsEUabEAcdEUabEAefE", ["cdE", "efE"])]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": 0.0}, {"masked": True}])
@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        MARKED,
        MARKED.replace(
            "{{ m.content }}E{% endg", "{{ m.content[0] }}{% endgeneration %}{% generation %}{{ m.content[1] }}E{% endg"
        ),
    ],
)
def test_answers_that_the_data_marks_as_context_are_not_trained(
    template: str, flag: dict[str, Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.chat_template = template
    marked = {**ANSWER, **flag}
    row = {"messages": [{**USER, "weight": 0.5}, marked, USER, {**ANSWER, "content": "ef", "weight": 1}, USER, marked]}
    ((text, trained),) = encoded(tiny_tokenizer, row)
    assert (text, trained) in (
        ("UabEAcdEUabEAefE", ["efE"]),
        ("UabEAcdEUabEAefEUabEAcdE", ["efE"]),
        ("UabEAc-EUabEAe-E", ["e-E"]),  # from the difference that the answer makes
    )
    assert conversation("f:1", row).marked == {1, 5}
    assert encoded(tiny_tokenizer, {"messages": [USER, marked]}) == []


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_list_in_prompt_is_the_question_with_the_answers_in_it(
    template: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.chat_template = template
    last = {"role": "user", "content": "gh"}
    for answer in ("ef", [{**ANSWER, "content": "ef"}], [USER, ANSWER, last, {**ANSWER, "content": "ef"}]):
        row = {"prompt": [USER, ANSWER, last], "chosen": answer}
        found = conversation("f:1", row)
        assert found.turns == [[USER, ANSWER, last]] == [found.asked]
        assert encoded(tiny_tokenizer, row) == [("UabEAcdEUghEAefE", ["efE"])]
        assert shown(tiny_tokenizer, Chat(tiny_tokenizer).prompt(found)) == "UabEAcdEUghEA"
    more = conversation("f:1", {"prompt": [USER, ANSWER, last], "completion": [ANSWER, USER, ANSWER]})
    assert more.turns == [[USER, ANSWER, last], [USER]]
    assert conversation("f:1", {"prompt": [USER, last]}).turns == [[USER, last]]
    assert conversation("f:1", {"prompt": [USER, ANSWER]}).problem == "have a prompt that ends with an answer"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_span_ends_with_a_token_that_the_target_ends_with(
    template: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Gemma ends turns with <end_of_turn>, and its tokenizer's eos_token is another; here E and <eos>."""
    tiny_tokenizer.chat_template = template.replace("}}E{%", "}}Ex{%")
    ends = frozenset(tiny_tokenizer("E")["input_ids"])
    turns = {"messages": [USER, ANSWER, USER, {**ANSWER, "content": "eEf"}]}
    assert encoded(tiny_tokenizer, turns, ends=ends) == [("UabExAcdExUabExAeE", ["cdE", "eE"])], "it writes no more"
    assert encoded(tiny_tokenizer, turns) == [("UabExAcdExUabExAeEfEx", ["cdEx", "eEfEx"])]
    samples = samples_of(Chat(tiny_tokenizer), conversation("f:1", turns), 9)
    assert [sample.unended for sample in samples] == [2]
    assert Chat(tiny_tokenizer, ends=ends).key() != Chat(tiny_tokenizer).key(), "examples are cached by it"


HIDDEN = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ '[' + m.role + ']' + c | trim + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' + begin }}{% endif %}"
)
"""Shows answers without their thinking; the generation prompt may begin or end the thinking."""


@pytest.mark.parametrize(
    ("begin", "answer", "prompt", "trained"),
    [
        ("<think>\n", "<think>\nhm\n</think>\n\nA cat.", "<think>\n", "hm\n</think>\n\nA cat.</s>"),  # QwQ
        ("<think>\n", "<think>hm</think>A cat.", "<think>\n", "hm</think>A cat.</s>"),
        ("<think>\n", "hm\n</think>\n\nA cat.", "<think>\n", "hm\n</think>\n\nA cat.</s>"),  # as it was generated
        ("", "<think>\nhm\n</think>\n\nA cat.", "", "<think>\nhm\n</think>\n\nA cat.</s>"),  # R1 in its first version
        ("<think>\n\n</think>\n\n", "A cat.", "<think>\n\n</think>\n\n", "A cat.</s>"),  # thinking is off
        ("<think>\n", {"content": "A cat.", "reasoning_content": "hm"}, "<think>\n", "hm\n</think>\n\nA cat.</s>"),
        ("<think>", {"content": "A cat.", "reasoning_content": "hm"}, "<think>", "hm</think>A cat.</s>"),  # DeepSeek
    ],
)
def test_what_the_generation_prompt_gives_is_not_trained(begin: str, answer: Any, prompt: str, trained: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = HIDDEN
    message = {"role": "assistant", **({"content": answer} if isinstance(answer, str) else answer)}
    chat = Chat(tokenizer, options={"begin": begin})
    samples = samples_of(chat, conversation("f:1", {"messages": [USER, message, USER, message]}), 9)
    first = f"[user]ab</s>\n[assistant]{prompt}"
    later = f"[user]ab</s>\n[assistant]A cat.</s>\n{first}"
    texts = [tokenizer.decode(sample.input_ids) for sample in samples]
    spans = [tokenizer.decode(sample.input_ids[slice(*sample.spans[-1])]) for sample in samples]
    if len(samples) == 2:
        assert texts == [first + trained, later + trained]
        assert spans == [trained, trained]
    else:  # nothing is left out later
        assert texts == [later + trained]
        assert [tokenizer.decode(samples[0].input_ids[slice(*span)]) for span in samples[0].spans] == [trained] * 2
    if prompt:
        assert len(samples) == 2, "the first prompt is not in the second"
        assert samples[0].input_ids[: samples[0].spans[0][0]] == chat.prompt(conversation("f:1", {"messages": [USER]}))


@pytest.mark.parametrize(
    ("begin", "more", "why"),
    [
        ("<think>\n", {}, "have an answer without the thinking that the generation prompt begins with <think>"),
        ("<think>\n\n</think>\n\n", {"reasoning_content": "hm"}, "have thinking that the chat template does not show"),
        ("", {"reasoning_content": "hm"}, "have thinking that the chat template does not show"),
        ("<think>\n\n</think>\n\n", {"content": "<think>\nhm</think>A cat."}, "have an answer that the chat template"),
    ],
)
def test_answers_that_the_target_never_writes_after_its_prompt(begin: str, more: dict[str, str], why: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = HIDDEN
    row = {"messages": [USER, {"role": "assistant", "content": "A cat.", **more}]}
    with pytest.raises(TemplateRefusal) as refused:
        samples_of(Chat(tokenizer, options={"begin": begin}), conversation("f:1", row), 9)
    assert refused.value.reason.startswith(why)


def test_tools_and_template_options_reach_the_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r'option mode="m": the chat template does not read it; expected one of: no'):
        encoded(tiny_tokenizer, {"messages": [USER]}, options={"mode": "m"})
    calls = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    tiny_tokenizer.chat_template = "{{ tools[0].function.name if tools }}{{ mode }}" + PLAIN.replace(
        "{{ m.content }}", calls
    )
    tool = {"type": "function", "function": {"name": "xyz", "parameters": {"type": "object", "properties": {}}}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "xyz", "arguments": {}}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "q"}, ANSWER], "tools": json.dumps([tool])}
    assert encoded(tiny_tokenizer, row, options={"mode": "m"}) == [("xyzmUabEAxyzETqEAcdE", ["xyzE", "cdE"])]
    with pytest.raises(ConfigError, match='option mods="m": the chat template does not read it; expected one of: mode'):
        encoded(tiny_tokenizer, row, options={"mods": "m"})


@pytest.mark.parametrize("shown", ["call.function.arguments | tojson", "'' + call.function.arguments"])
def test_templates_read_arguments_as_objects_or_as_text(shown: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tiny_tokenizer.chat_template = PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}f{{ " + shown + " }}{% endfor %}"
    )
    for arguments in ({"x": 1}, '{"x": 1}'):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        (found,) = samples_of(Chat(tiny_tokenizer), conversation("f:1", {"messages": [USER, call]}), 9)
        assert found.input_ids == tiny_tokenizer('UabEAf{"x": 1}E')["input_ids"]


def test_templates_from_which_answers_cannot_be_told_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_tokenizer.chat_template = "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"f:1, message 2: the chat template does not show the answer after the mess"):
        encoded(tiny_tokenizer, {"messages": [USER, ANSWER]})
    tiny_tokenizer.chat_template = MARKED.replace("'assistant'", "'nobody'")
    assert encoded(tiny_tokenizer, {"messages": [USER, ANSWER]}) == [("UabEAcdE", ["cdE"])], "no block is needed"
    with pytest.raises(ConfigError, match=r"chat_template=.*nowhere cannot be read .*expected a file, or one of vic"):
        Chat(tiny_tokenizer, str(tmp_path / "nowhere"))
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert encoded(tiny_tokenizer, {"messages": [USER, ANSWER]}, template=str(tmp_path / "own.jinja")) == [
        ("UabEAcdE", ["cdE"])
    ]


REFUSING = {
    "{{ raise_exception('roles must alternate') }}": "the chat template refuses it (roles must alternate)",
    "{{ raise_exception('') }}": "refuses it (TemplateError)",
    "{{ 1 / 0 }}": "refuses it (division by zero)",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "refuses it (maximum recursion depth",
    '{{ "\\ud800" }}{{ messages[0].content }}{{ messages | length }}': "unpaired surrogate",
    "{{ messages[0].content * 4000000 }}": "characters; expected at most",
    "{% generation %}{% endgeneration %}": "the chat template",
}


@pytest.mark.parametrize("template", REFUSING)
def test_templates_that_are_refused(template: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tiny_tokenizer.chat_template = template
    chat, asked = Chat(tiny_tokenizer), conversation("f:1", {"messages": [USER, ANSWER]})
    with pytest.raises(ConfigError) as refused:
        (Chat.prompt if "generation" not in template else partial(samples_of, prompt_tokens=9))(chat, asked)
    assert str(refused.value).startswith("f:1: ")
    assert REFUSING[template] in str(refused.value)


def test_the_shipped_template_of_vicuna(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A blank after the question and the end token after the answer, as in its authors' conversation format."""
    system = template_text("vicuna").split('"')[1]
    Chat(tiny_tokenizer, "vicuna")
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    turns.append({"role": "user", "content": "ef"})
    render = partial(tiny_tokenizer.apply_chat_template, tokenize=False)
    begin, end = tiny_tokenizer.bos_token or "", tiny_tokenizer.eos_token
    first = f"{begin}{system} USER: ab ASSISTANT: cd{end}USER: ef"
    assert render(turns, add_generation_prompt=True) == first + " ASSISTANT:"
    assert render(turns) == first
    assert render([{"role": "system", "content": "S"}, *turns[:1]]) == f"{begin}S USER: ab"
    masks = tiny_tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    written = [token for token, mine in zip(masks["input_ids"], masks["assistant_masks"], strict=True) if mine]
    assert written == tiny_tokenizer(f" cd{end}", add_special_tokens=False)["input_ids"]


def test_tokens_as_they_were_sampled_are_taken_as_they_are(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "ab", "response": "cd", "input_ids": [9, 8, 7], "spans": [[1, 3]]}
    assert samples_of(Chat(tiny_tokenizer), conversation("f:1", row), 9) == [EncodedText([9, 8, 7], [[1, 3]])]
    other = samples_of(Chat(tiny_tokenizer), conversation("f:1", {**row, "tokenizer": "another's"}), 9)
    assert shown(tiny_tokenizer, other[0].input_ids) == "abcd."
    for tokens, spans in (([9, 63, 8], [[1, 3]]), ([9, 8, 95], [[1, 2]]), ([9, 70, 95], [])):  # 64 to 95 are padding
        given = conversation("f:1", {**row, "input_ids": tokens, "spans": [[1, 3]]})
        padded = samples_of(Chat(tiny_tokenizer, vocab_size=96), given, 9)
        masked = sum(token > 63 for token in tokens)
        assert padded == ([EncodedText(tokens, spans, masked)] if spans else [])
    for token, size in ((64, None), (96, 96), (-1, 96)):
        with pytest.raises(ConfigError, match=rf"f:1: input_ids=\[9, {token}, 8\]; expected token ids below"):
            samples_of(
                Chat(tiny_tokenizer, vocab_size=size), conversation("f:1", {**row, "input_ids": [9, token, 8]}), 9
            )
    for spans in ([], [[0, 2]], [[1, 4]], [[2, 2]], [1, 2], "x"):
        with pytest.raises(ConfigError, match=r"f:1: spans=.*; expected \[start, end\] inside its 'input_ids'"):
            samples_of(Chat(tiny_tokenizer), conversation("f:1", {**row, "spans": spans}), 9)
