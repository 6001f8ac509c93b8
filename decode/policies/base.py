"""The interface of a policy, which decides on the length or the tree of a draft, and chains."""

from collections.abc import Generator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from draftsmith.decode.drafts.builder import DraftBuilder, DrawChildren, Look, Read
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft

Growing = Generator[Read | DrawChildren, Any, Draft]
"""Yields what it needs next (a `Read` of `[ROOT]` first), is sent the `Look` or the `Children`, and returns the draft.

The drafts of a batch are built in lockstep, so one forward pass of the drafter covers all texts.
"""


MOST = 1024
"""Maximum of every setting that counts draft tokens: each token needs a row of logits over the vocabulary."""


class MostNodes(NamedTuple):
    """The most nodes of a draft with branches, for which compiled passes have slots; chains end where the text does."""

    verified: int
    """By the target."""
    read: int
    """By a draft model; some are not verified."""


class Policy:
    """Decides how the draft of a round is built, from earlier rounds and from q before a token is drawn from it.

    Its text is the name and the settings in the form that `policy_named` reads.
    """

    learns: ClassVar[bool] = False
    """Whether it adapts to accepted tokens; then it is a dataclass with a field `explores`, see `exploring`."""
    branches: ClassVar[bool] = True
    """Whether its drafts may have branches."""
    chooses: ClassVar[bool] = False
    """Whether sampled drafts hold tokens that were chosen, not drawn from q."""

    @property
    def most_nodes(self) -> MostNodes:
        """The most nodes of a draft with branches."""
        return MostNodes(0, 0)

    def fresh(self) -> Self:
        """Return a policy for one new text, with the same settings and a copy of what this policy has learned.

        A text therefore depends on its seed only, not on texts that were decoded before it or in the same batch.
        """
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        """Build the draft of one text, at most `builder.room` >= 1 levels deep."""
        raise NotImplementedError

    def retrieved(self, draft: Draft, *, greedy: bool) -> Draft:
        """Return the first tokens of a retrieved draft, those to verify; an empty draft: `grow` builds one instead."""
        return draft

    def observe_retrieved(self, length: int, verified: int, accepted: int, *, greedy: bool) -> None:
        """Learn from a retrieved draft of `length` tokens, the first of which were verified."""

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """Learn from the verification of a draft that `grow` built in `builder`. Called for policies that learn."""


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


@dataclass(frozen=True)
class Chain(Policy):
    """A chain of `draft_length` (gamma) tokens."""

    branches: ClassVar[bool] = False
    draft_length: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")

    def grow(self, builder: DraftBuilder) -> Growing:
        node: int | None = ROOT
        while builder.depth(node) < min(self.draft_length, builder.room):
            node = yield from builder.follow((yield Read([node], top=int(builder.greedy))))
            if node is None:
                break
        return builder.draft()

    def __str__(self) -> str:
        return f"chain:draft_length={self.draft_length}"


@dataclass(frozen=True)
class ConfidenceChain(Policy):
    """A chain that ends before a position where the most likely token has less than `threshold` probability under q.

    The confidence of a drafter with a confidence head is used instead of this probability. The decision is made before
    the token is drawn, so rules that compare p with q remain exact (non-anticipation). The first token is always
    drafted.
    """

    branches: ClassVar[bool] = False
    threshold: float = 0.4
    draft_length: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError.of("threshold", self.threshold, "a probability")
        require_counts(self, "draft_length")

    def grow(self, builder: DraftBuilder) -> Growing:
        node: int | None = ROOT
        while builder.depth(node) < min(self.draft_length, builder.room):
            look: Look = yield Read([node])
            if node != ROOT and builder.estimates.get(node, look.values[0][0]) < self.threshold:
                break
            node = yield from builder.follow(look)
            if node is None:
                break
        return builder.draft()

    def __str__(self) -> str:
        return f"confidence:threshold={self.threshold:g},draft_length={self.draft_length}"
