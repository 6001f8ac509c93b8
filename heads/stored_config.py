"""What a checkpoint's config.json may say, checked before anything is built from it: it may have come from anyone."""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.errors import ConfigError
from draftsmith.reading import read_json, require_regular

LARGEST_JSON = 8 * 2**20
"""Bytes of a config or an index; those of the largest models have less than one MiB."""
INDEX = "model.safetensors.index.json"
LONGEST_DRAFT = 1024
"""Tokens that a config may ask to draft in a round."""
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Keys by which transformers may be told to fetch a kernel, which is code, from a repository."""

Text = Annotated[str, Field(max_length=4096)]


class _Stored(BaseModel):
    """Keys that have come since are left alone; those that are known have to be of their type, with no conversion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class StoredTarget(_Stored):
    """The target that a drafter was trained for, as `describe_target` tells it."""

    name: Text
    revision: Text | None = None
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    model_fingerprint: Text
    float16_fingerprint: Text | None = None
    """Of the same weights in float16; see `model_fingerprints`."""
    tokenizer_fingerprint: Text | None = None
    quality: dict[str, float] | None = None


class StoredDrafter(_Stored):
    """The section `draftsmith` of a checkpoint's config.json."""

    format: Literal[1]
    type: Text
    drafter: dict[str, Any]
    draft_length: Annotated[int, Field(ge=1, le=LONGEST_DRAFT)]
    target: StoredTarget
    recipe: dict[str, Any] | None = None
    draft_vocabulary: Text | None = None


def read_config(folder: Path, name: str | Path) -> tuple[dict[str, Any], StoredDrafter | None]:
    """The content of config.json and its section of ours, None where it is not a checkpoint of ours.

    Args:
        name: of the drafter, for errors.

    Raises:
        ConfigError: for a file that is missing, too large or not JSON, a section with a wrong value, and anything that
            would make a reader leave the folder or run code.
    """
    try:
        if folder.is_dir():
            require_regular(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter={name}: {error}; expected a folder of files") from error
    config = _read_json(folder / "config.json", f"drafter={name}")
    _require_no_kernel(config, name)
    if (folder / INDEX).is_file():
        _require_plain_names(_read_json(folder / INDEX, f"drafter={name}").get("weight_map"), name)
    section = config.get("draftsmith")
    if section is None:
        return config, None
    try:
        return config, StoredDrafter.model_validate(section)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, ("draftsmith", *problem["loc"])))
        found = repr(problem["input"])[:80]
        raise ConfigError(f"drafter={name}: {key}={found} in config.json; {problem['msg'].lower()}") from error


def _read_json(file: Path, what: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{what}; expected a folder with {file.name}, and there is none")
    size = file.stat().st_size
    if size > LARGEST_JSON:
        raise ConfigError(f"{what}: {file.name} has {size} bytes; expected at most {LARGEST_JSON}")
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); expected a drafter's config") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not JSON of an object ({type(value).__name__}); expected a drafter's config")
    return value


def _require_no_kernel(config: dict[str, Any], drafter: str | Path) -> None:
    """ConfigError for one that the config, or that of a part of the model inside it, names."""
    for key, value in config.items():
        if key in IMPLEMENTATIONS and "/" in json.dumps(value):
            raise ConfigError(f"drafter={drafter}: {key}={value!r} in config.json names code; expected none")
        if isinstance(value, dict):
            _require_no_kernel(value, drafter)


def _require_plain_names(names: Any, drafter: str | Path) -> None:
    """ConfigError unless the shards that an index names lie beside it."""
    for name in names.values() if isinstance(names, dict) else [names]:
        plain = isinstance(name, str) and name not in ("", "..") and name.endswith(".safetensors")
        if not plain or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise ConfigError(f"drafter={drafter}: {INDEX} names {name!r}; expected *.safetensors beside it")
