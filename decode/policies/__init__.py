"""Policies, which decide how the draft of a round is built: chains of fixed or adaptive length, and trees.

The command line and reports name a policy with its settings: `best-first:size=16,depth=8`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from draftsmith.decode.costs import Costs
from draftsmith.decode.policies.adaptive import AdaptiveChain
from draftsmith.decode.policies.policy import Chain, ConfidenceChain, ForecastLayout, Policy, exploring
from draftsmith.decode.policies.trees import BestFirst, SampledTree
from draftsmith.reading import parse_specification, specified_name

if TYPE_CHECKING:  # policies are checked before torch is imported
    from draftsmith.heads.base import Drafter

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Chain, ConfidenceChain, AdaptiveChain, SampledTree, BestFirst)
}
EXAMPLE = Costs({1: {1: 1.0, 2: 1.5}}, {1: {1: 0.1}})
"""Costs of policies that are named before anything is measured."""


def plans(text: str) -> bool:
    """Return whether the policy that `text` names plans with measured costs."""
    return POLICIES[specified_name(text)].plans


def policy_named(text: str, costs: Costs | None = None, role: str = "policy") -> Policy:
    """Return the policy that `text` names; ConfigError, with `role` as what is named, for another text.

    `costs`: required by policies that plan.
    """
    name, values = parse_specification(role, text, {name: policy.settings() for name, policy in POLICIES.items()})
    make = cast(Callable[..., Policy], POLICIES[name])
    return make(costs, **values) if plans(name) else make(**values)


def check_policy(text: str, role: str = "policy") -> Policy:
    """Return the policy that `text` names, with example costs where it plans; ConfigError for another text."""
    return policy_named(text, EXAMPLE, role)


DEFAULT_DRAFT_LENGTH = 4


def default_policy(drafter: "Drafter") -> Policy:
    """Return a chain of the length that the drafter was trained for."""
    return Chain(drafter.draft_length_hint or drafter.max_draft_length or DEFAULT_DRAFT_LENGTH)


__all__ = [
    "POLICIES",
    "AdaptiveChain",
    "BestFirst",
    "Chain",
    "ConfidenceChain",
    "ForecastLayout",
    "Policy",
    "SampledTree",
    "check_policy",
    "default_policy",
    "exploring",
    "plans",
    "policy_named",
]
