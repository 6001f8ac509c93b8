"""Readers of YAML and, within bounds, of untrusted JSON as plain values, and settings `key=value`."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import REMOVED, ConfigError, removed

LARGEST_JSON = 2**30
"""Bytes of a file that is read as a whole."""
DEEPEST = 64
"""Levels of nested lists and mappings."""
MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which may stand several times: its mappings are merged."""
COMMENT = re.compile(r"(?:^|\s)#")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON escape of a surrogate code point."""


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load`, but a key that a mapping repeats is refused, and 1e-6 is a number as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                place, line = (key.tag, key.value), key.start_mark.line + 1
                if place in lines:
                    raise ValueError(f"key {key.value!r} in line {lines[place]} and again in line {line}")
                lines[place] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quote text that `parse_yaml` would read as a number."""


# Longer exponents occur in revisions alone, such as 12e4567.
_EXPONENT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d{1,2}$", re.ASCII)
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Return the mappings, lists, strings, numbers and booleans of a YAML document.

    Raises:
        ValueError: for text that is not YAML, and for values of other types.
    """
    try:
        value = _Loader(text).get_single_data()
    except Exception as error:  # constructors raise what int(), datetime and dict raise
        raise ValueError(str(error) or type(error).__name__) from error
    require_plain(value)
    return value


def dump_yaml(value: Any) -> str:
    """Return plain values as a YAML document, which `parse_yaml` reads again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: for text that is not JSON, is nested too deep, or holds an unpaired surrogate.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"more than {DEEPEST} levels") from error
    # Checking every value of a large file would take as long as parsing it.
    if text.count("[") + text.count("{") > DEEPEST or SURROGATE.search(text):
        require_plain(value)
    return value


def require_plain(value: Any) -> None:
    """Check that a value has JSON's types, valid Unicode and at most `DEEPEST` levels; raise ValueError otherwise."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one, *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str):
                _require_unicode(one)
            elif one is not None and not isinstance(one, int | float):
                raise ValueError(f"a value of type {type(one).__name__}; expected text, a number, a list or a mapping")
        level = below


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate {text[error.start]!r}") from error


def read_text(path: Path, most: int = LARGEST_JSON) -> str:
    """Return the text of a file.

    Raises:
        OSError: for a file that is missing or cannot be opened.
        ValueError: for more than `most` bytes, and text that is not UTF-8.
    """
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{size} bytes; expected at most {most}")
    return path.read_text(encoding="utf-8")


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """Return the value in a JSON file; raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, most))


KINDS_OF_VALUES: dict[type, str] = {int: "a whole number", float: "a number"}
"""Names of the types in errors."""


def specified_name(text: str) -> str:
    """Return the name in a specification `name:key=value,...`."""
    return text.partition(":")[0]


def parse_specification(role: str, text: str, known: Mapping[str, Mapping[str, type]]) -> tuple[str, dict[str, Any]]:
    """Parse `name:key=value,...` into the name and the settings, each converted to its type.

    Args:
        role: what is specified, for errors, such as `policy`.
        known: the settings of each name, with their types.

    Raises:
        ConfigError: for an unknown name or setting, and for a value of another type.
    """
    name, _, rest = text.partition(":")
    if name not in known:
        raise ConfigError.of(role, name, f"one of {', '.join(known)}")
    settings = known[name]
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in settings or not equals:
            if (named := f"{role}={name}:{key}") in REMOVED:
                raise removed(named)
            close = difflib.get_close_matches(key, settings, 1)
            nearest = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{role}={text}: {part!r}; expected {name}:KEY=VALUE with {', '.join(settings)}{nearest}")
        try:
            values[key] = settings[key](value)
        except ValueError as error:
            raise ConfigError(f"{role}={text}: {key}={value!r}; expected {KINDS_OF_VALUES[settings[key]]}") from error
    return name, values


def parse_assignment(option: str, entry: str, form: str = "key=value") -> tuple[str, Any]:
    """Parse `key=value`; a value that is not YAML, such as a lone bracket, or has a comment's ` #`, stays text.

    Args:
        option: the option and its entry, for errors.
        form: the expected form, for errors.

    Raises:
        ConfigError: for an entry without a key or an equals sign.
    """
    key, equals, value = entry.partition("=")
    if not key or not equals:
        raise ConfigError(f"{option}; expected {form}")
    try:
        return key, value if COMMENT.search(value) else parse_yaml(value)
    except ValueError:
        return key, value


def assignment(key: str, value: str) -> str:
    """Return the entry `key=value` whose value `parse_assignment` reads as this text, quoted if that is necessary."""
    entry = f"{key}={value}"
    return entry if parse_assignment(entry, entry)[1] == value else f"{key}={json.dumps(value, ensure_ascii=False)}"
