"""Data rows of every layout that is read, some of them damaged; and commands that read them."""

from typing import Any

from hypothesis import strategies as st

from fuzz.damage import as_json, broken, changed, encoded
from fuzz.material import Material
from fuzz.running import Case

ROW: dict[str, Any] = {"prompt": "abcd", "response": "efgh", "id": "a", "category": "x"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
SHARED: dict[str, Any] = {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}
TURNS: dict[str, Any] = {"turns": ["ab", "cd"], "question_id": 3}
KEPT: dict[str, Any] = {"prompt": "ab", "input_ids": [2, 3, 4, 5], "spans": [[2, 4]]}
LINE_TRAPS = [
    *("[" * 100_000, '{"prompt": "\\ud800"}', '{"prompt": ""}', "3", "null", "[]", "{}"),
    *('{"prompt": ' + "1" * 5000 + "}", '{"messages": [{"from": [], "value": []}]}', "NaN", '{"a": NaN}'),
    '{"prompt": "' + "a" * 10_000_000 + '"}',
]


@st.composite
def prompt_rows(draw: st.DrawFn) -> bytes:
    """A JSON lines file whose last row is whole."""
    lines = []
    for _ in range(draw(st.integers(1, 2))):
        row = draw(st.sampled_from([ROW, CHAT, SHARED, TURNS, KEPT]))
        damaged = changed(row, 3).map(as_json), st.sampled_from(LINE_TRAPS).map(encoded)
        lines.append(draw(st.one_of(st.just(row).map(as_json), *damaged)))
    whole = b"\n".join([*lines, as_json(ROW)])
    return draw(broken(whole)) if draw(st.integers(0, 3)) == 0 else whole


@st.composite
def prompts_cases(draw: st.DrawFn, material: Material) -> Case:
    sizes = ["--count", "1", "--temperature", "0"]
    pair = ["--target", material.target, "--drafter", "suffix", "--prompts", "p.jsonl", *sizes]
    regenerate = ["data", "regenerate", "p.jsonl", "--target", material.target, "--out", "out/new.jsonl"]
    arguments = draw(
        st.sampled_from(
            [
                ["data", "preview", "p.jsonl", "--target", material.target],
                ["data", "preview", "p.jsonl", "--target", material.target, "--response", "target"],
                [*regenerate, "--response-tokens", "4", "--turns", "all"],
                ["check", *pair, "--tokens", "500"],
                ["eval", *pair, "--max-new-tokens", "2", "--repeats", "1", "--out", "out"],
                ["train", "r.yaml", "data.prompts=p.jsonl", "data.response=text", "train.steps=1"],
                ["train", "r.yaml", "data.prompts=p.jsonl", "data.response=target", "train.steps=1"],
            ]
        )
    )
    return Case("prompts", arguments, {"p.jsonl": draw(prompt_rows()), "r.yaml": as_json(material.recipe)})
