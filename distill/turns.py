"""A conversation while a target answers it turn by turn, and the samples that it becomes; seeds of its answers."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import Conversation
from draftsmith.distill.messages import ASSISTANT, Message
from draftsmith.provenance import fingerprint


class Asked:
    """A conversation while it is answered.

    Args:
        index: the place of the question in its data set.
        prompt: the tokens that the first answer follows.
        turns: the user's turns and the tools as JSON; '' for plain text.
        number: of the question, for seeds, see `question_numbers`; default: its place.
        images: of the prompt, see `FEATURES` of distill/dataset.py; a conversation with images has one turn.
    """

    def __init__(self, index: int, prompt: list[int], turns: str, number: int | None = None, images: str = "") -> None:
        self.index, self.prompt = index, prompt
        self.number, self.images = index if number is None else number, images
        question = json.loads(turns) if turns else {"turns": [[]], "tools": None}
        self._turns, self.tools = question["turns"], question["tools"]
        self.messages: list[Message] = list(self._turns[0])
        """The messages that `prompt` shows; empty for plain text."""
        self._rows: list[dict[str, Any]] = []

    @property
    def turns(self) -> int:
        return len(self._turns)

    def add_tokens(self, answer: list[int], chat: Chat) -> None:
        """Append an answer that was sampled as tokens."""
        content = chat.answer(self.messages, self.as_conversation(), self.prompt, answer) if self.messages else ""
        self.add([*self.prompt, *answer], len(self.prompt), {"role": ASSISTANT, "content": content})

    def add(self, ids: list[int], start: int, message: Message) -> None:
        """Append an answer: `ids` are the conversation up to its end, and the answer begins at `start`."""
        spans, last = [[start, len(ids)]], self._rows[-1]["input_ids"] if self._rows else []
        if last and len(last) <= start and ids[: len(last)] == last:
            spans = [*self._rows.pop()["spans"], *spans]
        if self.messages:
            self.messages.append(message)
        messages = json.dumps(self.messages) if self.messages else ""
        self._rows.append({"input_ids": ids, "spans": spans, "question": self.index, "messages": messages})

    def ask(self, chat: Chat, turn: int, fits: Callable[[list[int]], bool]) -> bool:
        """Append the next question to the last answer; return False if there is none, or no room for its answer."""
        if turn >= len(self._turns):
            return False
        messages = [*self.messages, *self._turns[turn]]
        prompt = chat.generation_prompt(messages, self.as_conversation())
        if not fits(prompt):
            return False
        self.messages, self.prompt = messages, prompt
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples so far: `input_ids`, `spans`, `question` and `messages`."""
        return self._rows

    def as_conversation(self) -> Conversation:
        """Return the variables of the chat template besides the messages."""
        return Conversation(f"question {self.index}", tools=self.tools)


def question_numbers(questions: Dataset) -> list[int]:
    """Return a number below 2**60 for each question, from its tokens, turns and images.

    Questions that are equal get different numbers, by their order.
    """
    images = questions["images"] if "images" in questions.column_names else [""] * len(questions)
    seen: Counter[str] = Counter()
    numbers = []
    for ids, turns, shown in zip(questions["input_ids"], questions["turns"], images, strict=True):
        key = fingerprint([ids, turns, json.loads(shown)["content"] if shown else ""])
        numbers.append(int(fingerprint([key, seen[key]])[:15], 16))
        seen[key] += 1
    return numbers


def text_seed(*parts: int) -> int:
    """Return a seed of 63 bits; different for different parts."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8]) >> 1
