"""The formats that each drafter can be exported to, by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.formats.common import Serving, Source

FORMATS = ("vllm", "sglang", "gguf", "eagle", "medusa", "native", "transformers")


def _writer(function: str) -> Callable[[Source[Any]], Serving]:
    """Return the writer that an entry of `DRAFTERS` names."""
    file, name = function.split(".")
    return getattr(import_module(f"draftsmith.heads.formats.{file}"), name)


LAYOUTS: dict[str, dict[str, Callable[[Source[Any]], Serving]]] = {
    format: {kind: _writer(entry.exports[format]) for kind, entry in DRAFTERS.items() if format in entry.exports}
    for format in FORMATS
}
"""By format and type of drafter, the function that writes it."""
