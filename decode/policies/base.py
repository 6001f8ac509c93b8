"""The interface of a policy, which decides on the length or the tree of a draft."""

from collections.abc import Generator
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from draftsmith.decode.draft_builder import DraftBuilder, DrawChildren, Read
from draftsmith.decode.fixed_drafts import Shape
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft

Growing = Generator[Read | DrawChildren, Any, Draft]
"""Yields what it needs next (a `Read` of `[ROOT]` first), is sent the `Look` or the `Children`, and returns the draft.

The drafts of a batch are built in lockstep, so one forward pass of the drafter covers all texts.
"""


MOST = 1024
"""Maximum of every setting that counts draft tokens: each token needs a row of logits over the vocabulary."""


class Policy(Protocol):
    """Decides how the draft of a round is built, from earlier rounds and from q before a token is drawn from it."""

    learns: ClassVar[bool]
    """Whether it adapts to accepted tokens; then it is a dataclass with a field `explores`, see `exploring`."""

    def fresh(self) -> Self:
        """Return a policy for one new text, with the same settings and a copy of what this policy has learned.

        A text therefore depends on its seed only, not on texts that were decoded before it or in the same batch.
        """
        ...

    def grow(self, builder: DraftBuilder) -> Growing:
        """Build the draft of one text, at most `builder.room` >= 1 levels deep."""
        ...

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Learn from the verification of a draft that `grow` built in `builder`; None for a draft of a fixed shape.

        Called for policies that learn.
        """
        ...

    def __str__(self) -> str:
        """Return the name and settings in the form that `policy_named` reads."""
        ...


@runtime_checkable
class FixedPolicy(Policy, Protocol):
    """A policy whose drafts have the same shape whatever q is, so they are built without reading a value."""

    def fixed(self, *, greedy: bool) -> Shape:
        """Return the shape of this text's drafts."""
        ...


def usual_width(policy: Policy | None, *, greedy: bool) -> int:
    """Return the number of tokens of most verifications; 0 where it changes from round to round."""
    own = None if policy is None else policy.fresh()
    return own.fixed(greedy=greedy).nodes + 1 if isinstance(own, FixedPolicy) else 0


class MostNodes(NamedTuple):
    """The most nodes of a draft with branches, for which compiled passes have slots; chains end where the text does."""

    verified: int
    """By the target."""
    read: int
    """By a draft model; some are not verified."""


def most_nodes(policy: Policy | None, *, greedy: bool) -> MostNodes:
    """Return the most nodes of a draft. A policy whose trees depend on q has them in its property `most_nodes`."""
    own = None if policy is None else policy.fresh()
    if isinstance(own, FixedPolicy):
        shape = own.fixed(greedy=greedy)
        return MostNodes(0, 0) if shape.is_chain else MostNodes(shape.nodes, shape.nodes)
    return getattr(own, "most_nodes", MostNodes(0, 0))


def require_counts(policy: object, *keys: str) -> None:
    """Raise ConfigError unless these settings of `policy` are from 1 to `MOST`."""
    for key in keys:
        value = getattr(policy, key)
        if not 1 <= value <= MOST:
            raise ConfigError.of(key, value, ">= 1" if value < 1 else f"at most {MOST}")


def exploring(policy: Policy, explores: bool) -> Policy:
    """Return a copy of a policy that learns; with `explores` it drafts deeper than is fastest, to learn more."""
    assert is_dataclass(policy), "a policy that learns is a dataclass with a field `explores`"
    return replace(policy, explores=explores)
