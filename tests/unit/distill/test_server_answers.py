"""Requests and answers of both routes: fields, tokens and masks."""

import json
from dataclasses import replace
from typing import Any

import pytest
from engine_server import chat_tokenizer
from piece_tokenizer import make_piece_tokenizer

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import ServerSection, base_url, server_section
from draftsmith.distill.server.answers import (
    CHAT,
    COMPLETION,
    Accepts,
    Answer,
    AnswerReader,
    NoTokens,
    prompt_fields,
    read_answer,
)
from draftsmith.distill.server.client import BadAnswer
from draftsmith.distill.server.probe import require_related
from draftsmith.distill.turns import Asked
from draftsmith.errors import ConfigError

USER = {"role": "user", "content": "ab"}
EOS = 1


def chat(**options: Any) -> Chat:
    return Chat(chat_tokenizer(), options=options)


def asked(talk: Chat, messages: list[dict[str, Any]] | None = None, tools: Any = None) -> Asked:
    turns = {"turns": [messages or [USER]], "tools": tools}
    of = Asked(0, [], json.dumps(turns))
    of.prompt = talk.generation_prompt(of.messages, of.as_conversation())
    return of


def added(answer: Answer, path: str = CHAT, thinking: bool = True, most: int = 20) -> tuple[list[int], dict[str, Any]]:
    """The trained tokens of an answer, and its message."""
    talk = chat()
    of = asked(talk)
    AnswerReader(talk, most, thinking).add(of, answer, path)
    (row,) = of.rows()
    ((start, end),) = row["spans"]
    assert end == len(row["input_ids"])
    return row["input_ids"][start:], json.loads(row["messages"])[-1]


def ids(text: str) -> list[int]:
    return chat_tokenizer()(text)["input_ids"]


def test_the_chat_route_sends_messages_tools_and_template_options() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    talk, tools = chat(enable_thinking=False), [{"type": "function", "function": {"name": "f"}}]
    of = asked(talk, [{"role": "system", "content": "s"}, USER, called], tools)
    fields = prompt_fields(of, talk, CHAT, Accepts())
    assert fields["return_token_ids"] is True
    assert fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert fields["tools"] == tools
    assert fields["messages"][:2] == of.messages[:2]
    assert fields["messages"][2]["tool_calls"] == [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert called["tool_calls"][0]["function"]["arguments"] == {"x": 1}, "the stored message stays as it is"
    assert "return_token_ids" not in prompt_fields(of, talk, CHAT, Accepts(token_ids=False))


def test_the_completion_route_sends_tokens_or_the_same_text() -> None:
    talk = chat()
    of = asked(talk)
    assert prompt_fields(of, talk, COMPLETION, Accepts())["prompt"] == of.prompt
    assert prompt_fields(of, talk, COMPLETION, Accepts(token_prompts=False))["prompt"] == "UabA"
    talk = Chat(make_piece_tokenizer(metaspace=False))
    of.prompt = [3, 4]  # letters without a space before them, which no text gives
    with pytest.raises(NoTokens, match="not the same tokens again"):
        prompt_fields(of, talk, COMPLETION, Accepts(token_prompts=False))


def payload(**choice: Any) -> dict[str, Any]:
    message = {"finish_reason": "stop", "message": {"content": "cd"}, **choice}
    return {"choices": [message], "usage": {"prompt_tokens": 3}}


def test_answers_of_both_routes_are_read() -> None:
    assert read_answer(payload(), CHAT, [1, 2, 3]) == Answer("cd", "stop", usage={"prompt_tokens": 3}, same_prompt=True)
    assert read_answer(payload(), CHAT, [1, 2]).same_prompt is False
    assert read_answer(payload(prompt_token_ids=[1, 2, 4]), CHAT, [1, 2, 3]).same_prompt is False
    assert read_answer({**payload(), "usage": None}, CHAT, [1]).same_prompt is None
    assert read_answer(payload(text="ef"), COMPLETION, [1, 2, 3]).text == "ef"
    for key in ("reasoning_content", "reasoning"):
        found = read_answer(payload(message={"content": None, key: "hm"}, token_ids=[5]), CHAT, [1])
        assert (found.text, found.reasoning, found.tokens) == ("", "hm", [5])
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    found = read_answer(payload(message={"content": None, "tool_calls": [call]}, finish_reason="tool_calls"), CHAT, [1])
    assert found.tool_calls == [{"function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, [], {}, {"choices": []}, {"choices": [3]}, {"choices": {}}, payload(finish_reason=None)),
        *(payload(finish_reason="abort"), payload(message=None), payload(message={"content": 3})),
        *(payload(message={"content": None}), payload(token_ids="ab"), payload(token_ids=[True])),
        payload(message={"content": "a", "tool_calls": [3]}),
    ],
)
def test_other_shapes_are_asked_for_again(wrong: Any) -> None:
    with pytest.raises(BadAnswer):
        read_answer(wrong, CHAT, [1])


def test_the_mask_is_that_of_local_responses() -> None:
    """The answer and the token that ended it; a cut answer has no end."""
    whole = [*ids("cd"), EOS]
    assert added(Answer("cd", "stop", tokens=whole)) == (whole, {"role": "assistant", "content": "cd"})
    assert added(Answer("cd", "stop", tokens=ids("cd")))[0] == whole
    assert added(Answer("cd", "length", tokens=ids("cd")))[0] == ids("cd")
    assert added(Answer("cd", "stop", tokens=ids("cd"), stop_reason="X"))[0] == ids("cd")
    assert added(Answer("cd", "stop", stop_reason=7))[0] == [*ids("cd"), 7], "the token that ended it"
    assert added(Answer("cd", "stop", tokens=ids("cd"), stop_reason=ids("d")[0]))[0] == ids("cd")
    assert added(Answer("cd", "stop", stop_reason=64))[0] == whole
    assert added(Answer("cd", "stop"))[0] == whole
    assert added(Answer("cd", "length"))[0] == ids("cd")
    assert added(Answer("", "stop"))[0] == [EOS]
    assert added(Answer("cd", "stop"), COMPLETION) == (whole, {"role": "assistant", "content": "cd"})


def test_thinking_is_kept_or_left_out() -> None:
    talk, thought = chat(), Answer("cd", "stop", "hm")
    assert added(thought) == ([*ids("hmZcd"), EOS], {"role": "assistant", "content": "cd", "reasoning_content": "hm"})
    assert added(thought, thinking=False) == ([*ids("cd"), EOS], {"role": "assistant", "content": "cd"})
    returned = [*ids("hmZcd"), EOS]
    assert added(replace(thought, tokens=returned))[0] == returned
    assert added(replace(thought, tokens=returned), thinking=False)[0] == [*ids("cd"), EOS]
    with pytest.raises(NoTokens, match="have thinking, are cut"):
        added(replace(thought, finish="length"))
    talk.tokenizer.chat_template = "{% for m in messages %}U{{ m.content }}{% endfor %}"
    with pytest.raises(NoTokens, match="thinking that the chat template does not show"):
        AnswerReader(talk, 20, True).add(asked(talk), thought, CHAT)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("cd", "stop", same_prompt=False), "other tokens than the chat template"),
        (Answer("cd", "stop", tokens=[*ids("ce"), EOS]), "another text"),
        (Answer("cd", "stop", tokens=[64]), "beyond the tokenizer's 64"),
        (Answer("c d", "stop"), "another text after tokenising them again"),
        (Answer("c" * 21, "length"), "more than the 20 tokens that were asked for after their text is tokenised again"),
        (Answer("c" * 21, "length", tokens=ids("c" * 21)), "more than the 20 tokens that were asked for$"),
        (Answer("", "length"), "without a token"),
        (Answer("", "tool_calls", tool_calls=[{}]), "tool calls without the tokens"),
        (Answer("c\ud800", "stop"), "cannot be tokenised"),
    ],
)
def test_answers_whose_tokens_are_not_certain_are_left_out(answer: Answer, reason: str) -> None:
    with pytest.raises(NoTokens, match=reason):
        added(answer)


def test_addresses() -> None:
    assert base_url("http://h:1/") == "http://h:1/v1"
    assert base_url("https://h/openai/v1/") == "https://h/openai/v1"
    assert ServerSection(url="http://a", model="m").base_url == "http://a/v1"
    for wrong in ("ftp://h", "h:1", "", "http://", "http://h:x", "http://h:99999", "http://h h"):
        with pytest.raises(ConfigError, match="expected an address such as"):
            server_section(url=wrong, model="m")
    for secret in ("http://user:hunter2@h", "http://h?key=hunter2", "http://h#hunter2"):
        with pytest.raises(ConfigError, match="with the key in") as caught:
            server_section(url=secret, model="m")
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"server\.url=\['http://a', 'http://b'\]; expected a valid"):
        server_section(url=["http://a", "http://b"], model="m")
    with pytest.raises(ConfigError, match="extra_body has seed"):
        server_section(url="http://a", model="m", extra_body={"seed": 1})
    with pytest.raises(ConfigError, match=r"server\.top_p=2"):
        server_section(url="http://a", model="m", top_p=2)


def test_names_of_other_models_are_refused() -> None:
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "alias", "other/qwen3-8b"):
        require_related("Qwen/Qwen3-8B", name)
    require_related("embedded", "Qwen/Qwen3-4B")
    with pytest.raises(ConfigError, match="expected the name of the target"):
        require_related("Qwen/Qwen3-8B", "Qwen/Qwen3-4B")


def test_a_text_without_tokens_is_trained_up_to_the_character_inside_which_it_is_cut() -> None:
    trained, message = added(Answer("cd\ufffd", "length"))
    assert (trained, message["content"]) == (ids("cd"), "cd")
    for answer in (Answer("c\ufffdd", "length"), Answer("cd\ufffd", "stop"), Answer("c", "stop", reasoning="\ufffd")):
        with pytest.raises(NoTokens, match="parts of characters"):
            added(answer)
