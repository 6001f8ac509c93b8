"""Conversations, and rows in the common formats (ShareGPT, messages, prompts, plain text) as conversations."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.distill.messages import (
    ASSISTANT,
    CONTEXT,
    SYSTEM,
    Message,
    images_in,
    is_messages,
    read_messages,
    read_tools,
    unpacked,
)
from draftsmith.errors import ConfigError

ANSWERS = ("response", "completion", "answer", "output", "chosen")
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
TEXTS = ("prompt", "text", "question", "instruction")
SYSTEMS = ("system", "system_prompt")
READ = {*ANSWERS, *CONVERSATIONS, *TEXTS, *SYSTEMS, "turns", "input", "tools", "input_ids", "loss_mask"}
READ |= {"spans", "tokenizer", "server", "usage"}
"""Keys of rows that are read, and those that `draftsmith data regenerate` adds."""


class EmptyConversation(ConfigError):
    """A row whose messages or text are empty."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, or plain text for the target to continue."""

    place: str
    """File and line, for errors."""
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    """Plain text, if there are no messages."""
    whole: bool = False
    """The text includes its continuation."""
    answer: str | None = None
    """The response in another key of the row."""
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    """The sampled tokens, if the file holds them (`draftsmith data regenerate`)."""
    spans: list[list[int]] | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that `input_ids` belong to."""
    prompt: int = 0
    """Length of the list in `prompt`, which is the first question with all answers in it; 0 for other rows."""
    marked: frozenset[int] = frozenset()
    """Places of the messages that the data marks as not trained."""

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages after the list in `prompt`."""
        places = range(self.prompt, len(self.messages))
        return [place for place in places if self.messages[place]["role"] == ASSISTANT]

    @property
    def trained(self) -> list[int]:
        """Places of the answers that are trained."""
        return [place for place in self.answers if place not in self.marked]

    @property
    def turns(self) -> list[list[Message]]:
        """The messages between the answers; in a conversation without answers, each user message begins a turn."""
        unanswered = not self.answers
        turns: list[list[Message]] = [self.messages[: self.prompt]]
        for message in self.messages[self.prompt :]:
            if message["role"] == ASSISTANT:
                turns.append([])
                continue
            if unanswered and any(before["role"] == "user" for before in turns[-1]):
                turns.append([])
            turns[-1].append(message)
        return [turn for turn in turns if turn]

    @property
    def problem(self) -> str | None:
        """Why a target cannot be asked, as the end of "rows that …"; None for a conversation that it can be asked."""
        if self.messages and not self.asked:
            return "begin with an answer"
        if self.prompt and self.messages[self.prompt - 1]["role"] == ASSISTANT:
            return "have a prompt that ends with an answer"
        return "have an empty question" if any(map(_asks_nothing, self.turns)) else None

    @property
    def answered(self) -> bool:
        """Some response is in the file."""
        return bool(self.answers) or self.whole or self.answer is not None or self.spans is not None

    @property
    def images(self) -> bool:
        """Some message has an image."""
        return bool(images_in(self.messages))

    @property
    def asked(self) -> list[Message]:
        """The first question: the list in `prompt`, or the messages before the first answer, if there are any."""
        begins = self.prompt > 0 or (bool(self.messages) and self.messages[0]["role"] != ASSISTANT)
        return self.turns[0] if begins else []

    @property
    def opening(self) -> str:
        """The first messages as text: conversations with the same opening are held out together."""
        if self.text or self.messages:
            return self.text or json.dumps(self.asked, sort_keys=True, default=str)
        return json.dumps((self.input_ids or [])[: self.spans[0][0] if self.spans else None])


def conversation(place: str, row: dict[str, Any], images: Path | None = None) -> Conversation:
    """Parse a row with `messages`, `conversations` (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`.

    A row with `input_ids` and `loss_mask`, as speculators prepares data, has tokens only.

    Args:
        images: folder of the images that messages name; default: the folder of the file.

    Raises:
        EmptyConversation: for a row that has one of these keys, and nothing in it.
        ConfigError: naming `place`, for a row that has none of these keys, for roles and parts of messages that are not
            known, and for images that cannot be used, see `image_part`.
    """
    kept = {key: row[key] for key in ("input_ids", "spans", "tokenizer") if row.get(key) is not None}
    tools = read_tools(place, row.get("tools"))
    answer = _answer(place, row, images)
    messages, prompt = _messages(place, row, answer, images)
    if messages:
        if isinstance(answer, list):
            repeated = _repeated(messages, answer)  # `chosen` often repeats the question
            ended = messages[-1]["role"] == ASSISTANT and not prompt
            messages = messages if ended else [*messages, *answer[repeated:]]
        elif answer is not None and (prompt or messages[-1]["role"] != ASSISTANT):
            messages = [*messages, {"role": ASSISTANT, "content": answer}]
        marked = frozenset(place for place, message in enumerate(messages) if message.get(CONTEXT))
        messages = [{key: value for key, value in message.items() if key != CONTEXT} for message in messages]
        return Conversation(place, messages, tools=tools, prompt=prompt, marked=marked, **kept)
    text = _asked_text(row)
    if not text and {"input_ids", "loss_mask"} <= row.keys():
        ids, mask = row["input_ids"], row["loss_mask"]
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            raise ConfigError(f"{place}: expected 'input_ids' and 'loss_mask' to be lists of one length")
        return Conversation(place, input_ids=ids, spans=mask_spans(mask))
    if not text:
        known = row.keys() & {*CONVERSATIONS, *TEXTS, "turns"}
        kind = EmptyConversation if known and all(_is_blank(row[key]) for key in known) else ConfigError
        raise kind(
            f"{place}: keys {sorted(row)}; expected a non-empty 'messages', 'conversations', 'turns', 'prompt', "
            "'question', 'instruction' or 'text'"
        )
    whole = isinstance(row.get("text"), str) and "prompt" not in row
    said = None if whole or not isinstance(answer, str) else answer
    return Conversation(place, text=text, whole=whole, answer=said, **kept)


def _repeated(messages: list[Message], answer: list[Message]) -> int:
    """Return the number of messages with which an answer repeats the question, with or without the system's."""
    body = messages[1:] if messages[0]["role"] == SYSTEM else messages
    return next((len(asked) for asked in (messages, body) if asked and answer[: len(asked)] == asked), 0)


def question(place: str, row: dict[str, Any], images: Path | None = None) -> Conversation:
    """Return the conversation of a row; ConfigError for one that a target cannot be asked."""
    asked = conversation(place, row, images)
    if asked.problem is not None:
        raise ConfigError(f"{place}: prompts that {asked.problem} cannot be decoded; expected a question in each turn")
    return asked


def _asks_nothing(turn: list[Message]) -> bool:
    """Return whether all messages of a turn are blank, and none is the result of a tool, which may be."""
    return all(_is_blank(message["content"]) and message["role"] != "tool" for message in turn)


def _is_blank(value: Any) -> bool:
    """Return whether a column is null, a blank text, or a list or an object of nothing else."""
    return (
        all(map(_is_blank, value.values() if isinstance(value, dict) else value))
        if isinstance(value, list | dict)
        else not (value.strip() if isinstance(value, str) else value)
    )


def mask_spans(mask: Iterable[int]) -> list[list[int]]:
    """Return the ranges of nonzero entries; the first token has none before it to be predicted from."""
    spans: list[list[int]] = []
    for place, trained in enumerate(mask):
        if trained and place:
            if spans and spans[-1][1] == place:
                spans[-1][1] += 1
            else:
                spans.append([place, place + 1])
    return spans


def _asked_text(row: dict[str, Any]) -> str:
    for key in TEXTS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            return f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
    return ""


def _answer(place: str, row: dict[str, Any], images: Path | None) -> str | list[Message] | None:
    """Return the answer in a column of its own: a text, or messages of which the last is the answer."""
    for key in ANSWERS:
        value = unpacked(place, key, row.get(key))
        if is_messages(value):
            return read_messages(place, value, images)
        if isinstance(value, str) and value:
            return value
    return None


def _messages(
    place: str, row: dict[str, Any], answer: str | list[Message] | None, images: Path | None
) -> tuple[list[Message], int]:
    """Return the messages of a row with the system's in a column of its own, and the length of a list in `prompt`.

    No messages for plain text.
    """
    messages: list[Message] = []
    listed = False
    turns = unpacked(place, "turns", row.get("turns"))
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns) and turns[0].strip():
        messages = [{"role": "user", "content": turn} for turn in turns]
    for key in () if messages else CONVERSATIONS:
        entries = unpacked(place, key, row.get(key))
        if isinstance(entries, list) and entries:
            messages, listed = read_messages(place, entries, images), key == "prompt"
            break
    system = _system(place, row)
    text = "" if messages or (isinstance(row.get("text"), str) and "prompt" not in row) else _asked_text(row)
    if text and (system is not None or isinstance(answer, list)):  # what plain text cannot show
        messages = [{"role": "user", "content": text}]
    if not messages and isinstance(answer, list):
        return answer, 0
    if messages and system:
        if messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": system}, *messages]
        elif str(messages[0]["content"]).strip() not in ("", system.strip()):
            raise ConfigError(f"{place}: a system message and another text in 'system'; expected one of them")
        else:
            messages = [{**messages[0], "content": system}, *messages[1:]]
    return messages, len(messages) if listed else 0


def _system(place: str, row: dict[str, Any]) -> str | None:
    """Return the system message in a column of its own; None without such a column."""
    texts = {row[key].strip(): row[key] for key in reversed(SYSTEMS) if isinstance(row.get(key), str)}
    given = [text for stripped, text in texts.items() if stripped]
    if len(given) > 1:
        raise ConfigError(f"{place}: 'system' and 'system_prompt' differ; expected one of them")
    return given[0] if given else "" if texts else None
