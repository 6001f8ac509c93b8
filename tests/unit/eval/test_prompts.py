"""Prompt sets in the layouts that people use, and what is refused before any work."""

import gzip
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.chat_template import Chat
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import Prompt, PromptRows, batches, load_prompts, prompts_fingerprint

SUBS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def _write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_spec_bench_counts_mt_bench_as_one(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"question_id": 81 + n, "category": name, "turns": ["ab", "cd"] if name in SUBS else ["ab"], "reference": []}
        for n, name in enumerate((*SUBS, *OTHERS))
    ]
    whole = load_prompts(_write(tmp_path / "question.jsonl", rows), tiny_tokenizer, chat_template="plain")
    assert [prompt.category for prompt in whole] == ["mt_bench"] * 8 + list(OTHERS)
    assert [prompt.turns for prompt in whole] == [2] * 8 + [1] * 5
    assert whole[0].id == "81"
    spread = load_prompts(str(tmp_path / "question.jsonl"), tiny_tokenizer, count=7, chat_template="plain")
    assert [prompt.category for prompt in spread] == ["mt_bench", "mt_bench", *OTHERS], "no category is left out"
    alone = load_prompts(_write(tmp_path / "mt.jsonl", rows[:8]), tiny_tokenizer, chat_template="plain")
    assert [prompt.category for prompt in alone] == list(SUBS), "MT-Bench by itself keeps its categories"
    odd = _write(tmp_path / "odd.jsonl", [*rows, {"prompt": "x", "category": "mine"}])
    assert load_prompts(odd, tiny_tokenizer, chat_template="plain")[0].category == "writing", "not Spec-Bench"


def test_layouts(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    code = {"task_id": "HumanEval/0", "prompt": "def f", "canonical_solution": "x", "test": "y", "entry_point": "f"}
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(code) + "\n").encode()))
    (human,) = load_prompts(str(packed), tiny_tokenizer)
    assert (human.id, human.turns, tiny_tokenizer.decode(human.input_ids)) == (
        "HumanEval/0",
        1,
        tiny_tokenizer.decode(tiny_tokenizer("def f")["input_ids"]),
    )
    (math,) = load_prompts(_write(tmp_path / "gsm.jsonl", [{"question": "abc", "answer": "42"}]), tiny_tokenizer)
    assert math.input_ids == tiny_tokenizer("abc")["input_ids"], "the answer is not shown"
    assert (math.id, math.category) == ("#1", "uncategorised")


def test_another_template_and_its_options(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    file = _write(tmp_path / "chat.jsonl", [{"turns": ["ab", "ef"]}])
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ mode }}{{ m.content }}{% endfor %}x")
    (plain,) = load_prompts(file, tiny_tokenizer, chat_template=str(template))
    (other,) = load_prompts(file, tiny_tokenizer, chat_template=str(template), template_options={"mode": "m"})
    assert [tiny_tokenizer.decode(row.input_ids) for row in (plain, other)] == ["abx", "mabx"]
    chat = Chat(tiny_tokenizer, str(template), {"mode": "m"})
    answers = [tiny_tokenizer("cd", add_special_tokens=False)["input_ids"]]
    assert tiny_tokenizer.decode(other.after(answers, chat).input_ids) == "mabmcdmefx", "later turns too"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"category": "b"}], r"p\.jsonl:2: keys \['category'\]; expected a non-empty"),
        (
            [{"id": 1, "prompt": "a"}, {"prompt": "b"}, {"id": 1, "prompt": "c"}],
            r"p\.jsonl:3: id='1' is also the id of .*:1",
        ),
        (
            [{"messages": [{"role": "gpt", "content": "a"}, {"role": "human", "content": "b"}]}],
            r"p\.jsonl:1: prompts that begin with an answer cannot be decoded",
        ),
        ([{"messages": []}], r"p\.jsonl:1: keys .*; expected a non-empty"),
        ([{"turns": ["a", " "]}], r"p\.jsonl:1: prompts that have an empty question cannot be decoded"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, rows: list[dict], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptRows.read(_write(tmp_path / "p.jsonl", rows))


def test_prompts_that_leave_no_room_are_left_out(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """In tokens or, for a text that is not tokenised, in characters; later turns are left out when they are asked."""
    rows = [{"prompt": "abcde"}, {"turns": ["abcd", "abcd"]}, {"prompt": "ab" * 1000}]
    read = PromptRows.read(_write(tmp_path / "p.jsonl", rows))
    prompts, notes = read.encode(tiny_tokenizer, context=5, chat_template="plain")
    assert [prompt.id for prompt in prompts] == ["#2"]
    first = "p.jsonl:1: prompt=5 tokens; expected fewer than the context of 5"
    assert notes == [f"2 of 3 prompts were left out; the first: {tmp_path}/{first}."]
    assert read.encode(tiny_tokenizer, chat_template="plain")[1] == []
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: prompt=5 tokens; expected fewer than the context of 4"):
        read.encode(tiny_tokenizer, context=4, chat_template="plain")
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: messages, and the target has no chat template; expected --c"):
        read.encode(tiny_tokenizer)


def test_prompts_with_tokens_beyond_the_embeddings_are_left_out(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    size = len(tiny_tokenizer)
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    file = _write(tmp_path / "p.jsonl", [{"prompt": "ab"}, {"prompt": "a<|image|>"}, {"turns": ["ab", "<|image|>"]}])
    how = {"chat_template": "plain", "vocab_size": size}
    prompts, notes = PromptRows.read(file).encode(tiny_tokenizer, **how)
    assert [prompt.id for prompt in prompts] == ["#1"]
    assert len(notes) == 1
    assert f"2 of 3 prompts were left out; the first: {file}:2: token {size} ('<|image|>')" in notes[0]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "<|image|>"}))
    with pytest.raises(ConfigError, match=rf"p\.jsonl:1: token {size} .*below the target's {size} embeddings"):
        PromptRows.read(file).encode(tiny_tokenizer, **how)
    assert len(PromptRows.read(file).encode(tiny_tokenizer, chat_template="plain", vocab_size=size + 1)[0]) == 1


def test_prompts_that_the_chat_template_refuses_are_left_out(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """In the first turn or a later one; a template that refuses most of them ends the evaluation."""
    tiny_tokenizer.chat_template = (
        "{% if messages[-1].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{% for m in messages if m.content | length > 1 %}{{ m.content }}{% endfor %}"
    )
    rows = [{"turns": turns} for turns in (["ab"], ["ab", "x"], ["ab", "c"], ["ab", "de"], ["ab", " "])]
    prompts, notes = PromptRows.read(_write(tmp_path / "p.jsonl", rows)).encode(tiny_tokenizer)
    assert [prompt.id for prompt in prompts] == ["#1", "#4"], "'c' of the third is not shown"
    why = "p.jsonl:5: prompts that have an empty question cannot be decoded; expected a question in each turn"
    assert notes == [f"3 of 5 prompts were left out; the first: {tmp_path}/{why}."]
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: the chat template refuses it \(no x\)"):
        PromptRows.read(_write(tmp_path / "p.jsonl", rows[:3])).encode(tiny_tokenizer)


def test_the_fingerprint_knows_later_turns(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    found = [
        prompts_fingerprint(load_prompts(_write(tmp_path / "p.jsonl", [row]), tiny_tokenizer, chat_template="plain"))
        for row in ({"turns": ["a", "b"]}, {"turns": ["a", "c"]}, {"turns": ["a"]}, {"turns": ["a", "b"]})
    ]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_batches_hold_one_category_until_only_rests_are_left() -> None:
    prompts = [Prompt(str(n), category, [1]) for n, category in enumerate("aabababbcaa")]
    found = [("".join(p.category for p in batch.prompts), batch.category) for batch in batches(prompts, 3)]
    assert found == [("aaa", "a"), ("aaa", "a"), ("bbb", "b"), ("bc", None)]
    ids = [prompt.id for batch in batches(prompts, 3) for prompt in batch.prompts]
    assert sorted(ids) == sorted(prompt.id for prompt in prompts)
    assert [batch.category for batch in batches(prompts, 1)] == list("aaaaaabbbbc")
