"""What a run knows of its machine and nobody else need: local paths are cut to their last part, secrets refused."""

import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import get_token

from draftsmith.errors import ConfigError
from draftsmith.safe_text import SECRET

PATH = re.compile(r"""(?<![^\s='"(,])(?:~|[A-Za-z]:)?[/\\]+[\w.~-][^\s'",;)]*""")
"""An absolute path inside a text: not what stands behind a word or a colon, as in `tokens/s` and `https://…`."""
FILES = (".json", ".jsonl", ".ndjson", ".gz", ".txt", ".parquet", ".arrow", ".csv")


def is_local(name: str) -> bool:
    """Whether a target or a file of prompts has its name from this machine, rather than from the Hub: `user/name`."""
    anywhere = name.startswith((".", "/", "~", "\\")) or bool(PureWindowsPath(name).drive)
    return anywhere or name.count("/") != 1 or name.endswith(FILES) or Path(name).exists()


def last_part(path: str) -> str:
    """`/home/someone/data/prompts.jsonl` as `prompts.jsonl`."""
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name or path


def without_local_paths(value: Any) -> Any:
    """Plain values with every absolute path, inside any text, cut to its last part. Keys stay."""
    if isinstance(value, dict):
        return {key: without_local_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~/", "\\\\")) or PureWindowsPath(value).is_absolute():
        return last_part(value)
    return PATH.sub(lambda found: last_part(found.group()), value)


def require_no_secret(name: str, text: str) -> None:
    """ConfigError where a text that is to be published holds a token or a password; it is not repeated."""
    token = get_token()
    if SECRET.search(text) or (token and token in text):
        raise ConfigError(f"{name} holds what looks like a token or a password; expected none: nothing was published")
