"""GGUF files as targets: dequantized once by transformers into a folder of the cache, which is then read as others are.

A folder holds the whole target in one dtype (`model`) or its config and tokenizer alone (`description`). It is keyed by
the file's SHA-256, so that a changed file is another target.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, hf_hub_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.formats.gguf_tokenizers import adds_bos, complete
from draftsmith.heads.untrusted import without_warnings
from draftsmith.names import GGUF, check_target_name, is_hub_gguf
from draftsmith.storage import atomic_folder, cache_dir, hold_cache

FORMAT = 2
"""Part of the key: increased when another version of this module would write other folders."""


def gguf_file(name: str, revision: str | None = None) -> Path | None:
    """Return the GGUF file that the name of a target means, downloaded if it is on the Hub; None for other targets.

    A name means a GGUF file if it ends in `.gguf` (a local file, or `USER/NAME/FILE.gguf` on the Hub), or is a local
    folder or a Hub repository that has one GGUF file and no config.json.

    Raises:
        ConfigError: if several files fit, or the named one does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return None
        return _only(name, sorted(path.glob(f"*{GGUF}")))
    if name.endswith(GGUF):
        if path.is_file() or not is_hub_gguf(name):
            return path
        repository, _, file = name.rpartition("/")
        return Path(hf_hub_download(repository, file, revision=revision))
    if path.exists() or name.count("/") != 1:
        return None
    files = _files_of_repository(name, revision)
    chosen = _only(name, files)
    return None if chosen is None else Path(hf_hub_download(name, chosen, revision=revision))


def description(file: Path) -> Path:
    """Return a folder with the config and the tokenizer of a GGUF file, without its weights."""

    def write(folder: Path) -> None:
        config = _plain(AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False))
        config.save_pretrained(folder)
        _save_tokenizer(file, folder, config.vocab_size)

    return _converted(file, "description", write)


def model(file: Path, dtype: torch.dtype) -> Path:
    """Return a folder with the dequantized weights of a GGUF file in `dtype`, its config and its tokenizer."""

    def write(folder: Path) -> None:
        options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, "trust_remote_code": False}
        # With output_loading_info the result is a pair, unlike its annotation.
        read = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **options, **_dequantized())
        loaded, info = cast(tuple[PreTrainedModel, dict[str, Any]], read)
        for name in sorted(info["missing_keys"]):
            raise ConfigError(f"target={file} has no tensor {name}; expected all weights of the model")
        # transformers refuses to save a model that it loaded from a GGUF file; the state of a plain one it saves.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(_plain(loaded.config), dtype=dtype)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(folder)
        _save_tokenizer(file, folder, plain.config.vocab_size)

    return _converted(file, str(dtype).removeprefix("torch."), write)


def plain_folder(target: PreTrainedModel) -> str | None:
    """Return the dequantized folder that a target was loaded from, which other engines load; None for other targets."""
    folder = Path(str(target.name_or_path))
    return str(folder) if cache_dir() / "gguf" in folder.parents else None


def sha256_of(file: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _converted(file: Path, part: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of the cache with one part of a GGUF file; call `write` with it where it does not exist."""
    if find_spec("gguf") is None:
        raise ConfigError(f"target={file}: GGUF files need another package: pip install '.[gguf]'")
    check_target_name(str(file))
    folder = cache_dir() / "gguf" / f"{sha256_of(file)[:16]}-{FORMAT}" / part
    with hold_cache(folder):
        if not folder.is_dir():
            try:
                with atomic_folder(folder) as temporary, without_warnings():
                    write(temporary)
            except (ConfigError, OSError):
                raise
            except Exception as error:  # readers of GGUF raise errors without a common base
                raise ConfigError(
                    f"target={file} cannot be read ({reason_of(error)}); expected a whole GGUF file of an architecture "
                    "that transformers dequantizes"
                ) from error
    return folder


def _scalars(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file that are no lists."""
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items() if field.types[:1] != [GGUFValueType.ARRAY]}


def _save_tokenizer(file: Path, folder: Path, vocab_size: int) -> None:
    """Save the file's tokenizer without the tokens that transformers adds to some, which the model does not have."""
    metadata = _scalars(file)
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    options |= {"add_bos_token": True} if adds_bos(metadata) else {}
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    stored = folder / "tokenizer.json"
    rules = json.loads(stored.read_text(encoding="utf-8"))
    rules["added_tokens"] = [token for token in rules["added_tokens"] if token["id"] < vocab_size]
    complete(rules, metadata)
    stored.write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")


def _plain(config: Any) -> Any:
    """Remove from a config what says that the weights are in a GGUF file."""
    for key in ("quantization_config", "gguf_file"):
        if hasattr(config, key):
            delattr(config, key)
    return config


def _dequantized() -> dict[str, Any]:
    """Return options with which transformers dequantizes; before 5.24 it did so always."""
    with suppress(ImportError):
        from transformers import GgufConfig

        if "dequantize" in signature(GgufConfig).parameters:
            return {"quantization_config": GgufConfig(dequantize=True)}
    return {}


def _files_of_repository(name: str, revision: str | None) -> list[str]:
    """Return the GGUF files of a Hub repository without a config.json; empty where it has one or is out of reach."""
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    with suppress(Exception):  # the error of a repository that cannot be read is that of transformers, later
        if cached_file(name, "config.json", revision=revision, **missing) is None:
            return sorted(file for file in HfApi().list_repo_files(name, revision=revision) if file.endswith(GGUF))
    return []


def _only(name: str, files: list[Any]) -> Any:
    if len(files) > 1:
        names = ", ".join(Path(file).name for file in files[:8])
        raise ConfigError(
            f"target={name} has {len(files)} GGUF files and no config.json; expected one of them: {names}"
        )
    return files[0] if files else None
