"""Names of targets, drafters, prompts, policies and rules as users write them, checked without loading anything."""

import os
import re
import socket
import sys
from functools import cache
from pathlib import Path

from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import read_json

EMBEDDED = "embedded"
TEXTS = (".jsonl", ".ndjson", ".json", ".txt", ".csv")
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz")
KNOWN = (*TEXTS, *TABLES, *(text + end for text in TEXTS for end in COMPRESSED))
"""Ends of the names of prompt files: of texts, which may be compressed, of tables, and all."""
PLAIN = "plain"
TEMPLATES = ("vicuna", PLAIN)
"""Chat templates in `distill/templates`, and the name for none: the texts of the messages, joined by line breaks."""
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a target."""
FLASH = re.compile(r"flash_attention_\d|kernels-community/[\w.-]*flash[\w.-]*")
"""Names of flash attention: of an installed package, or of a kernel on the Hub."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]*")
GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"
GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def is_hub_gguf(name: str) -> bool:
    """Return whether a name has the form of a GGUF file on the Hub, `USER/NAME/FILE.gguf`."""
    return name.endswith(GGUF) and name.count("/") == 2 and not name.startswith((".", "/", "~"))


def check_target_name(name: str, key: str = "target") -> None:
    """Raise ConfigError, naming `key`, for a local path that does not exist, or a GGUF file that cannot be read."""
    path = Path(name).expanduser()
    if name.endswith(GGUF) and not path.is_dir():
        _check_gguf(name, path, key)
    elif name != EMBEDDED and (name.startswith((".", "/", "~")) or name.count("/") > 1) and not path.is_dir():
        raise ConfigError(
            f"{key}={name}; expected 'embedded', an existing folder, a GGUF file or a Hub id; there is no such folder"
        )
    elif path.is_dir():
        _check_no_drafter(name, key)


def check_repo(key: str, name: str) -> None:
    """Raise ConfigError unless `name` is a repository id, `user/name`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{key}={name!r}; expected user/name ({reason_of(error)})") from error
    if "/" not in name:
        raise ConfigError(f"{key}={name!r}; expected user/name")


def check_licence(licence: str, key: str = "licence") -> None:
    """Raise ConfigError unless `licence` has the form of an identifier. The Hub checks the rest."""
    if not LICENCE.fullmatch(licence):
        raise ConfigError(f"{key}={licence!r}; expected the Hub's identifier of a licence, such as apache-2.0 or mit")


def drafter_of(name: str) -> str:
    """Return the folder of a run's drafter for the folder of the run, and any other name as it is."""
    folder = Path(name).expanduser()
    is_run = not (folder / "config.json").exists() and (folder / "drafter" / "config.json").is_file()
    return str(folder / "drafter") if is_run else name


def _check_no_drafter(name: str, key: str) -> None:
    """Raise ConfigError for the folder of a run, and for that of a head, which is no model by itself."""
    folder = Path(drafter_of(name)).expanduser()
    try:
        section = dict(read_json(folder / "config.json")["draftsmith"])
        kind, made_for = section["type"], section["target"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if kind != "draft_model" or drafter_of(name) != name:
        raise ConfigError(f"{key}={name} is a drafter of type {kind} for {made_for}; expected a target, as {made_for}")


def _check_gguf(name: str, path: Path, key: str) -> None:
    if is_hub_gguf(name) and not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{key}={name}; expected a GGUF file, and there is no such file")
    if GGUF_PART.search(name):
        raise ConfigError(
            f"{key}={name} is one of several parts; expected one file (llama-gguf-split --merge joins them)"
        )
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ConfigError(f"{key}={name} is not a GGUF file: it does not begin with {GGUF_MAGIC.decode()}")


def check_attention(key: str, name: str | None, dtype: str) -> None:
    """Raise ConfigError, naming `key`, for an attention implementation that targets cannot use; nothing is loaded."""
    if name is None or name in ("sdpa", "eager"):
        return
    if FLASH.fullmatch(name) is None:
        raise ConfigError.of(
            key, name, "sdpa, eager, flash_attention_2, flash_attention_3 or a flash attention of kernels-community"
        )
    if dtype == "float32":
        raise ConfigError(f"{key}={name} with dtype=float32; expected bfloat16 or float16, which flash attention reads")


def check_drafter_name(name: str, key: str = "drafter") -> None:
    """Raise ConfigError, naming `key`, if a name begins as a local path does and no such folder exists."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"{key}={name}; expected a local folder or a Hub id; there is no such folder")


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen at this address."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(f"port={port} at host={host}: {reason_of(error)}; expected another --port") from error


def prompts_look_local(name: str) -> bool:
    """Return whether a name that does not exist is meant as a file or a folder of prompts, not as a Hub data set."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(KNOWN)


def check_prompts_name(name: str, key: str = "prompts") -> None:
    """Raise ConfigError, naming `key`, if prompts are named by a file or a folder that does not exist."""
    if name != EMBEDDED and prompts_look_local(name) and not Path(name).expanduser().exists():
        raise ConfigError(f"{key}={name}; expected a file or a folder, and there is none")


def check_template_name(name: str, key: str) -> None:
    """Raise ConfigError, naming `key`, if a chat template is neither shipped nor a file."""
    if name not in TEMPLATES and not Path(name).expanduser().is_file():
        raise ConfigError(f"{key}={name}; expected a file, or one of {', '.join(TEMPLATES)}; there is no such file")


def require_cached_without_hub(name: str, key: str) -> None:
    """Where the Hub cannot be reached, use its cache without asking again; ConfigError if `name` is not in there.

    The Hub's client would repeat each request five times, with growing pauses.
    """
    if name == EMBEDDED or Path(name).expanduser().exists() or (name.endswith(GGUF) and not is_hub_gguf(name)):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    why = _why_not_asked()
    if why is None:
        return
    repo, _, revision = name.partition("@")
    repo, file = repo.rsplit("/", 1) if is_hub_gguf(name) else (repo, "config.json")
    try:
        cached = try_to_load_from_cache(repo, file, revision=revision or None)
    except HFValidationError as error:
        raise ConfigError(f"{key}={name}; expected a local folder or a Hub id, and it is neither") from error
    if not isinstance(cached, str):
        raise ConfigError(f"{key}={name}: no such folder, not in the Hub's cache, and {constants.ENDPOINT} {why}")
    _use_the_cache(why)


def require_cached_prompts(name: str, key: str) -> None:
    """As `require_cached_without_hub`, for prompts: a data set of the Hub is in the cache of `datasets`."""
    if prompts_look_local(name) or Path(name).expanduser().exists():
        return
    from huggingface_hub import constants

    why = _why_not_asked()
    if why is None:
        return
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets").expanduser()
    folders = [folder.name for folder in cache.iterdir()] if cache.is_dir() else []
    if not any(_letters(folder) == _letters(name) for folder in folders):
        raise ConfigError(f"{key}={name}: no such file, not in the cache of data sets, and {constants.ENDPOINT} {why}")
    _use_the_cache(why)


def _letters(name: str) -> str:
    """Return what the name of a data set and that of its folder in the cache have in common."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _why_not_asked() -> str | None:
    """Return why the Hub gives no answer; None if it does."""
    from huggingface_hub import constants

    return "is not asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else _hub_problem(constants.ENDPOINT)


def _use_the_cache(why: str) -> None:
    """Let the libraries read their caches, without asking the Hub again."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    print(f"note: {constants.ENDPOINT} {why}; what is cached is used", file=sys.stderr)
    os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
    if (datasets := sys.modules.get("datasets.config")) is not None:
        vars(datasets)["HF_HUB_OFFLINE"] = True


@cache
def _hub_problem(endpoint: str) -> str | None:
    """Return why the Hub gives no answer, after a second try; None if it does."""
    from huggingface_hub.utils import get_session

    for again in (True, False):
        try:
            get_session().head(endpoint, timeout=5)
        except Exception as error:  # of the client that huggingface_hub uses, httpx or requests
            if not again:
                return f"cannot be reached ({reason_of(error)})"
        else:
            return None
    return None
