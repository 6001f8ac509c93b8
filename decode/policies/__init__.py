"""How a round's draft grows: chains of fixed, confident or adaptive length, and trees; by name in `named.py`."""

from draftsmith.decode.policies.adaptive import AdaptiveChain, OptimalTree
from draftsmith.decode.policies.chain import Chain, ConfidenceChain
from draftsmith.decode.policies.dynamic_trees import BestFirst, DynamicTree
from draftsmith.decode.policies.named import KINDS, check_policy, plans, policy_named
from draftsmith.decode.policies.policy import Growing, Policy
from draftsmith.decode.policies.static_trees import MeasuredTree, SampledTree, StaticTree, best_shape, widths_shape
from draftsmith.heads.drafter import Drafter

DEFAULT_DRAFT_LENGTH = 4


def default_policy(drafter: Drafter) -> Policy:
    """A chain as long as the drafter was trained for."""
    return Chain(drafter.draft_length_hint or drafter.max_draft_length or DEFAULT_DRAFT_LENGTH)


__all__ = [
    "KINDS",
    "AdaptiveChain",
    "BestFirst",
    "Chain",
    "ConfidenceChain",
    "DynamicTree",
    "Growing",
    "MeasuredTree",
    "OptimalTree",
    "Policy",
    "SampledTree",
    "StaticTree",
    "best_shape",
    "check_policy",
    "default_policy",
    "plans",
    "policy_named",
    "widths_shape",
]
