"""Prompt sets: the embedded held-out text, or JSON lines."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from draftsmith.distill.chat import Chat
from draftsmith.distill.conversations import conversation
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.sources import read_source
from draftsmith.distill.targets import EMBEDDED
from draftsmith.errors import ConfigError

EMBEDDED_PROMPT_TOKENS = 48
UNCATEGORISED = "uncategorised"


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, and the category that its numbers count towards."""

    id: str
    category: str
    input_ids: list[int]


def check_prompts(source: str) -> None:
    """ConfigError for a prompt file that is missing, empty or malformed; needs no tokenizer."""
    if source == EMBEDDED:
        return
    for place, row in read_source(source):
        conversation(place, row)


def load_prompts(source: str, tokenizer: Any, *, count: int | None = None, context: int | None = None) -> list[Prompt]:
    """At most `count` prompts (all of a file by default, 12 of the embedded text).

    A file has rows with `prompt`, or Spec-Bench's and MT-Bench's `turns` (of which the first is asked), and optionally
    `category` and an id.

    Raises:
        ConfigError: naming the line of a bad row, or of a prompt that leaves no room in a context of `context` tokens.
    """
    if source == EMBEDDED:
        rows = embedded_prompts(tokenizer, "heldout", count or 12, EMBEDDED_PROMPT_TOKENS, seed=1)
        return [Prompt(str(row["id"]), row["category"], row["input_ids"]) for row in rows]
    chat, prompts = Chat(tokenizer), []
    for number, (place, row) in enumerate(islice(read_source(source), count), 1):
        ids = chat.prompt(conversation(place, row))
        if context is not None and len(ids) >= context:
            raise ConfigError(f"{place}: prompt={len(ids)} tokens; expected fewer than the context of {context}")
        if not ids:
            raise ConfigError(f"{place}: prompt=0 tokens; expected at least 1")
        name = row.get("question_id", row.get("task_id", row.get("id", number)))
        category = str(row.get("category") or UNCATEGORISED)
        # `all` is the row that sums up a run.
        prompts.append(Prompt(str(name), UNCATEGORISED if category == "all" else category, ids))
    return prompts
