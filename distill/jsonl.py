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
        return tokenizer(asked, verbose=False)["input_ids"]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    return tokenizer("\n".join(message["content"] for message in asked))["input_ids"]


ANSWERS = ("response", "completion", "answer", "output")


def answered_ids(
    tokenizer: Any, path: Path, number: int, row: dict[str, Any], prompt_tokens: int
) -> tuple[list[int], list[int]]:
    """Token ids of a row's prompt and of the answer that stands beside it.

    The answer is the first assistant message, or under one of `ANSWERS`; a lone `text` is cut into a beginning of at
    most `prompt_tokens` tokens, at most half of it, and a rest.
    """
    if isinstance(row.get("text"), str) and "prompt" not in row:
        ids = tokenizer(row["text"])["input_ids"]
        cut = min(prompt_tokens, len(ids) // 2)
        if cut > 0:
            return ids[:cut], ids[cut:]
        raise ConfigError(f"{path}:{number}: {len(ids)} tokens of text; expected at least 2")
    prompt = prompt_ids(tokenizer, conversation(path, number, row))
    messages = row["messages"] if isinstance(row.get("messages"), list) else []
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    answers += [row[key] for key in ANSWERS if isinstance(row.get(key), str)]
    ids = tokenizer(answers[0], add_special_tokens=False)["input_ids"] if answers else []
    if not ids:
        raise ConfigError(
            f"{path}:{number}: no answer; data.response='text' expected a 'text', an assistant message, or one of "
            f"{', '.join(ANSWERS)}"
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return prompt, [*ids, *end]
