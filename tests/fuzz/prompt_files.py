"""Prompt files of every kind that is read, one or all of their rows damaged; and commands that read them."""

import gzip
import io
from pathlib import Path
from typing import Any

from datasets import Dataset
from hypothesis import strategies as st

from fuzz.damage import as_json, broken, changed, encoded
from fuzz.material import Material
from fuzz.running import Case, Content, Fifo, Link

ROW: dict[str, Any] = {"prompt": "abcd", "response": "efgh", "id": "a", "category": "x"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
SHARED: dict[str, Any] = {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}
TURNS: dict[str, Any] = {"turns": ["ab", "cd"], "question_id": 3}
KEPT: dict[str, Any] = {"prompt": "ab", "input_ids": [2, 3, 4, 5], "spans": [[2, 4]]}
LOGGED: dict[str, Any] = {
    "prompt": "ab",
    "finish_reason": "stop",
    "logprobs": {
        "tokens": ["c", "d"],
        "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [{"c": -0.1, "e": -3}, {"d": -0.2}],
    },
}
TOPS: dict[str, Any] = {
    "input_ids": [2, 3, 4, 5],
    "prompt_length": 2,
    "top_ids": [[4, 6], [5, 7]],
    "top_logprobs": [[-0.1, -3.0], [-0.2, -2.5]],
}
LINE_TRAPS = [
    "[" * 100_000,
    '{"prompt": "\\ud800"}',
    '{"prompt": ""}',
    "3",
    "null",
    "[]",
    "{}",
    '{"prompt": ' + "1" * 5000 + "}",
]
LINE_TRAPS += [
    '{"messages": [{"from": [], "value": []}]}',
    '{"prompt": "' + "a" * 10_000_000 + '"}',
    "NaN",
    '{"a": NaN}',
]


@st.composite
def prompt_rows(draw: st.DrawFn) -> list[bytes]:
    """Lines of a JSON lines file."""
    lines = []
    for _ in range(draw(st.integers(1, 2))):
        row = draw(st.sampled_from([ROW, CHAT, SHARED, TURNS, KEPT, LOGGED, TOPS]))
        line = draw(
            st.one_of(st.just(row).map(as_json), changed(row, 3).map(as_json), st.sampled_from(LINE_TRAPS).map(encoded))
        )
        lines.append(line)
    return [*lines, as_json(ROW)]


@st.composite
def prompt_files(draw: st.DrawFn) -> tuple[str, dict[str, Content]]:
    """(what to name in a command line, files)."""
    kind = draw(
        st.sampled_from(["jsonl", "jsonl", "jsonl", "json", "gz", "parquet", "txt", "csv", "saved", "fifo", "folder"])
    )
    lines = draw(prompt_rows())
    whole = b"\n".join(lines)
    if kind == "json":
        whole = b"[" + b",".join(lines) + b"]"
    if kind in ("jsonl", "json"):
        return f"p.{kind}", {f"p.{kind}": draw(broken(whole)) if draw(st.integers(0, 3)) == 0 else whole}
    if kind == "gz":
        packed = gzip.compress(whole, mtime=0)
        return "p.jsonl.gz", {"p.jsonl.gz": draw(st.one_of(broken(packed), st.just(packed)))}
    if kind == "parquet":
        return "p.parquet", {"p.parquet": draw(broken(_parquet()))}
    if kind in ("txt", "csv"):
        content = draw(st.one_of(broken(b"prompt,response\nab,cd\n"), st.just(whole)))
        return f"p.{kind}", {f"p.{kind}": content}
    if kind == "saved":
        files = dict(SAVED)
        name = draw(st.sampled_from(sorted(files)))
        files[name] = draw(st.one_of(broken(files[name]), st.just(b"{}"), st.just(b"[]")))
        return "saved", files
    if kind == "fifo":
        return draw(
            st.sampled_from([("p.jsonl", {"p.jsonl": Fifo()}), ("p", {"p": Fifo()}), ("p.txt", {"p.txt": Fifo()})])
        )
    if kind == "folder":
        return "f", draw(
            st.sampled_from([{"f/a.jsonl": whole}, {"f/a.jsonl": Link("a.jsonl")}, {"f/a.jsonl": Fifo()}, {"f/b": b""}])
        )
    return "p.jsonl", {"p.jsonl": whole}


def _parquet() -> bytes:
    file = io.BytesIO()
    Dataset.from_list([ROW, ROW | {"id": "b"}]).to_parquet(file)
    return file.getvalue()


def saved_data(folder: Path) -> dict[str, bytes]:
    """The files that `save_to_disk` writes."""
    Dataset.from_list([ROW, ROW | {"id": "b"}]).save_to_disk(folder)
    return {f"saved/{file.name}": file.read_bytes() for file in folder.iterdir()}


SAVED: dict[str, bytes] = {}


@st.composite
def prompts_cases(draw: st.DrawFn, material: Material) -> Case:
    name, files = draw(prompt_files())
    command = draw(st.sampled_from(["preview", "preview", "regenerate", "check", "train", "eval"]))
    target = ["--target", material.target]
    arguments = {
        "preview": ["data", "preview", name, *target, "--response", draw(st.sampled_from(["text", "target"]))],
        "regenerate": [
            "data",
            "regenerate",
            name,
            *target,
            "--out",
            "out/new.jsonl",
            "--response-tokens",
            "4",
            "--turns",
            draw(st.sampled_from(["first", "all"])),
        ],
        "check": [
            "check",
            *target,
            "--drafter",
            "suffix",
            "--prompts",
            name,
            "--tokens",
            "500",
            "--count",
            "1",
            "--temperature",
            "0",
        ],
        "train": [
            "train",
            "r.yaml",
            f"data.prompts={name}",
            f"data.response={draw(st.sampled_from(['text', 'target']))}",
            "train.steps=1",
        ],
        "eval": [
            "eval",
            *target,
            "--drafter",
            "suffix",
            "--prompts",
            name,
            "--count",
            "1",
            "--max-new-tokens",
            "2",
            "--repeats",
            "1",
            "--temperature",
            "0",
            "--out",
            "out",
        ],
    }[command]
    if command == "train" and draw(st.booleans()):
        arguments = ["train", "r.yaml", "teacher.kind=logprobs", f"teacher.file={name}", "train.steps=1"]
    return Case("prompts", arguments, {**files, "r.yaml": as_json(material.recipe)})
