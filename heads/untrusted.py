"""Validation of untrusted drafter files: config.json is checked before anything is built from it.

The memory that a safetensors file can use is bounded by its size, since the tensors of its header fill the file
exactly. A config has no such bound: `bounded` raises an error when a module built from it would need more memory than
the weights justify, before that memory is allocated. `local_folder` downloads repositories, without code and pickles.
"""

import json
import math
import os.path
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from huggingface_hub import snapshot_download
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from draftsmith.errors import REMOVED, ConfigError, reason_of, removed
from draftsmith.provenance import tokenizer_fingerprint
from draftsmith.reading import read_json

Shapes = dict[str, tuple[int, ...]]
ALWAYS = 2**24
"""Numbers that any config may allocate: 64 MiB in float32."""
WHOLE, PACKED = 4, 16
"""Numbers that may be allocated for each number in a file: an encoder-decoder model creates its embeddings four times
before they are tied; in quantized weights one number may hold eight."""
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.eye)


def shapes_in(folder: Path) -> Shapes:
    """Return the shape of every tensor in the folder's safetensors headers; raise ConfigError for a damaged file."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return shapes


WHOLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_finite(name: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError, naming the tensor, where a drafter's weight is NaN or infinite."""
    for key, value in tensors:
        if value.dtype in WHOLE_DTYPES and not bool(value.isfinite().all()):
            raise ConfigError(f"drafter={name}: tensor {key} has values that are not finite; expected finite weights")


@contextmanager
def bounded(name: str | Path, held: Shapes, *, packed: bool = False) -> Iterator[None]:
    """Limit the memory and the parameters of modules that are built inside the context to what the files justify.

    Args:
        name: name of the drafter, for errors.
        held: shapes of the tensors in its files.
        packed: whether the weights are quantized.

    Raises:
        ConfigError: before an allocation that exceeds the limit.
    """
    elements = sum(math.prod(shape) for shape in held.values())
    most = ALWAYS + (PACKED if packed else WHOLE) * elements
    parameters = 0

    def registered(*_: Any) -> None:
        nonlocal parameters
        parameters += 1
        if parameters > 4 * len(held) + 1024:  # tied, fused and replaced parameters register again
            raise _refusal(name, f"{parameters} parameters or more", f"what {len(held)} tensors can fill")

    def refuse(claimed: int) -> None:
        raise _refusal(name, f"{claimed} elements or more", f"at most {most}, for the {elements} that its files hold")

    hook = register_module_parameter_registration_hook(registered)
    try:
        with _Allowance(most, refuse):
            yield
    finally:
        hook.remove()


class _Allowance(TorchFunctionMode):
    """Sums the sizes of tensors that torch allocates, and calls `refuse` with the sum before it exceeds `most`."""

    def __init__(self, most: int, refuse: Callable[[int], None]) -> None:
        super().__init__()
        self._most, self._refuse, self._taken = most, refuse, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FACTORIES:
            self._taken += _requested(func, args, kwargs or {})
            if self._taken > self._most:
                self._refuse(self._taken)
        return func(*args, **(kwargs or {}))


def _requested(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Return the number of elements that a factory function allocates for these arguments."""
    if function is torch.arange:
        given = named | dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False))
        return int(abs(given["end"] - given.get("start", 0)) / abs(given.get("step", 1))) + 1
    if function is torch.eye:
        given = named | dict(zip(("n", "m"), args, strict=False))
        return given["n"] * given.get("m", given["n"])
    size = args or named.get("size", ())
    size = size[0] if size and isinstance(size[0], tuple | list) else size
    return math.prod(value for value in size if isinstance(value, int))


def _refusal(name: str | Path, claimed: str, expected: str) -> ConfigError:
    return ConfigError(f"drafter={name} cannot be read: config.json claims {claimed}; expected {expected}")


DATA = ("*.json", "*.safetensors", "*.txt", "*.model")
"""Files that are downloaded: no code and no pickled weights."""


def local_folder(path_or_repo: str, revision: str | None = None) -> Path:
    """Return the local folder of a drafter, downloaded first for a repository of the Hub.

    Args:
        path_or_repo: a local folder, `user/name` or `user/name@revision`.
        revision: a branch, tag or commit of the repository.

    Raises:
        ConfigError: for a missing folder or repository, a file name that would leave the cache, or a revision given
            twice or with a local folder.
    """
    folder = Path(os.path.expanduser(path_or_repo))
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"revision={revision!r} of the local folder {path_or_repo}; expected none")
        return folder
    repo, at, named = path_or_repo.partition("@")
    if at and revision is not None:
        raise ConfigError(f"drafter={path_or_repo} with revision={revision!r}; expected one of the two")
    try:
        return Path(snapshot_download(repo, revision=named if at else revision, allow_patterns=list(DATA)))
    except Exception as error:  # no common base class: the client's own errors, httpx's, OSError, ValueError
        raise ConfigError(
            f"drafter={path_or_repo}; expected a local folder or a Hub id ({reason_of(error)})"
        ) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress transformers' warnings: about values of a config that is refused anyway or does not matter in drafts."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


MOST_LISTED = 2**20
LISTED = {re.compile(r"(layers?|labels|blocks|depth)$"): MOST_LISTED}
"""Ends of config keys whose value is the length of a list that transformers builds while it reads the config."""
WIDEST = 2**16
"""A size that any config of a drafter may state."""


def require_countable(
    what: str, config: Mapping[str, Any], limits: Mapping[re.Pattern[str], int] = MappingProxyType(LISTED)
) -> None:
    """Raise ConfigError, with `what` as its first words, for a number that makes transformers or torch fail.

    Lists of that many layers would take minutes to build, or all memory, and torch converts no number above 64 bits.

    Args:
        limits: the largest values, by the ends of their keys.
    """
    for key, value in config.items():
        most = min((n for ends, n in limits.items() if ends.search(str(key))), default=2**63 - 1)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                require_countable(what, part, limits)
            elif isinstance(part, int) and not -(2**63) <= part <= most:
                raise ConfigError(f"{what} claims {key}={value}; expected at most {most}")


def require_sizes(name: str | Path, config: Mapping[str, Any], held: Shapes, vocab_size: int) -> None:
    """Raise ConfigError for a size, or a number of draft positions, in a drafter's config that it cannot have.

    `bounded` refuses what is left, without the name of a key. Draft positions need no weights, but time and memory.

    Args:
        held: shapes of the tensors in its files.
        vocab_size: the target's.
    """
    most = max(WIDEST, vocab_size, len(held), *(size for shape in held.values() for size in shape))
    sizes, positions = re.compile(r"(rank|(?<!window_)size|dim|heads|layers|modules)$"), re.compile(POSITIONS)
    require_countable(f"drafter={name}: config.json", config, {sizes: most, positions: LONGEST_DRAFT + 1})


def require_whole_model(key: str, name: str, revision: str | None = None) -> None:
    """Raise ConfigError for a folder or repository with a peft adapter, with or without a model.

    transformers would load it automatically: from a pickle where there is no safetensors file, and in any size that
    its config states.
    """
    if find_adapter_config_file(name, revision=revision) is not None:
        expected = "a whole model, or of a target the local folder of an adapter"
        raise ConfigError(f"{key}={name} holds an adapter_config.json; expected {expected}")


NO_SAFETENSORS = re.compile(r"(no|not appear to have a) file named model\.safetensors")
"""transformers' errors for a folder and for a repository without safetensors."""


def load_all_weights(key: str, name: str | Path, auto: Any, **options: Any) -> PreTrainedModel:
    """Return `auto.from_pretrained(name)`; raise ConfigError if a tensor is missing or has another shape.

    transformers would initialise such tensors randomly, or stop, after a report of many lines that is not shown here.
    One line names tensors that the model does not have.
    """
    required = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    config, _ = PreTrainedConfig.get_config_dict(name, revision=options.get("revision"))
    require_countable(f"{key}={name}: config.json", config)
    try:
        with without_warnings():
            model, info = auto.from_pretrained(name, **required, **options)
    except OSError as error:
        if not NO_SAFETENSORS.search(str(error)):
            raise
        raise ConfigError(
            f"{key}={name} holds no model.safetensors; expected one: pickled weights (.bin, .pt) are not read. Load "
            "them once with transformers (use_safetensors=False), and name the folder that its save_pretrained writes"
        ) from error
    for tensor, stored, expected in sorted(info["mismatched_keys"]):
        raise ConfigError(f"{key}={name}: {tensor} has shape {list(stored)}; expected {list(expected)} by its config")
    missing, others = missing_tensors(model, info["missing_keys"]), sorted(info["unexpected_keys"])
    unread = f"{first_of(others)}, which {type(model).__name__} does not have"
    if missing:
        instead = f", and holds {unread}" if others else ""
        raise ConfigError(f"{key}={name} holds no tensor {first_of(missing)}{instead}; expected all of its weights")
    if others:
        warnings.warn(f"{key}={name} holds {unread}: not read", stacklevel=2)
    return model


def missing_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of tensors that a model cannot do without: all but buffers of indices and masks."""
    made = {name for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    return sorted(set(names) - made)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as a list in words, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


LARGEST_JSON = 8 * 2**20
"""Maximum bytes of a config or an index; those of the largest models are below one MiB."""
INDEX = "model.safetensors.index.json"
LONGEST_DRAFT = 1024
"""Maximum draft length of a config."""
POSITIONS = r"^(block_size|train_steps|num_tokens|num_modules|(medusa_)?num_heads)$"
"""Keys of a drafter's number of draft positions, of which the first of a block may be the committed token."""
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Keys whose value can make transformers download a kernel, which is code, from a repository."""

Text = Annotated[str, Field(max_length=4096)]


def shared_vocabulary(folder: Path | str, name: str | Path, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens that a plain transformers checkpoint shares with the target.

    Models of a family pad their embeddings to different sizes, so equal tokenizers may have unequal vocabulary sizes.
    None for a checkpoint without a tokenizer, of which only the vocabulary size can be compared.

    Raises:
        ConfigError: for a tokenizer with other tokens than the target's.
    """
    own = _own_tokenizer(folder, name)
    if own is None:
        return None
    if tokenizer_fingerprint(own) != tokenizer_fingerprint(tokenizer):
        raise ConfigError(f"drafter={name} has another tokenizer than the target; expected the same token for every id")
    return len(own)


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that hold the tokens of a tokenizer."""


def require_same_tokens(folder: Path, name: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError where the tokenizer beside a drafter, if there is one, has another token for an id.

    Either one may have tokens more: projects add one for the mask, and targets have ones that no text uses.
    """
    if not any((folder / file).is_file() for file in TOKENIZERS):
        return
    own = _own_tokenizer(folder, name)
    tokens = {} if own is None else {i: token for token, i in own.get_vocab().items()}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if tokens.get(i, token) != token:
            problem = f"its tokenizer has {tokens[i]!r} for id {i}"
            raise ConfigError(f"drafter={name}: {problem}; expected the target's {token!r}, or no tokenizer beside it")


def _own_tokenizer(folder: Path | str, name: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in the folder of a drafter; None without one."""
    try:
        with without_warnings():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        return None
    except Exception as error:  # tokenizers and configs raise errors without a common base
        why = reason_of(error, whole=True)
        raise ConfigError(f"drafter={name}: its tokenizer cannot be read ({why}); expected a whole one") from error


class StoredTarget(BaseModel, frozen=True, strict=True, extra="ignore"):
    """The target that a drafter was trained for, as written by `describe_target`; values are not converted."""

    name: Text
    revision: Text | None = None
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    model_fingerprint: Text
    float16_fingerprint: Text | None = None
    """Fingerprint of the same weights in float16; see `model_fingerprints`."""
    outside_fingerprint: Text | None = None
    """Fingerprint of the weights outside of the layers; see `outside_fingerprints`."""
    tokenizer_fingerprint: Text | None = None
    engine: Text | None = None
    """The command of the engine whose hidden states the drafter was trained on, without addresses."""
    quality: dict[str, float] | None = None


class StoredDrafter(BaseModel, frozen=True, strict=True, extra="ignore"):
    """The section `draftsmith` of a checkpoint's config.json."""

    format: Literal[1]
    type: Text
    drafter: dict[str, Any]
    draft_length: Annotated[int, Field(ge=1, le=LONGEST_DRAFT)]
    target: StoredTarget
    recipe: dict[str, Any] | None = None
    draft_vocabulary: Text | None = None
    shared_tensors: list[Literal["embed_tokens.weight", "lm_head.weight"]] = []
    """See `Drafter.shared_tensors`."""


def read_config(folder: Path, name: str | Path) -> tuple[dict[str, Any], StoredDrafter | None]:
    """Return the content of config.json and its `draftsmith` section, None for a checkpoint without one.

    Args:
        name: name of the drafter, for errors.

    Raises:
        ConfigError: for a file that is missing, too large or not JSON, a section with an invalid value, and values
            that would make a reader leave the folder or run code.
    """
    config = _read_json(folder / "config.json", f"drafter={name}")
    _require_no_kernel(config, name)
    require_countable(f"drafter={name}: config.json", config)
    if (folder / INDEX).is_file():
        _require_plain_names(_read_json(folder / INDEX, f"drafter={name}").get("weight_map"), name)
    section = config.get("draftsmith")
    if section is None:
        return config, None
    try:
        stored = StoredDrafter.model_validate(section)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, ("draftsmith", *problem["loc"])))
        value = repr(problem["input"])[:80]
        raise ConfigError(f"drafter={name}: {key}={value} in config.json; {problem['msg'].lower()}") from error
    if (kind := f"drafter.type={stored.type}") in REMOVED:
        raise removed(kind, f"drafter={name}: ")
    return config, stored


def _read_json(file: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file; raise ConfigError for another file, with `what` as its first words."""
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
    """Raise ConfigError for a kernel repository in the config or in the config of a part of the model."""
    for key, value in config.items():
        if key in IMPLEMENTATIONS and "/" in json.dumps(value):
            raise ConfigError(f"drafter={drafter}: {key}={value!r} in config.json names code; expected none")
        if isinstance(value, dict):
            _require_no_kernel(value, drafter)


def _require_plain_names(names: Any, drafter: str | Path) -> None:
    """Raise ConfigError unless all shards of an index are files in its own folder."""
    for name in names.values() if isinstance(names, dict) else [names]:
        plain = isinstance(name, str) and name not in ("", "..") and name.endswith(".safetensors")
        if not plain or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise ConfigError(f"drafter={drafter}: {INDEX} names {name!r}; expected *.safetensors beside it")
