"""Verification rules by name. Each is a function of (p, drafts, draws); `RULES` states the drafts that it accepts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.draws import Draws
from draftsmith.decode.verification_rules import (
    Decided,
    block_rule,
    point_mass_rule,
    token_rule,
    traversal_rule,
    typical_rule,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft, DraftBatch

# Shapes: B texts, N draft nodes, P = N + 1 places, V vocabulary.

VerifyBatch = Callable[[Tensor, DraftBatch, Draws], Decided]
"""A rule: the target's distributions [B, P, V], the drafts and the random draws to the outcome, on the device."""


@dataclass(frozen=True)
class Rule:
    """A verification rule for sampled decoding; greedy decoding has one rule, the argmax."""

    name: str
    verify: VerifyBatch
    drawn: bool = False
    """Whether it needs tokens that were drawn from q."""
    chains: bool = False
    """Whether it needs chains."""
    lossless: bool = True

    def require(self, *, drawn: bool, is_chain: bool) -> None:
        """Raise ConfigError for a kind of draft for which the rule is wrong."""
        if (self.drawn and not drawn) or (self.chains and not is_chain):
            kind = f"a {'chain' if is_chain else 'tree'} {'drawn from q' if drawn else 'chosen, not drawn'}"
            raise ConfigError(f"rule={self.name!r} needs {self.takes}; this draft is {kind}")

    @property
    def takes(self) -> str:
        """The drafts that it verifies, in words."""
        if not self.drawn:
            return "any draft"
        return "a chain drawn from q" if self.chains else "a draft whose tokens were drawn from q"


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("token", token_rule, drawn=True, chains=True),
        Rule("block", block_rule, drawn=True, chains=True),
        Rule("point-mass", point_mass_rule),
        Rule("traversal", traversal_rule, drawn=True),
        Rule("typical", typical_rule, lossless=False),
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
    return rule is None or not rule.drawn


def takes_united(rule: Rule | None) -> bool:
    """Return whether drawn trees of different shapes can be verified together, as parts of one tree."""
    return rule is None or rule.verify is traversal_rule


def verify_batch(rule: Rule | None, p_BPV: Tensor, draft: DraftBatch, draws: Draws) -> Decided:
    """Apply a batched rule (None: `best_rule`) to drafts; ConfigError for drafts for which the rule is wrong.

    Drafts of different shapes need a rule for which `takes_mixed` is True.
    """
    if len(draft) == 0:
        empty_B0 = p_BPV[:, 0, :0]
        return Decided(empty_B0, draws.next(p_BPV[:, 0]), empty_B0)
    rule = rule or best_rule(draft)
    rule.require(drawn=draft.drawn, is_chain=draft.is_chain)
    return rule.verify(p_BPV, draft, draws)
