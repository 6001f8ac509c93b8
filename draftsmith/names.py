"""Names of targets, drafters and prompts as users write them, checked without loading anything."""

import re
from pathlib import Path

from draftsmith.errors import ConfigError

EMBEDDED = "embedded"
LINES = (".jsonl", ".ndjson", ".jsonl.gz")
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
KNOWN = (*LINES, ".json", ".txt", *TABLES)
"""Ends of the names of prompt files: of JSON lines, of tables, and all."""
GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"
GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def is_hub_gguf(name: str) -> bool:
    """Return whether a name has the form of a GGUF file on the Hub, `USER/NAME/FILE.gguf`."""
    return name.endswith(GGUF) and name.count("/") == 2 and not name.startswith((".", "/", "~"))


def check_target_name(name: str) -> None:
    """Raise ConfigError if a name looks like a local path that does not exist, or is no readable GGUF file."""
    path = Path(name).expanduser()
    if name.endswith(GGUF) and not path.is_dir():
        _check_gguf(name, path)
    elif name != EMBEDDED and (name.startswith((".", "/", "~")) or name.count("/") > 1) and not path.is_dir():
        raise ConfigError(
            f"target={name}; expected 'embedded', an existing folder, a GGUF file or a Hub id; there is no such folder"
        )


def _check_gguf(name: str, path: Path) -> None:
    if is_hub_gguf(name) and not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"target={name}; expected a GGUF file, and there is no such file")
    if GGUF_PART.search(name):
        raise ConfigError(
            f"target={name} is one of several parts; expected one file (llama-gguf-split --merge joins them)"
        )
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ConfigError(f"target={name} is not a GGUF file: it does not begin with {GGUF_MAGIC.decode()}")


def check_drafter_name(name: str) -> None:
    """Raise ConfigError if a name begins as a local path does and no such folder exists."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"drafter={name}; expected a local folder or a Hub id; there is no such folder")


def prompts_look_local(name: str) -> bool:
    """Return whether a name that does not exist is meant as a file or a folder of prompts, not as a Hub data set."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(KNOWN)


def check_prompts_name(name: str) -> None:
    """Raise ConfigError if prompts are named by a file or a folder that does not exist."""
    if name != EMBEDDED and prompts_look_local(name) and not Path(name).expanduser().exists():
        raise ConfigError(f"prompts={name}; expected a file or a folder, and there is none")
