"""Drafters that need no checkpoint, by name: `suffix`, `suffix:datastore=FILE`, `early-exit:layers=2`, `hybrid:…`."""

import difflib
from collections.abc import Callable

from torch import nn

from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import Drafter
from draftsmith.heads.early_exit import EarlyExit
from draftsmith.heads.retrieval import Hybrid, PromptLookup, SuffixRetrieval

_RETRIEVAL = {"draft_length": int, "min_match": int, "factor": float}
SETTINGS: dict[str, dict[str, type]] = {
    "prompt-lookup": {"max_ngram": int, **_RETRIEVAL},
    "suffix": {"datastore": str, **_RETRIEVAL},
    "early-exit": {"layers": int},
    "hybrid": {"drafter": str, "datastore": str, "min_match": int},
}
"""Name: its settings."""


def is_named(text: str) -> bool:
    """Whether `text` names a drafter of this file, rather than a folder or a repository."""
    return text.partition(":")[0] in SETTINGS


def parse_named(text: str) -> tuple[str, dict[str, object]]:
    """The name and its settings; ConfigError for a key or value that does not fit."""
    name, _, rest = text.partition(":")
    settings, values = SETTINGS[name], {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in settings or not equals:
            close = difflib.get_close_matches(key, settings, 1)
            nearest = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"drafter={text}: {part!r}; expected {name}:KEY=VALUE with {', '.join(settings)}{nearest}"
            )
        try:
            values[key] = settings[key](value)
        except ValueError as error:
            kinds = {int: "a whole number", float: "a number"}
            raise ConfigError(f"drafter={text}: {key}={value!r}; expected {kinds[settings[key]]}") from error
    if name == "hybrid" and "drafter" not in values:
        raise ConfigError(f"drafter={text}; expected hybrid:drafter=FOLDER, the trained drafter to fall back on")
    return name, values


def drafter_named(text: str, target: nn.Module, load: Callable[[str], Drafter]) -> Drafter:
    """The drafter that `text` names; `load` reads the checkpoint inside a hybrid."""
    name, values = parse_named(text)
    if name == "prompt-lookup":
        return PromptLookup(**values)
    if name == "suffix":
        return SuffixRetrieval(**values)
    if name == "early-exit":
        return EarlyExit(target, **values)
    retrieval = SuffixRetrieval(datastore=values.pop("datastore", None))
    return Hybrid(load(values.pop("drafter")), retrieval, **values)
