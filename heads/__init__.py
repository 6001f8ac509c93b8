"""Drafters, one file each. `configs` lists them, `base` has their interface, `checkpoint` saves and loads them.

Importing this package loads none of them: `HEADS` and the names of classes are resolved when they are used.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftsmith.heads.configs import DRAFTERS

if TYPE_CHECKING:
    from draftsmith.heads.base import Drafter, TrainableDrafter


class _Heads(Mapping[str, "type[TrainableDrafter]"]):
    """The class of each trainable drafter by its type; its file is imported when the class is looked up."""

    def __getitem__(self, kind: str) -> "type[TrainableDrafter]":
        file, name = DRAFTERS[kind].implementation.split(".")
        return getattr(import_module(f"draftsmith.heads.{file}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(DRAFTERS)

    def __len__(self) -> int:
        return len(DRAFTERS)


HEADS = _Heads()
"""Trainable drafters. Those that need no training are built by name, see `checkpoint.drafter_named`."""


def __getattr__(name: str) -> Any:
    """Return `Drafter`, `TrainableDrafter` or the class of a drafter that `configs` lists."""
    if name in ("Drafter", "TrainableDrafter"):
        return getattr(import_module("draftsmith.heads.base"), name)
    for kind, entry in DRAFTERS.items():
        if entry.implementation.endswith(f".{name}"):
            return HEADS[kind]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["HEADS", "Drafter", "TrainableDrafter"]
