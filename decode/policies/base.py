"""The interface of a draft-length or draft-tree policy."""

from collections.abc import Generator
from dataclasses import is_dataclass, replace
from typing import ClassVar, Protocol, Self

from torch import Tensor

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft

Growing = Generator[list[int], Tensor, Draft]
"""Yields the nodes whose continuation it wants (`[ROOT]` first), is sent their logits [n, V], returns the draft.

Texts of a batch grow in lockstep, so one forward pass of the drafter serves them all.
"""


MOST = 1024
"""Draft tokens of a round, on a path, or beside each other: each costs a row of logits over the vocabulary."""


class Policy(Protocol):
    """Decides how a round's draft grows. It may use all that happened before, and q before a token is drawn from it."""

    learns: ClassVar[bool]
    """Whether it changes with what is accepted; then it is a dataclass with a field `explores`, see `exploring`."""

    def fresh(self) -> Self:
        """A policy of these settings for one new text, which knows what this one knows and learns by itself.

        So a seed gives the same text every time, whatever was decoded before or is decoded beside it.
        """
        ...

    def grow(self, builder: DraftBuilder) -> Growing:
        """Grow one text's draft at most `builder.room` >= 1 levels deep."""
        ...

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """What became of a draft that `grow` made in `builder`."""
        ...

    def __str__(self) -> str:
        """The name and settings, in the form that `policy_named` reads."""
        ...


def require_counts(policy: object, *keys: str) -> None:
    """ConfigError unless these settings of `policy` are from 1 to `MOST`."""
    for key in keys:
        value = getattr(policy, key)
        if not 1 <= value <= MOST:
            raise ConfigError.of(key, value, ">= 1" if value < 1 else f"at most {MOST}")


def exploring(policy: Policy, explores: bool) -> Policy:
    """A copy of a policy that learns, for which drafts deeper than pays are worth their evidence, or no longer are."""
    assert is_dataclass(policy), "a policy that learns is a dataclass with a field `explores`"
    return replace(policy, explores=explores)
