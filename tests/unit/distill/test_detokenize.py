"""Decoding after a context: tokenizers that strip the first space, and characters of several tokens."""

import json
from typing import Any

import pytest
from piece_tokenizer import make_piece_tokenizer
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import Conversation, conversation
from draftsmith.distill.detokenize import WINDOW, IncrementalText, text_after
from draftsmith.distill.samples import samples_of
from draftsmith.distill.turns import Asked
from draftsmith.eval.evaluation import token_texts
from draftsmith.eval.prompts import Prompt

TEXT = "there was a little é girl€. a 🙂é€🙂 ok é"


@pytest.fixture(params=["llama", "metaspace"])
def piece_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return make_piece_tokenizer(metaspace=request.param == "metaspace")


def streamed(tokenizer: Any, context: list[int], tokens: list[int], **options: bool) -> str:
    text = IncrementalText(tokenizer, context, **options)
    return "".join(text.add(token) for token in tokens) + text.rest()


def test_a_continuation_keeps_its_first_space(piece_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = piece_tokenizer(TEXT)["input_ids"]
    assert piece_tokenizer.decode(ids) == TEXT
    for cut in range(len(ids) + 1):
        before = piece_tokenizer.decode(ids[:cut])
        if "\ufffd" not in before:
            assert before + text_after(piece_tokenizer, ids[:cut], ids[cut:]) == TEXT
            assert before + streamed(piece_tokenizer, ids[:cut], ids[cut:]) == TEXT
    assert text_after(piece_tokenizer, [], ids[:1]) == "t", "nothing is before it"


def test_a_character_that_the_context_began_is_ended(piece_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = piece_tokenizer("a é")["input_ids"]
    assert piece_tokenizer.decode(ids[:-1]) == "a \ufffd"
    assert text_after(piece_tokenizer, ids[:-1], ids[-1:]) == "é"
    euro = piece_tokenizer("€")["input_ids"]
    assert text_after(piece_tokenizer, ids, euro[1:2]) == "\ufffd", "what was whole is not shown again as broken"


def test_long_runs_of_bytes(piece_tokenizer: PreTrainedTokenizerFast) -> None:
    """The window begins inside a character for most contexts, and incomplete bytes do not affect complete text."""
    text = "a " + "€🙂é" * WINDOW
    ids = piece_tokenizer(text)["input_ids"]
    assert streamed(piece_tokenizer, ids[:1], ids[1:]) == text[1:]
    broken = [*ids, ids[-2], *piece_tokenizer("b")["input_ids"]]
    assert streamed(piece_tokenizer, [], broken) == text + "\ufffd b"


class Bytes:
    """With one byte a token, a character of several bytes is complete at its last one."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_half_a_character_waits_for_the_rest() -> None:
    text = IncrementalText(Bytes())
    assert [text.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert text.add(0xC3) == ""
    assert text.rest() == "\ufffd", "shown where the text ends in it"


def test_pieces_of_every_token() -> None:
    whole = list("xaé🙂\n".encode())
    pieces = token_texts(whole[1:], Bytes(), whole[:1])
    assert pieces == ["a", "", "é", "", "", "", "🙂", "\n"]
    assert token_texts(whole[1:5], Bytes(), whole[:1]) == ["a", "", "é", "\ufffd"]
    assert token_texts([], Bytes(), whole) == []


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}u {{ m.content }} a.{% else %}%s{{ m.content }}{% endif %}"
    "{% endfor %}"
)
TURNS = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]]


@pytest.mark.parametrize("space", ["", " "], ids=["none", "the template's own"])
def test_the_next_turn_reads_what_was_generated(piece_tokenizer: PreTrainedTokenizerFast, space: str) -> None:
    """Templates that put a space before an answer, as Vicuna's, and templates that do not, as ChatML."""
    piece_tokenizer.chat_template = TEMPLATE.replace("%s", space)
    chat, answer = Chat(piece_tokenizer), piece_tokenizer("b c")["input_ids"]
    first = piece_tokenizer("u x a.")["input_ids"]
    assert text_after(piece_tokenizer, first, answer) == " b c"
    second = piece_tokenizer("u x a. b cu y a.")["input_ids"]
    asked = Conversation("f:1", [message for turn in TURNS for message in turn])
    assert Prompt("p", "c", first, asked).after([answer], chat).input_ids == second
    text = Asked(0, first, json.dumps({"turns": TURNS, "tools": None}))
    text.add_tokens(answer, chat)
    assert text.ask(chat, 1, lambda _: True)
    assert text.prompt == second
    text.add_tokens(answer, chat)
    (row,) = text.rows()
    assert row["spans"] == [[len(first), len(first) + 2], [len(second), len(second) + 2]]
    said = [message["content"] for message in json.loads(row["messages"]) if message["role"] == "assistant"]
    assert said == ["b c" if space else " b c"] * 2


def test_answers_with_their_first_space_are_read_as_written(piece_tokenizer: PreTrainedTokenizerFast) -> None:
    for response in (" b c", "b c"):
        (found,) = samples_of(Chat(piece_tokenizer), conversation("f:1", {"prompt": "x", "response": response}), 9)
        assert piece_tokenizer.decode(found.input_ids, skip_special_tokens=True) == "x b c"
