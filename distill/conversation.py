"""Conversations, and rows in the common formats (ShareGPT, messages, prompts, plain text) as conversations."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.distill.messages import (
    ASSISTANT,
    CONTEXT,
    SYSTEM,
    Message,
    images_in,
    is_messages,
    read_messages,
    read_tools,
    text_of,
    unpacked,
)
from draftsmith.errors import ConfigError

ANSWERS = ("response", "completion", "answer", "output", "chosen")
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
QUESTIONS = ("prompt", "question", "instruction", "input")
TEXT = "text"
SYSTEMS = ("system", "system_prompt")
KEYS = {*ANSWERS, *CONVERSATIONS, *QUESTIONS, *SYSTEMS, TEXT, "turns", "tools", "loss_mask"}
"""Keys of rows that are read."""
SAMPLED = {"input_ids", "spans", "tokenizer", "server", "usage"}
"""Keys that `draftsmith data regenerate` adds."""


class LeftOut(ConfigError):
    """A row that is left out and counted.

    Args:
        reason: the end of "rows that …".
    """

    faulty = False
    """More than half of such rows end a run."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EmptyConversation(LeftOut):
    """A row whose messages or text are empty."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "are empty")


class Unanswered(LeftOut):
    """A row without an answer, which is to be trained on."""

    faulty = True

    def __init__(self, place: str) -> None:
        expected = "a 'text', an assistant message, or 'response', 'completion', 'answer' or 'output'"
        message = f"{place}: no answer; data.response='text' expected {expected}; with data.response='target' the"
        super().__init__(f"{message} target answers", "have no answer")


def reason_left_out(place: str, error: ConfigError) -> str:
    """Return the end of "rows that …" for a row at a place that cannot be used."""
    if isinstance(error, LeftOut):
        return error.reason
    return f"cannot be read ({str(error).removeprefix(f'{place}: ').partition(';')[0]})"


def require_most(rows: int, faulty: int, last: ConfigError | None) -> None:
    """Raise ConfigError, with the last reason, where more than half of the rows are faulty."""
    if last is not None and faulty > rows / 2:
        raise ConfigError(f"{faulty:,} of {rows:,} rows cannot be used, such as {last}") from last


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
    unused: frozenset[str] = frozenset()
    """Keys of the row that nothing was made of."""

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages after the list in `prompt`."""
        indices = range(self.prompt, len(self.messages))
        return [index for index in indices if self.messages[index]["role"] == ASSISTANT]

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
    asked = _asked(place, row, images)
    messages, text = asked.messages, asked.text
    answer, answered = _answer(place, row, images)
    whole = asked.keys == {TEXT} and (answer is None or (isinstance(answer, str) and answer.strip() in text))
    system = None if whole else _system(place, row)
    if text and not whole and (system is not None or isinstance(answer, list)):  # what plain text cannot show
        messages = [{"role": "user", "content": text}]
    used = asked.keys | ({"tools"} if tools and (messages or isinstance(answer, list)) else set())
    if not messages and not text and isinstance(answer, list):
        messages, answer = answer, None
        used |= answered
    if messages:
        prompt = len(messages) if asked.keys == {"prompt"} and not text else 0
        messages, more = _with_system(place, messages, system)
        used |= set() if system is None else {*SYSTEMS}
        prompt += more if prompt else 0
        if answer is not None and (prompt or messages[-1]["role"] != ASSISTANT):
            # `chosen` often repeats the question
            said = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
            messages = [*messages, *said[_repeated(messages, said) :]]
            used |= answered
        marked = frozenset(place for place, message in enumerate(messages) if message.get(CONTEXT))
        messages = [{key: value for key, value in message.items() if key != CONTEXT} for message in messages]
        how = {"prompt": prompt, "marked": marked, "unused": _unused(row, used)}
        return Conversation(place, messages, tools=tools, **how, **kept)
    if not text and {"input_ids", "loss_mask"} <= row.keys():
        ids, mask = row["input_ids"], row["loss_mask"]
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            raise ConfigError(f"{place}: expected 'input_ids' and 'loss_mask' to be lists of one length")
        unused = _unused(row, {"loss_mask"})
        return Conversation(place, input_ids=ids, spans=mask_spans(mask), unused=unused)
    if not text:
        known = row.keys() & {*CONVERSATIONS, *QUESTIONS, TEXT, "turns"}
        kind = EmptyConversation if known and all(is_blank(row[key]) for key in known) else ConfigError
        raise kind(
            f"{place}: keys {sorted(row)}; expected a non-empty 'messages', 'conversations', 'turns', 'prompt', "
            "'question', 'instruction' or 'text'"
        )
    said = None if whole or not isinstance(answer, str) else answer
    unused = _unused(row, used if whole else used | answered)
    return Conversation(place, text=text, whole=whole, answer=said, unused=unused, **kept)


def _unused(row: dict[str, Any], used: set[str]) -> frozenset[str]:
    """Return the keys of a row that are not known, and those of which nothing was made, except for blank ones."""
    others = (key for key in row.keys() & KEYS - used if not is_blank(row[key]))
    return frozenset({*(row.keys() - KEYS - SAMPLED), *others})


def _repeated(messages: list[Message], answer: list[Message]) -> int:
    """Return the number of messages with which an answer repeats the question, with or without the system's."""
    body = messages[1:] if messages[0]["role"] == SYSTEM else messages
    return next((len(asked) for asked in (messages, body) if asked and answer[: len(asked)] == asked), 0)


def question(place: str, row: dict[str, Any], images: Path | None = None) -> Conversation:
    """Return the conversation of a row; LeftOut for one that a target cannot be asked."""
    asked = conversation(place, row, images)
    if asked.problem is not None:
        why = f"{place}: prompts that {asked.problem} cannot be decoded; expected a question in each turn"
        raise LeftOut(why, asked.problem)
    return asked


def _asks_nothing(turn: list[Message]) -> bool:
    """Return whether all messages of a turn are blank, and none is the result of a tool, which may be."""
    return all(is_blank(message["content"]) and message["role"] != "tool" for message in turn)


def is_blank(value: Any) -> bool:
    """Return whether a column is null, a blank text, or a list or an object of nothing else."""
    return (
        all(map(is_blank, value.values() if isinstance(value, dict) else value))
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


class _Asked(NamedTuple):
    """The messages or the text of a row, and the keys that hold them."""

    messages: list[Message]
    text: str
    keys: set[str]


def _asked(place: str, row: dict[str, Any], images: Path | None) -> _Asked:
    """Return the first that a row has: `turns`, messages, a question, or a text that may contain the answer."""
    turns = unpacked(place, "turns", row.get("turns"))
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns) and turns[0].strip():
        return _Asked([{"role": "user", "content": turn} for turn in turns], "", {"turns"})
    for key in CONVERSATIONS:
        entries = unpacked(place, key, row.get(key))
        if isinstance(entries, list) and entries:
            return _Asked(read_messages(place, entries, images), "", {key})
    texts = {key: row[key] for key in (*QUESTIONS, TEXT) if isinstance(row.get(key), str) and row[key].strip()}
    for key, text in texts.items():
        more = texts.get("input") if key == "instruction" else None
        return _Asked([], text, {key}) if more is None else _Asked([], f"{text}\n\n{more}", {key, "input"})
    return _Asked([], "", set())


def _answer(place: str, row: dict[str, Any], images: Path | None) -> tuple[str | list[Message] | None, set[str]]:
    """Return the answer in a column of its own, a text, or messages of which the last is the answer; and its key."""
    given = {key: unpacked(place, key, row.get(key)) for key in ANSWERS}
    for key, value in given.items():
        if is_messages(value):
            return read_messages(place, value, images), {key}
        if isinstance(value, str) and value.strip():
            return value, {key}
    for key, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value), {key}
        if isinstance(value, dict | list) and not is_blank(value):
            parts = value if isinstance(value, list) else [value]
            if len(parts) == 1 or all(isinstance(part, dict) for part in parts):  # several texts are several answers
                with suppress(ConfigError):
                    return text_of(place, key, value), {key}
    return None, set()


def _system(place: str, row: dict[str, Any]) -> str | None:
    """Return the system message in a column of its own; None without such a column."""
    given = {key: row[key] for key in reversed(SYSTEMS) if row.get(key) is not None}
    texts = [value if isinstance(value, str) else text_of(place, key, value) for key, value in given.items()]
    said = {text.strip(): text for text in texts if text.strip()}
    if len(said) > 1:
        raise ConfigError(f"{place}: 'system' and 'system_prompt' differ; expected one of them")
    return next(iter(said.values())) if said else "" if texts else None


def _with_system(place: str, messages: list[Message], system: str | None) -> tuple[list[Message], int]:
    """Return messages that begin with the system's in a column of its own, and how many more they are."""
    if not system:
        return messages, 0
    if messages[0]["role"] != SYSTEM:
        return [{"role": SYSTEM, "content": system}, *messages], 1
    if str(messages[0]["content"]).strip() not in ("", system.strip()):
        raise ConfigError(f"{place}: a system message and another text in 'system'; expected one of them")
    return [{**messages[0], "content": system}, *messages[1:]], 0
