"""The interface of a policy, which decides on the length or the tree of a draft, and chains."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from draftsmith.decode.drafts.requests import Growing, Request
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft

if TYPE_CHECKING:  # policies are checked before torch is imported
    from draftsmith.decode.drafts.builder import DraftBuilder
    from draftsmith.decode.rules.outcome import VerifyResult

MOST = 1024
"""Maximum of every setting that counts draft tokens: each token needs a row of logits over the vocabulary."""


class MostNodes(NamedTuple):
    """The most nodes of a draft with branches, for which compiled passes have slots; chains end with their sequence."""

    verified: int
    """By the target."""
    read: int
    """By a draft model; some are not verified."""


class ForecastLayout(NamedTuple):
    """How the forecast follows a policy along a text that the target wrote."""

    chain: int = 0
    """The length of a chain, whose acceptance a teacher-forced pass over the text gives."""
    threshold: float = 0.0
    """The chain ends before a position where the drafter's confidence is lower."""
    replay: bool = False
    """Drafts hold chosen tokens that are not the text's: the decoder is run along the text."""
    refused: str = ""
    """Why there is no forecast, as the predicate of a sentence about the policy."""


class Policy:
    """Decides how the draft of a round is built, from earlier rounds and from q before a token is drawn from it.

    A policy is a dataclass, whose fields but `costs` and those that are keyword-only are its settings. `str` returns
    the name and the settings in the form that `policy_named` reads.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    """Whether it adapts to accepted tokens; then it has a field `explores`, see `exploring`."""
    plans: ClassVar[bool] = False
    """Whether it plans with measured costs, its first field `costs`."""
    branches: ClassVar[bool] = True
    """Whether its drafts may have branches."""
    chooses: ClassVar[bool] = False
    """Whether sampled drafts hold tokens that were chosen, not drawn from q."""

    @classmethod
    def settings(cls) -> dict[str, type]:
        """Return the type of each setting by its name."""
        assert is_dataclass(cls), "the settings of a policy are the fields of a dataclass"
        return {one.name: one.type for one in fields(cls) if one.name != "costs" and not one.kw_only}  # type: ignore

    def __str__(self) -> str:
        values = ((key, getattr(self, key)) for key in self.settings())
        words = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values)
        return f"{self.name}:{','.join(words)}"

    @property
    def fixed_length(self) -> int | None:
        """The number of draft tokens of every chain, where it depends neither on q nor on earlier rounds, else None."""
        return None

    @property
    def longest(self) -> int:
        """Maximum number of draft tokens on a path."""
        raise NotImplementedError

    def layout(self, *, greedy: bool) -> ForecastLayout:
        """Return how the forecast follows its drafts."""
        return ForecastLayout(refused="has no exact forecast")

    @property
    def most_nodes(self) -> MostNodes:
        """The most nodes of a draft with branches."""
        return MostNodes(0, 0)

    def fresh(self) -> Self:
        """Return a policy for one new sequence, with the same settings and a copy of what this policy has learned.

        A sequence therefore depends on its seed only, not on those that were decoded before it or in the same batch.
        """
        return self

    def grow(self, builder: "DraftBuilder") -> Growing:
        """Build a draft of at most `builder.room` >= 1 levels. Not called where there is a `fixed_length`."""
        raise NotImplementedError

    def retrieved(self, draft: Draft, *, greedy: bool) -> Draft:
        """Return the first tokens of a retrieved draft, those to verify; an empty draft: `grow` builds one instead."""
        return draft

    def observe_retrieved(self, length: int, verified: int, accepted: int, *, greedy: bool) -> None:
        """Learn from a retrieved draft of `length` tokens, the first of which were verified."""

    def observe(self, builder: "DraftBuilder", draft: Draft, result: "VerifyResult") -> None:
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

    name: ClassVar[str] = "chain"
    branches: ClassVar[bool] = False
    draft_length: int = 4

    def __post_init__(self) -> None:
        require_counts(self, "draft_length")

    @property
    def fixed_length(self) -> int:
        return self.draft_length

    @property
    def longest(self) -> int:
        return self.draft_length

    def layout(self, *, greedy: bool) -> ForecastLayout:
        return ForecastLayout(chain=self.draft_length)


@dataclass(frozen=True)
class ConfidenceChain(Policy):
    """A chain that ends before a position where the most likely token has less than `threshold` probability under q.

    The confidence of a drafter with a confidence head is used instead of this probability. The decision is made before
    the token is drawn, so rules that compare p with q remain exact (non-anticipation). The first token is always
    drafted.
    """

    name: ClassVar[str] = "confidence"
    branches: ClassVar[bool] = False
    threshold: float = 0.4
    draft_length: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError.of("threshold", self.threshold, "a probability")
        require_counts(self, "draft_length")

    @property
    def longest(self) -> int:
        return self.draft_length

    def layout(self, *, greedy: bool) -> ForecastLayout:
        return ForecastLayout(chain=self.draft_length, threshold=self.threshold)

    def grow(self, builder: "DraftBuilder") -> Growing:
        node: int | None = ROOT
        while node is not None and builder.depth(node) < min(self.draft_length, builder.room):
            look = yield Request([node])
            if node != ROOT and builder.estimates.get(node, look.values[0][0]) < self.threshold:
                break
            node = yield from builder.follow(look)
        return builder.draft()
