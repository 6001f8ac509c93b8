"""One shape for every way in which people write conversations down: ShareGPT, messages, prompts, plain text."""

import json
from dataclasses import dataclass, field
from typing import Any

from draftsmith.errors import ConfigError
from draftsmith.reading import parse_json

Message = dict[str, Any]
"""`role`, `content`, and whatever else the chat template knows, such as `tool_calls` or `reasoning_content`."""

ANSWERS = ("response", "completion", "answer", "output", "chosen")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names, and what chat templates call them."""
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, or plain text that the target is to continue."""

    place: str
    """File and line, for errors."""
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    """Instead of messages."""
    whole: bool = False
    """The text holds its own continuation."""
    answer: str | None = None
    """What stands beside the text."""
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    """Tokens as they were sampled, where the file keeps them (`draftsmith data regenerate`)."""
    spans: list[list[int]] | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that `input_ids` belong to."""

    @property
    def turns(self) -> list[list[Message]]:
        """What stands between the answers, the target being asked behind each; without any answer, each user message
        is a turn."""
        unanswered = all(message["role"] != ASSISTANT for message in self.messages)
        turns: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] == ASSISTANT:
                turns.append([])
                continue
            if unanswered and any(before["role"] == "user" for before in turns[-1]):
                turns.append([])
            turns[-1].append(message)
        return [turn for turn in turns if turn]

    @property
    def asked(self) -> list[Message]:
        """The messages before the first answer; none where an answer comes first."""
        begins = bool(self.messages) and self.messages[0]["role"] != ASSISTANT
        return self.turns[0] if begins else []

    @property
    def opening(self) -> str:
        """What two conversations have in common when one must not be held out while the other is trained on."""
        return self.text or json.dumps(self.asked, sort_keys=True, default=str)


def conversation(place: str, row: dict[str, Any]) -> Conversation:
    """Read a row with `messages`, `conversations` (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`.

    Raises:
        ConfigError: naming `place`, for a row that has none of them, or nothing in it.
    """
    kept = {key: row[key] for key in ("input_ids", "spans", "tokenizer") if row.get(key) is not None}
    tools = _tools(place, row.get("tools"))
    messages = _messages(place, row)
    if messages:
        answer = _answer(row)
        if answer is not None and messages[-1]["role"] != ASSISTANT:
            messages = [*messages, {"role": ASSISTANT, "content": answer}]
        return Conversation(place, messages, tools=tools, **kept)
    text = _text(row)
    if not text:
        raise ConfigError(
            f"{place}: keys {sorted(row)}; expected a non-empty 'messages', 'conversations', 'turns', 'prompt', "
            "'question', 'instruction' or 'text'"
        )
    whole = isinstance(row.get("text"), str) and "prompt" not in row
    return Conversation(place, text=text, whole=whole, answer=None if whole else _answer(row), **kept)


def _text(row: dict[str, Any]) -> str:
    for key in ("prompt", "text", "question", "instruction"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            return f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
    return ""


def _answer(row: dict[str, Any]) -> str | None:
    for key in ANSWERS:
        value = row.get(key)
        if isinstance(value, list) and value and isinstance(value[-1], dict):  # the answer as messages
            value = value[-1].get("content")
        if isinstance(value, str) and value:
            return value
    return None


def _messages(place: str, row: dict[str, Any]) -> list[Message]:
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        if not turns[0].strip():
            return []
        return [{"role": "user", "content": turn} for turn in turns]
    for key in ("messages", "conversations", "conversation", "prompt"):
        found = row.get(key)
        if isinstance(found, list) and found:
            system = row.get("system")
            first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            return first + [_message(place, number, entry) for number, entry in enumerate(found, 1)]
    return []


def _message(place: str, number: int, entry: Any) -> Message:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: message {number} is {type(entry).__name__}; expected role and content")
    # Tables give every message every field that any of them has.
    entry = {key: value for key, value in entry.items() if value is not None}
    if "from" in entry and "value" in entry:
        role = ROLES.get(entry["from"]) if isinstance(entry["from"], str) else None
        if role is None:
            raise ConfigError(
                f"{place}: message {number} is from {entry['from']!r}; expected one of {', '.join(ROLES)}"
            )
        rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
        return {**rest, "role": role, "content": entry["value"]}
    if not isinstance(entry.get("role"), str) or not ({"content", "tool_calls"} & entry.keys()):
        raise ConfigError(f"{place}: message {number} has keys {sorted(entry)}; expected role and content")
    return {"content": "", **entry}


def _tools(place: str, tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ConfigError(f"{place}: 'tools' is not JSON ({error}); expected a list of tools") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ConfigError(f"{place}: 'tools' is {type(tools).__name__}; expected a list of tools")
    return tools
