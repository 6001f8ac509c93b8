"""Verification rules by name. Each is a pure function of (p, draft, rng); `RULES` states the drafts that it accepts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.sampling import Rng
from draftsmith.decode.verification_rules import (
    VerifyResult,
    block_rule,
    point_mass_rule,
    siblings_iid_rule,
    siblings_without_replacement_rule,
    token_rule,
    traversal_rule,
    typical_rule,
    verify_greedy,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft, DrawnDraft

Verify = Callable[[Tensor, Draft, Rng], VerifyResult]
"""A rule: the target's distributions [N + 1, V], the draft and the source of random draws to the result."""


@dataclass(frozen=True)
class Rule:
    """A verification rule for sampled decoding; greedy decoding has one rule, the argmax."""

    name: str
    verify: Verify
    fits: Callable[[Draft], bool]
    takes: str
    """The drafts that `fits` accepts, in words."""
    lossless: bool = True

    def require(self, draft: Draft) -> None:
        """Raise ConfigError for a kind of draft for which the rule is wrong."""
        if not self.fits(draft):
            kind = "drawn from q" if isinstance(draft, DrawnDraft) else "chosen, not drawn"
            shape = "chain" if draft.is_chain else "tree"
            raise ConfigError(f"rule={self.name!r} needs {self.takes}; this draft is a {shape} {kind}")


def _drawn_chain(draft: Draft) -> bool:
    return isinstance(draft, DrawnDraft) and draft.is_chain


def _drawn(draft: Draft, *, replacement: bool) -> bool:
    # Without siblings, both ways of drawing are the same.
    return isinstance(draft, DrawnDraft) and (draft.is_chain or draft.replacement == replacement)


def _ratio_rule(rule: Callable[[Tensor, DrawnDraft, Rng], VerifyResult]) -> Verify:
    """Return `rule`, which compares p with q, as a rule for any draft; `Rule.require` refuses drafts without q."""

    def verify(p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
        assert isinstance(draft, DrawnDraft), "the draft has no q"
        return rule(p_PV, draft, rng)

    return verify


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("token", _ratio_rule(token_rule), _drawn_chain, "a chain drawn from q"),
        Rule("block", _ratio_rule(block_rule), _drawn_chain, "a chain drawn from q"),
        Rule("point-mass", point_mass_rule, lambda draft: True, "any draft"),
        Rule(
            "siblings-iid",
            _ratio_rule(siblings_iid_rule),
            lambda draft: _drawn(draft, replacement=True),
            "a tree whose siblings were drawn independently from q",
        ),
        Rule(
            "siblings-without-replacement",
            _ratio_rule(siblings_without_replacement_rule),
            lambda draft: _drawn(draft, replacement=False),
            "a tree whose siblings were drawn from q without replacement",
        ),
        Rule(
            "traversal",
            _ratio_rule(traversal_rule),
            lambda draft: _drawn(draft, replacement=False),
            "a tree whose siblings were drawn from q without replacement",
        ),
        Rule("typical", typical_rule, lambda draft: True, "any draft", lossless=False),
    )
}


def rule_named(name: str) -> Rule:
    """Return the rule of that name; ConfigError if there is none."""
    if name not in RULES:
        raise ConfigError.of("rule", name, f"one of {', '.join(RULES)}")
    return RULES[name]


def best_rule(draft: Draft) -> Rule:
    """Return the lossless rule that accepts most for this kind of draft."""
    if not isinstance(draft, DrawnDraft):
        return RULES["point-mass"]
    if draft.is_chain:
        return RULES["block"]
    return RULES["siblings-iid" if draft.replacement else "traversal"]


def verify(rule: Rule | None, p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Apply `rule` (None: `best_rule`) to a draft; ConfigError for a draft for which the rule is wrong."""
    if len(draft) == 0:
        return VerifyResult((), rng.categorical(p_PV[0]), ())
    rule = rule or best_rule(draft)
    rule.require(draft)
    return rule.verify(p_PV, draft, rng)


__all__ = ["RULES", "Rule", "VerifyResult", "best_rule", "rule_named", "verify", "verify_greedy"]
