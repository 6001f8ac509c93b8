"""Chains: a fixed number of draft tokens, or as many as the drafter is sure of."""

from dataclasses import dataclass
from typing import ClassVar, Self

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.policies.base import Growing, require_counts
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft


@dataclass(frozen=True)
class Chain:
    """`draft_length` (gamma) tokens in a row."""

    learns: ClassVar[bool] = False
    draft_length: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        node: int | None = ROOT
        while builder.depth(node) < min(self.draft_length, builder.room):
            logits_1V = yield [node]
            node = builder.follow(logits_1V[0], node)
            if node is None:
                break
        return builder.draft()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """A fixed length learns nothing."""

    def __str__(self) -> str:
        return f"chain:draft_length={self.draft_length}"


@dataclass(frozen=True)
class ConfidenceChain:
    """Stops before a token whose most likely candidate has less than `threshold` probability under q.

    A drafter with a confidence head is asked for its own guess instead. The decision falls before the token is drawn,
    so the ratio rules stay exact (non-anticipation). The first token is always drafted.
    """

    learns: ClassVar[bool] = False
    threshold: float = 0.4
    draft_length: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError.of("threshold", self.threshold, "a probability")
        require_counts(self, "draft_length")

    def fresh(self) -> Self:
        """Itself: it remembers nothing."""
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        node: int | None = ROOT
        while builder.depth(node) < min(self.draft_length, builder.room):
            q_V = builder.probabilities((yield [node]), [node])[0]
            if node != ROOT and builder.estimates.get(node, float(q_V.max())) < self.threshold:
                break
            node = builder.follow_q(q_V, node)
            if node is None:
                break
        return builder.draft()

    def observe(self, builder: DraftBuilder, draft: Draft, result: VerifyResult) -> None:
        """A fixed threshold learns nothing."""

    def __str__(self) -> str:
        return f"confidence:threshold={self.threshold:g},draft_length={self.draft_length}"
