"""Verification rules by name. Each is a function of (p, drafts, draws); `RULES` states the drafts that it accepts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.draws import Draws
from draftsmith.decode.tree_rules import siblings_rule, traversal_rule
from draftsmith.decode.verification_rules import (
    Decided,
    Outcome,
    TargetTokens,
    VerifyResult,
    block_rule,
    point_mass_rule,
    token_rule,
    typical_rule,
    verify_greedy,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft, DraftBatch

# Shapes: B texts, N draft nodes, P = N + 1 places, V vocabulary.

VerifyBatch = Callable[[Tensor, DraftBatch, Draws], Outcome]
"""A rule: the target's distributions [B, P, V], the drafts and the random draws to the outcome, on the device."""


@dataclass(frozen=True)
class Rule:
    """A verification rule for sampled decoding; greedy decoding has one rule, the argmax."""

    name: str
    verify: VerifyBatch
    fits: Callable[[Draft | DraftBatch], bool]
    takes: str
    """The drafts that `fits` accepts, in words."""
    lossless: bool = True
    unites: bool = False
    """Whether it verifies drawn trees of different shapes together, as parts of one tree."""

    def require(self, draft: Draft | DraftBatch) -> None:
        """Raise ConfigError for a kind of draft for which the rule is wrong."""
        if not self.fits(draft):
            kind = "drawn from q" if draft.drawn else "chosen, not drawn"
            shape = "chain" if draft.is_chain else "tree"
            raise ConfigError(f"rule={self.name!r} needs {self.takes}; this draft is a {shape} {kind}")


def _drawn_chain(draft: Draft | DraftBatch) -> bool:
    return draft.drawn and draft.is_chain


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("token", token_rule, _drawn_chain, "a chain drawn from q"),
        Rule("block", block_rule, _drawn_chain, "a chain drawn from q"),
        Rule("point-mass", point_mass_rule, lambda draft: True, "any draft"),
        Rule(
            "siblings-without-replacement",
            siblings_rule,
            lambda draft: draft.drawn,
            "a draft whose tokens were drawn from q",
            unites=True,
        ),
        Rule(
            "traversal",
            traversal_rule,
            lambda draft: draft.drawn,
            "a draft whose tokens were drawn from q",
            unites=True,
        ),
        Rule("typical", typical_rule, lambda draft: True, "any draft", lossless=False),
    )
}


def rule_named(name: str) -> Rule:
    """Return the rule of that name; ConfigError if there is none."""
    if name not in RULES:
        raise ConfigError.of("rule", name, f"one of {', '.join(RULES)}")
    return RULES[name]


def best_rule(draft: Draft | DraftBatch) -> Rule:
    """Return the lossless rule that accepts most for this kind of draft."""
    if not draft.drawn:
        return RULES["point-mass"]
    return RULES["block" if draft.is_chain else "traversal"]


def takes_mixed(rule: Rule | None) -> bool:
    """Return whether chosen drafts of different shapes can be verified together."""
    return rule is None or rule.verify is point_mass_rule


def takes_united(rule: Rule | None) -> bool:
    """Return whether drawn trees of different shapes can be verified together, as parts of one tree."""
    return rule is None or rule.unites


def verify_batch(rule: Rule | None, p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Outcome:
    """Apply a batched rule (None: `best_rule`) to drafts; ConfigError for drafts for which the rule is wrong.

    Drafts of different shapes are verified by the point-mass rule, and need a rule for which `takes_mixed` is True.
    """
    if draft.shapes is not None:
        assert takes_mixed(rule), "other rules verify drafts of one shape"
        return point_mass_rule(p_BPV, draft, draws)
    if len(draft) == 0:
        empty_B0 = p_BPV[:, 0, :0]
        return Decided(empty_B0, draws.next(p_BPV[:, 0]), empty_B0)
    rule = rule or best_rule(draft)
    rule.require(draft)
    return rule.verify(p_BPV, draft, draws)


__all__ = [
    "RULES",
    "Outcome",
    "Rule",
    "TargetTokens",
    "VerifyBatch",
    "VerifyResult",
    "best_rule",
    "rule_named",
    "takes_mixed",
    "takes_united",
    "verify_batch",
    "verify_greedy",
]
