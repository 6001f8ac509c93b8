"""Policies, which decide how the draft of a round is built: chains of fixed or adaptive length, and trees.

The command line and reports name a policy with its settings: `best-first:size=16,depth=8`.
"""

from collections.abc import Callable

from draftsmith.decode.costs import Costs
from draftsmith.decode.policies.adaptive import AdaptiveChain, OptimalTree
from draftsmith.decode.policies.base import Chain, ConfidenceChain, Growing, Policy, exploring
from draftsmith.decode.policies.trees import BestFirst, SampledTree
from draftsmith.heads.base import Drafter
from draftsmith.names import POLICIES
from draftsmith.reading import parse_specification, specified_name

CONSTRUCTORS: dict[str, Callable[..., Policy]] = {
    "chain": Chain,
    "confidence": ConfidenceChain,
    "adaptive": AdaptiveChain,
    "sampled-tree": SampledTree,
    "best-first": BestFirst,
    "optimal-tree": OptimalTree,
}
"""The constructor of each policy by name; `names.POLICIES` has the types of its settings."""
PLANNED = ("adaptive", "optimal-tree")
"""Policies that plan with measured costs."""


def check_policy(text: str) -> Policy:
    """Return the policy that `text` names, with example costs where it plans; ConfigError for another text."""
    return policy_named(text, Costs({1: 1.0, 2: 1.5}, {1: 0.1}))


def plans(text: str) -> bool:
    """Return whether the policy that `text` names plans with measured costs."""
    return specified_name(text) in PLANNED


def policy_named(text: str, costs: Costs | None = None) -> Policy:
    """Return the policy that `text` names; `costs` are required by the policies in `PLANNED`."""
    name, values = parse_specification("policy", text, POLICIES)
    make = CONSTRUCTORS[name]
    return make(costs, **values) if name in PLANNED else make(**values)


DEFAULT_DRAFT_LENGTH = 4


def default_policy(drafter: Drafter) -> Policy:
    """Return a chain of the length that the drafter was trained for."""
    return Chain(drafter.draft_length_hint or drafter.max_draft_length or DEFAULT_DRAFT_LENGTH)


__all__ = [
    "CONSTRUCTORS",
    "AdaptiveChain",
    "BestFirst",
    "Chain",
    "ConfidenceChain",
    "Growing",
    "OptimalTree",
    "Policy",
    "SampledTree",
    "check_policy",
    "default_policy",
    "exploring",
    "plans",
    "policy_named",
]
