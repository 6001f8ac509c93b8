"""Chains: a fixed number of draft tokens, or a number that depends on the drafter's confidence."""

from dataclasses import dataclass
from typing import ClassVar, Self

from draftsmith.decode.draft_builder import DraftBuilder, Look, Read
from draftsmith.decode.fixed_drafts import Shape, chain_shape
from draftsmith.decode.policies.base import Growing, require_counts
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft


@dataclass(frozen=True)
class Chain:
    """A chain of `draft_length` (gamma) tokens."""

    learns: ClassVar[bool] = False
    draft_length: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

    def fixed(self, *, greedy: bool) -> Shape:
        """Return the shape of all drafts."""
        return chain_shape(self.draft_length, drawn=not greedy)

    def grow(self, builder: DraftBuilder) -> Growing:
        node: int | None = ROOT
        while builder.depth(node) < min(self.draft_length, builder.room):
            node = yield from builder.follow((yield Read([node], top=int(builder.greedy))))
            if node is None:
                break
        return builder.draft()

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the length is fixed."""

    def __str__(self) -> str:
        return f"chain:draft_length={self.draft_length}"


@dataclass(frozen=True)
class ConfidenceChain:
    """A chain that ends before a position where the most likely token has less than `threshold` probability under q.

    The confidence of a drafter with a confidence head is used instead of this probability. The decision is made before
    the token is drawn, so rules that compare p with q remain exact (non-anticipation). The first token is always
    drafted.
    """

    learns: ClassVar[bool] = False
    threshold: float = 0.4
    draft_length: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError.of("threshold", self.threshold, "a probability")
        require_counts(self, "draft_length")

    def fresh(self) -> Self:
        """Return the policy itself, which has no state."""
        return self

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

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        """Do nothing: the threshold is fixed."""

    def __str__(self) -> str:
        return f"confidence:threshold={self.threshold:g},draft_length={self.draft_length}"
