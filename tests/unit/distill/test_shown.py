"""Rows of which a chat template does not show everything, and templates in the manner of published ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import write_rows
from piece_tokenizer import make_byte_tokenizer
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.chat_template import Chat, TemplateRefusal
from draftsmith.distill.conversation import LeftOut, conversation
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import read_examples
from draftsmith.distill.samples import samples_of
from draftsmith.distill.shown import not_shown, template_variables
from draftsmith.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "how many?"}, {"role": "assistant", "content": "two"}
MORE, LAST = {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": 'the "old" Århus', "days": 3}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": 'a <b> & "c"\nd'}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ENDS = ("</s>", "<user>", "<tool>", "<call>", "<return>")

BARE = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
BARE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer(template: str, *more: str) -> PreTrainedTokenizerFast:
    """One token for each byte and for each of `ENDS` and `more`."""
    tokens = make_byte_tokenizer()
    tokens.add_tokens([AddedToken(text, special=True) for text in ENDS])
    tokens.add_tokens(list(more))
    tokens.chat_template = template
    return tokens


def marked(template: str, row: dict[str, Any], **options: Any) -> list[str]:
    """Return the prompt of each sample with its spans in brackets after it."""
    tokens = tokenizer(template)
    chat = Chat(tokens, options=options, ends=frozenset(map(tokens.convert_tokens_to_ids, ENDS)))
    samples = samples_of(chat, conversation("f:1", row), 9)
    assert not any(sample.unended for sample in samples)
    for sample in samples:
        assert sample.spans[-1][1] == len(sample.input_ids)
    return [
        tokens.decode(s.input_ids[: s.spans[0][0]])
        + "…".join(f"⟦{tokens.decode(s.input_ids[a:b])}⟧" for a, b in s.spans)
        for s in samples
    ]


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"messages": [{"role": "developer", "content": "be brief"}, USER, ANSWER]}, "a message of the role developer"),
        ({"system": "be brief", "messages": [USER, ANSWER]}, "a message of the role system"),
        ({"messages": [USER, ANSWER], "tools": TOOLS}, "tools"),
        ({"messages": [USER, CALLING]}, "a tool call"),
        ({"messages": [USER, {**CALLING, "content": "let me look"}]}, "a tool call"),
        ({"messages": [USER, {**CALLING, "weight": 0}, RESULT, ANSWER]}, "a tool call"),
        ({"prompt": [USER, ANSWER, RESULT], "completion": [LAST]}, "a tool's result"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "one, two"}]}, "thinking"),
        ({"messages": [USER, {**ANSWER, "thinking": "one, two"}]}, "thinking"),
        ({"messages": [USER, ANSWER, MORE, {**LAST, "reasoning": "hm"}]}, "thinking"),
    ],
)
def test_what_a_template_does_not_show_leaves_a_row_out(row: dict[str, Any], lost: str) -> None:
    with pytest.raises(TemplateRefusal) as refused:
        marked(BARE, row)
    assert refused.value.reason == f"have {lost} that the chat template does not show"


def test_rows_that_lose_something_are_counted_and_end_a_run_if_they_are_most(tmp_path: Path) -> None:
    kept = [{"messages": [{**USER, "content": f"question {i}"}, ANSWER]} for i in range(5)]
    bad = [
        {"messages": [{"role": "developer", "content": "brief"}, USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, {**ANSWER, "content": "</s>"}]},
        {"messages": [USER, {"role": "narrator", "content": "x"}]},
    ]

    def read(rows: list[dict[str, Any]], response: str = "text") -> list[str]:
        file = str(write_rows(tmp_path / "p.jsonl", rows))
        settings = {"count": 20, "prompt_tokens": 60, "response_tokens": 20, "response": response}
        said: list[str] = []
        read_examples(Chat(tokenizer(BARE)), DataSection(prompts=file, **settings), 99, said.append)
        return [line.removeprefix(f"{tmp_path}/p.jsonl: ").removesuffix(": left out") for line in said]

    reasons = [
        "1 of 9 have a message of the role developer that the chat template does not show",
        "1 of 9 have no answer",
        "1 of 9 have an empty answer",
        "1 of 9 cannot be read (message 2 is from 'narrator')",
    ]
    assert read(bad + kept) == reasons
    assert [line for line in read(bad + kept, "target") if "same" not in line] == [reasons[0], reasons[3]]
    with pytest.raises(ConfigError, match=r"3 of 5 rows cannot be used, such as .*:4: message 2 is from 'narrator'"):
        read(bad + kept[:1])


GLM = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>"
    "{{ m.reasoning_content | trim if m.reasoning_content and loop.index0 > ns.last }}</think>{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    "c.function.arguments.items() %}{{ k }}:{{ v }};{% endfor %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The next role's token ends a turn; thinking before the last question is left out."""
HARMONY = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else "
    "m.content }}<end>{% elif m.tool_calls %}{% set ns = namespace(later=false) %}{% for n in messages[loop.index:] if "
    "n.role == 'assistant' and not n.tool_calls %}{% set ns.later = true %}{% endfor %}{% if m.thinking and not "
    "ns.later %}<assistant>analysis:{{ m.thinking }}<end>{% endif %}<assistant>{{ m.tool_calls[0].function.name }}:"
    "{{ m.tool_calls[0].function.arguments | tojson }}<call>{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<assistant>analysis:{{ m.thinking }}<end>{% endif %}<assistant>final:{{ m.content }}<return>"
    "{% else %}<assistant>final:{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""An answer has several parts; its thinking is left out as soon as another answer follows."""
CHANNEL = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% if not thinking %}<channel>thought<channel|>{% endif %}"
    "{% endif %}"
)
"""As Gemma 4: without thinking, the prompt has an empty channel that rendered answers lack."""
BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<assistant>{{ '' if loop.last }}{% if "
    "loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>\n"
    "{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Blocks that begin before the header, and show earlier answers without their thinking."""
THINKING = {"reasoning_content": "hm, hm"}


THOUGHT = [USER, {**ANSWER, **THINKING}, MORE, LAST]
CALLED = [USER, {**CALLING, **THINKING}, RESULT, {**LAST, **THINKING}]
AFTER_CALL = 'lookcity:the "old" Århus;days:3;<tool>⟧'
BEGIN = "<turn>user\nhow many?</s>\n<turn>assistant\n<channel>thought<channel|>"


@pytest.mark.parametrize(
    ("template", "row", "found"),
    [
        (GLM, THOUGHT, ["<user>how many?<assistant>⟦<think>hm, hm</think>two<user>⟧",
                        "<user>how many?<assistant><think></think>two<user>sure?<assistant>"
                        "⟦<think></think>yes<user>⟧"]),
        (GLM, CALLED, [f"<user>how many?<assistant>⟦<think>hm, hm</think>{AFTER_CALL}…"
                       "⟦<think>hm, hm</think>yes<user>⟧"]),
        (GLM, [USER, CALLING], [f"<user>how many?<assistant>⟦<think></think>{AFTER_CALL}"]),
        (HARMONY, CALLED, ["<user>how many?<end><assistant>⟦analysis:hm, hm<end><assistant>"
                           'look:{"city": "the \\"old\\" Århus", "days": 3}<call>⟧…'
                           "⟦analysis:hm, hm<end><assistant>final:yes<return>⟧"]),
        (HARMONY, THOUGHT, ["<user>how many?<end><assistant>⟦analysis:hm, hm<end><assistant>final:two<return>⟧",
                            "<user>how many?<end><assistant>final:two<end><user>sure?<end><assistant>"
                            "⟦final:yes<return>⟧"]),
        (CHANNEL, [USER, {**ANSWER, "content": " two\n"}], [BEGIN + "⟦two</s>⟧"]),
        (BLOCKS, THOUGHT, ["<user>how many?</s>\n<assistant>⟦<think>hm, hm</think>two</s>⟧",
                           "<user>how many?</s>\n<assistant>two</s>\n<user>sure?</s>\n<assistant>⟦yes</s>⟧"]),
        (BLOCKS, [USER, ANSWER, MORE, LAST], ["<user>how many?</s>\n<assistant>⟦two</s>⟧…⟦yes</s>⟧"]),
    ],
)  # fmt: skip
def test_an_answer_is_what_the_target_writes_after_its_prompt(
    template: str, row: list[dict[str, Any]], found: list[str]
) -> None:
    assert marked(template, {"messages": row}) == found


def test_the_prompt_keeps_its_tokens_where_the_answer_would_change_the_last_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ '\\n' }}{{ m.content }}</s>{% endfor %}"
    tokens = tokenizer(template + "{% if add_generation_prompt %}<assistant>{{ '\\n' }}{% endif %}", "\n\n")
    chat, asked = Chat(tokens), conversation("f:1", {"messages": [USER, {**ANSWER, "content": "\n  two"}]})
    (sample,) = samples_of(chat, asked, 9)
    ((start, end),) = sample.spans
    assert sample.input_ids[:start] == chat.prompt(asked)
    assert tokens.decode(sample.input_ids[start:end]) == "\n  two</s>"
    (later, last) = samples_of(chat, conversation("f:1", {"messages": [*asked.messages, MORE, LAST]}), 9)
    assert later == sample
    assert last.input_ids[: last.spans[0][0]] == chat.generation_prompt([*asked.messages, MORE], asked)


def test_an_eos_that_the_tokenizer_appends_is_for_encoders_only() -> None:
    tokens = tokenizer("")
    eos = tokens.convert_tokens_to_ids("</s>")
    bare = tokens("ab")["input_ids"]
    tokens.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", eos)])
    row = conversation("f:1", {"prompt": "ab", "response": "ab"})
    for encodes, prompt in ((False, bare), (True, [*bare, eos])):
        chat = Chat(tokens, encodes=encodes)
        (sample,) = samples_of(chat, row, 9)
        assert chat.prompt(row) == prompt
        assert (sample.input_ids, sample.spans) == ([*prompt, *bare, eos], [[len(prompt), len(prompt) + 3]])
    assert samples_of(Chat(tokens), conversation("f:1", {"prompt": "ab", "response": "ab</s>b"}), 9)[0].input_ids == [
        *bare, *bare, eos
    ], "the first one ends the answer"  # fmt: skip
    with pytest.raises(LeftOut) as left_out:
        samples_of(Chat(tokens), conversation("f:1", {"prompt": "ab", "response": " </s>"}), 9)
    assert left_out.value.reason == "have an empty answer"


@pytest.mark.parametrize(
    ("message", "text", "template"),
    [
        (RESULT, json.dumps(RESULT["content"]), ""),
        ({"role": "user", "content": " Århus\n\n  et al. "}, "Århus et al.", ""),
        ({"role": "user", "content": "Århus\n2"}, json.dumps("Århus\n2"), ""),
        ({"role": "user", "content": "a & b"}, "a &amp; b", ""),
        ({"role": "system", "content": "Be brief. /no_think"}, "Be brief.", "m.content.replace('/no_think', '')"),
        ({"role": "system", "content": "/no_think"}, "", 'm.content.replace("/no_think", "")'),
        ({"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "a b"}]}, "<i>a b", ""),
        (CALLING, "look(city='the \"old\" Århus', days=3)", ""),
        (CALLING, "call:" + json.dumps(CALL), ""),
        ({"role": "tool", "content": ""}, "", ""),
    ],
)
def test_what_makes_no_difference(message: dict[str, Any], text: str, template: str) -> None:
    assert not_shown([message], text, template) == []


def test_variables_of_a_template() -> None:
    assert template_variables(
        "{% if not a is defined %}{% set a = 1 %}{% endif %}{% set b = 2 %}{{ b ~ m.thinking }}"
    ) == {"a", "m"}
    assert template_variables({"default": "{{ messages }}", "tools": "{% generation %}{{ x }}{% endgeneration %}"}) == {
        "x"
    }
    assert template_variables("{% if %}") is None
    assert template_variables("{% for m in messages %}{% break %}{% endfor %}{{ bos_token }}") == set()
