"""Requests to the chat and completion routes, their answers, and the tokens of an answer.

Tokens are those that the server returns (`return_token_ids`, vLLM and SGLang). Without them the text is tokenised
again, and left out unless it is the same text after that. The journal keeps answers on disk, a line each, so that
nothing that was answered is asked again after a kill.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import LeftOut
from draftsmith.distill.detokenize import REPLACED, text_after
from draftsmith.distill.messages import ASSISTANT, Message, with_arguments
from draftsmith.distill.samples import answer_sample
from draftsmith.distill.server.client import BadAnswer
from draftsmith.distill.turns import Asked
from draftsmith.errors import ConfigError
from draftsmith.reading import parse_json
from draftsmith.storage import JsonLines

CHAT, COMPLETION = "/chat/completions", "/completions"
STOPPED, CUT, CALLED = "stop", "length", "tool_calls"
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(frozen=True)
class Accepts:
    """Request fields beyond OpenAI's API that the server accepts, found by the greedy probe."""

    token_ids: bool = True
    """The field `return_token_ids`."""
    token_prompts: bool = True
    """Prompts that are lists of tokens."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to one request."""

    text: str
    finish: str
    """`STOPPED`, `CUT` or `CALLED`."""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] | None = None
    stop_reason: str | int | None = None
    """The string or token that stopped it, where the server says so (vLLM)."""
    usage: dict[str, int] = field(default_factory=dict)
    same_prompt: bool | None = None
    """Whether the server read the tokens that the local chat template gives; None if it does not say."""


class NoTokens(Exception):
    """An answer whose tokens are not known for certain; the message says why."""


def prompt_fields(asked: Asked, chat: Chat, path: str, accepts: Accepts) -> dict[str, Any]:
    """Return the fields of a request that hold the prompt; `NoTokens` for one that no text expresses."""
    fields: dict[str, Any] = {"return_token_ids": True} if accepts.token_ids else {}
    if path == COMPLETION:
        return {**fields, "prompt": asked.prompt if accepts.token_prompts else _as_text(asked.prompt, chat)}
    if asked.tools:
        fields["tools"] = asked.tools
    if chat.options:
        fields["chat_template_kwargs"] = chat.options
    return {**fields, "messages": [with_arguments(message, json.dumps) for message in asked.messages]}


def _as_text(prompt: list[int], chat: Chat) -> str:
    """Return the text of which the tokenizer makes exactly these tokens, special tokens that it adds included."""
    for skip in (True, False):
        text = chat.tokenizer.decode(prompt, skip_special_tokens=skip)
        if isinstance(text, str) and chat.plain(text) == prompt:
            return text
    raise NoTokens("have prompts that are not the same tokens again when they are sent as text")


def read_answer(payload: Any, path: str, prompt: list[int]) -> Answer:
    """Return the first choice of an answer of either route; `BadAnswer` for anything else."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswer("no choices")
    choice = choices[0]
    message = choice.get("message") if path == CHAT else {"content": choice.get("text")}
    if not isinstance(message, dict) or choice.get("finish_reason") not in (STOPPED, CUT, CALLED):
        raise BadAnswer(f"finish_reason={choice.get('finish_reason')!r}; expected an answer that ended")
    message = with_arguments(message, parse_json)
    text = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = message.get("tool_calls") or []
    if text is None and (reasoning or calls):
        text = ""
    tokens, stop = _token_ids(payload, choice), choice.get("stop_reason")
    if not isinstance(text, str) or not isinstance(reasoning, str) or not _objects(calls):
        raise BadAnswer("no text")
    if tokens is not None and not whole_numbers(tokens):
        raise BadAnswer("token_ids that are not integers")
    given = payload.get("usage")
    usage = {key: given[key] for key in USAGE if type(given.get(key)) is int} if isinstance(given, dict) else {}
    return Answer(
        text,
        choice["finish_reason"],
        reasoning,
        calls,
        tokens,
        stop if isinstance(stop, str | int) else None,
        usage,
        _same_prompt(choice.get("prompt_token_ids") or payload.get("prompt_token_ids"), usage, prompt),
    )


def _token_ids(payload: dict[str, Any], choice: dict[str, Any]) -> Any:
    """Return the answer's tokens as vLLM and SGLang return them, or llama-server; None where there are none."""
    told = payload.get("__verbose")
    return choice.get("token_ids", told.get("tokens") if isinstance(told, dict) else None)


def _same_prompt(ids: Any, usage: dict[str, int], prompt: list[int]) -> bool | None:
    if whole_numbers(ids) and ids:
        return ids == prompt
    count = usage.get("prompt_tokens")
    return None if count is None else count == len(prompt)


def whole_numbers(values: Any) -> bool:
    """Return whether this is a list of integers that are not negative."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


@dataclass(frozen=True)
class AnswerReader:
    """Turns answers into tokens, with the mask of local responses: an answer and the token that ended it.

    Args:
        most: the longest answer in tokens.
        thinking: whether thinking is kept.
    """

    chat: Chat
    most: int
    thinking: bool

    def add(self, asked: Asked, answer: Answer, path: str) -> None:
        """Append the answer of a route to the conversation; `NoTokens` if its tokens are not known for certain."""
        if answer.same_prompt is False:
            dated = ", which shows the date" if self.chat.shows_time else ""
            raise NoTokens(f"have prompts of which the server makes other tokens than the chat template{dated}")
        if not self._has_tokens(answer):
            answer = _whole_characters(answer)
        message: Message = {"role": ASSISTANT, "content": answer.text}
        if answer.reasoning and self.thinking:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        ids, start = self._tokens(asked, answer, message)
        if len(ids) - start > self.most:
            again = "" if self._has_tokens(answer) else " after their text is tokenised again"
            raise NoTokens(f"have answers of more than the {self.most} tokens that were asked for{again}")
        if start == len(ids):
            raise NoTokens("have answers without a token")
        if path == COMPLETION:
            asked.add_tokens(ids[start:], self.chat)
        else:
            asked.add(ids, start, message)

    def _tokens(self, asked: Asked, answer: Answer, message: Message) -> tuple[list[int], int]:
        """Return the tokens of the conversation up to the end of the answer, and the place where the answer begins."""
        if self._has_tokens(answer):
            return [*asked.prompt, *self._returned(asked.prompt, answer, answer.tokens or [])], len(asked.prompt)
        if answer.tool_calls:
            raise NoTokens("have tool calls without the tokens that wrote them")
        if answer.reasoning:
            return self._rendered(asked, answer, message)
        return [*asked.prompt, *self._again(asked.prompt, answer)], len(asked.prompt)

    def _has_tokens(self, answer: Answer) -> bool:
        """Return whether the server returned the tokens of what is kept of an answer."""
        return answer.tokens is not None and (self.thinking or not answer.reasoning)

    def _returned(self, prompt: list[int], answer: Answer, tokens: list[int]) -> list[int]:
        size = len(self.chat.tokenizer)
        if any(token >= size for token in tokens):
            raise NoTokens(f"have tokens beyond the tokenizer's {size}")
        shown, text = bare(text_after(self.chat.tokenizer, prompt, tokens)), bare(answer.text)
        parsed = bool(answer.reasoning or answer.tool_calls)
        if text not in shown if parsed else text != shown:
            raise NoTokens("have tokens that are another text for the tokenizer")
        return [*tokens, *self._end(answer, tokens)]

    def _again(self, prompt: list[int], answer: Answer) -> list[int]:
        """Tokenise the text; `NoTokens` unless the tokens give the same text."""
        try:
            tokens = self.chat.response(prompt, answer.text, "answer")
        except ConfigError as error:
            raise NoTokens("have answers that cannot be tokenised") from error
        if text_after(self.chat.tokenizer, prompt, tokens) != answer.text:
            raise NoTokens("have answers that are another text after tokenising them again")
        return [*tokens, *self._end(answer, tokens)]

    def _end(self, answer: Answer, tokens: list[int]) -> list[int]:
        """Return the token that ended the answer, unless the answer has it."""
        tokenizer, stop = self.chat.tokenizer, answer.stop_reason
        special = tokenizer.added_tokens_decoder.get(tokens[-1]) if tokens else None
        end = stop if isinstance(stop, int) and stop in range(len(tokenizer)) else tokenizer.eos_token_id
        ended = tokens[-1:] == [end] or (special is not None and special.special)
        if ended or answer.finish == CUT or isinstance(stop, str) or not isinstance(end, int):
            return []
        return [end]

    def _rendered(self, asked: Asked, answer: Answer, message: Message) -> tuple[list[int], int]:
        """Return the template's text of an answer with thinking, or of one whose thinking is left out."""
        if answer.finish == CUT:
            raise NoTokens("have thinking, are cut, and come without their tokens")
        whole = asked.as_conversation()
        try:
            sample = answer_sample(self.chat, replace(whole, messages=[*asked.messages, message]), len(asked.messages))
        except LeftOut as error:
            raise NoTokens(f"{error.reason} (thinking='drop' leaves it out)") from error
        return sample.input_ids, sample.spans[0][0]


def _whole_characters(answer: Answer) -> Answer:
    """Return an answer without tokens up to the character inside which it was cut; `NoTokens` for others inside."""
    text = answer.text.rstrip(REPLACED) if answer.finish == CUT else answer.text
    if REPLACED in text + answer.reasoning:
        raise NoTokens("have parts of characters, shown as U+FFFD, and come without their tokens")
    return replace(answer, text=text)


def bare(text: str) -> str:
    """Return the text without the spaces around it and without characters of which only a part was generated."""
    return text.strip().rstrip(REPLACED).rstrip()


KEPT = "answers so far are kept; once there is room, the same command continues with the others"
Place = tuple[int, int, int]
"""Number of the response, of the question (see `question_numbers`), and of its turn."""


class _Line(BaseModel):
    """A line after the first, which holds the settings."""

    place: Place
    answer: Answer


LINE = TypeAdapter(_Line)


class AnswerJournal:
    """The file of answers. They stay on disk and are read one at a time.

    Args:
        settings: what the answers depend on, for the first line.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._file = JsonLines(path, KEPT)
        lines = self._file.lines()
        if next(lines, None) is None:
            self._file.append({"settings": settings})
        self._begins: dict[Place, int] = {self._parse(line).place: begins for begins, line in lines}

    def __contains__(self, place: Place) -> bool:
        return place in self._begins

    def __iter__(self) -> Iterator[Place]:
        return iter(self._begins)

    def __len__(self) -> int:
        return len(self._begins)

    def get(self, place: Place) -> Answer | None:
        """Return an answer; None if there is none yet."""
        return None if place not in self._begins else self._parse(self._file.line(self._begins[place])).answer

    def add(self, place: Place, answer: Answer) -> None:
        """Append an answer. A kill loses at most the answer that is being written."""
        assert place not in self._begins, f"{place} was answered twice"
        self._begins[place] = self._file.append({"place": place, "answer": asdict(answer)})

    def copy(self, file: Path, numbers: set[int]) -> None:
        """Append the answers to these questions from another journal, to which another process may still write."""
        if file == self._file.path:
            return
        for begins, line in JsonLines(file, KEPT).lines():
            with suppress(ConfigError):  # a damaged line
                read = self._parse(line) if begins else None
                if read is not None and read.place[1] in numbers and read.place not in self:
                    self.add(read.place, read.answer)

    def _parse(self, line: bytes) -> _Line:
        try:
            return LINE.validate_python(parse_json(line))
        except (ValidationError, ValueError) as error:
            raise ConfigError(
                f"{self._file.path} is damaged; expected what draftsmith wrote, or no such file"
            ) from error
