"""Checks that a target, a drafter, a policy and a rule fit together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.draws import seeded_draws
from draftsmith.decode.grown_drafts import propose
from draftsmith.decode.passes.capability import Capability, capability_of
from draftsmith.decode.policies import MAY_BRANCH, Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.verification import Rule
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft

EXAMPLE = 8
"""Maximum depth of an example draft."""


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
    """Return drafts that the policy builds at temperature 1 with flat and with peaked logits."""
    return [_example(policy, sharpness) for sharpness in (0.0, 4.0)]


def _example(policy: Policy, sharpness: float) -> Draft:
    """Return a draft of the policy with a drafter whose logits after every node are 0, -sharpness, …"""
    text = DecodeSequence([0], 2 + EXAMPLE)
    builder = DraftBuilder(text, EXAMPLE, Processors(Sampling(1.0)))
    logits_V = -sharpness * torch.arange(2.0 * EXAMPLE)
    return propose(_Constant(logits_V), [policy.fresh()], [builder], [None], seeded_draws([0], [1], logits_V.device))[0]


class _Constant(Drafter):
    """A drafter with the same logits after every node."""

    def __init__(self, logits_V: Tensor) -> None:
        super().__init__()
        self._logits_V = logits_V

    def begin(self, rows: list[int]) -> Tensor:
        return self._logits_V[None]

    def extend(self, level: Level) -> Tensor:
        return self._logits_V.expand(*level.tokens_Bn.shape, -1)


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
