"""Checks that a target, a drafter, a policy and a rule fit together."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from draftsmith.decode.loop import example_draft
from draftsmith.decode.passes.capability import Capability, capability_of
from draftsmith.decode.policies import MAY_BRANCH, Policy
from draftsmith.decode.verification import Rule
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft


def capabilities(target: PreTrainedModel, drafter: Drafter | None) -> list[Capability]:
    """Return the capabilities of the target and of the models that `drafter` runs with a cache of their own."""
    modules = () if drafter is None else drafter.modules()
    models = [target, *(module.model for module in modules if isinstance(module, DraftModel))]
    return [capability_of(model) for model in models]


def require_readable(policy: Policy, models: Sequence[Capability]) -> None:
    """Raise ConfigError if drafts of `policy` may have branches, and one of the models reads chains only."""
    for capability in models:
        if capability.no_trees and (
            isinstance(policy, MAY_BRANCH) or any(not draft.is_chain for draft in _examples(policy))
        ):
            raise ConfigError(capability.refusal(f"policy={policy}"))


def _examples(policy: Policy) -> list[Draft]:
    return [example_draft(policy, sharpness) for sharpness in (0.0, 4.0)]


def require_fitting(rule: Rule, drafter: Drafter, policy: Policy | None) -> None:
    """Raise ConfigError if `rule` does not apply to retrieved drafts or to drafts of `policy`."""
    if type(drafter).retrieve is not Drafter.retrieve and not rule.fits(Draft.chain([0, 0])):
        raise ConfigError(f"rule={rule.name!r} needs {rule.takes}; a {drafter.type} drafter also retrieves drafts")
    for draft in [] if policy is None else _examples(policy):
        rule.require(draft)


def require_reach(drafter: Drafter, draft_length: int) -> None:
    """Raise ConfigError for more draft tokens than the drafter proposes."""
    most = drafter.max_draft_length
    if most is not None and draft_length > most:
        raise ConfigError.of(
            "draft_length", draft_length, f"at most {most}, which is what this {drafter.type} drafter proposes"
        )


def require_same_vocabulary(drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise ConfigError for a drafter with another vocabulary size, unless the number of shared tokens is known."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab_size in (None, vocabulary) or drafter.shared_vocabulary is not None:
        return
    raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")
