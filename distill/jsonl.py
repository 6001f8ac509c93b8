"""Reading JSON lines, plain or gzipped, with errors that name the line."""

import gzip
import json
from pathlib import Path
from typing import Any

from draftsmith.errors import ConfigError


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank.

    Raises:
        ConfigError: for a missing or empty file, or a line that is not a JSON object.
    """
    if not path.is_file():
        raise ConfigError(f"prompts={path}; expected a JSONL file, and there is none")
    rows = []
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append((number, _object(path, number, line)))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as text ({error}); expected JSONL in UTF-8") from error
    if not rows:
        raise ConfigError(f"{path} is empty; expected one JSON object a line")
    return rows


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: not JSON ({error}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}:{number}: {type(row).__name__}; expected a JSON object")
    return row


def conversation(path: Path, number: int, row: dict[str, Any]) -> str | list[dict[str, str]]:
    """What the target is asked to continue: plain text, or the messages up to the first answer.

    Understands `prompt` or `text` (a string), `turns` (a list of user turns, of which the first is taken), `messages`
    (role and content), and `question`.
    """
    for key in ("prompt", "text", "question"):
        if isinstance(row.get(key), str) and row[key].strip():
            return row[key]
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        return [{"role": "user", "content": turns[0]}]
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        if first > 0:
            return messages[:first]
    raise ConfigError(
        f"{path}:{number}: keys {sorted(row)}; expected a non-empty 'prompt', 'text', 'question', 'turns' or 'messages'"
    )


def prompt_ids(tokenizer: Any, asked: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt; messages go through the tokenizer's chat template where it has one."""
    if isinstance(asked, str):
        return tokenizer(asked)["input_ids"]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    return tokenizer("\n".join(message["content"] for message in asked))["input_ids"]
