"""Verification rules by name: functions of the target's distributions, the drafts and the random draws.

    token           drafts drawn from q, siblings without replacement
    block           chains drawn from q
    point-mass      any draft, however its tokens were chosen, sorted or pruned
    typical         any draft; LOSSY: texts are not distributed as the target's
    greedy          any draft under greedy decoding: the target's argmax

A rule verifies the drafts of B sequences, of any shapes that fit it, on the device: it reads no value, so a round needs
one transfer to the host, that of the packed outcome. `p_BPV` is always [B, N + 1, V]: position 0 holds the target's
distribution after the last committed token, position i + 1 the one after draft node i.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules.any_draft import point_mass_rule, typical_rule
from draftsmith.decode.rules.drawn_draft import block_rule, token_rule
from draftsmith.decode.rules.outcome import Decided
from draftsmith.errors import REMOVED, ConfigError, removed
from draftsmith.heads.draft_tree import Draft

# Shapes: B sequences, P positions, V vocabulary.

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
        Rule("token", token_rule, drawn=True),
        Rule("block", block_rule, drawn=True, chains=True),
        Rule("point-mass", point_mass_rule),
        Rule("typical", typical_rule, lossless=False),
    )
}


def rule_named(name: str) -> Rule:
    """Return the rule of that name; ConfigError if there is none."""
    if f"rule={name}" in REMOVED:
        raise removed(f"rule={name}")
    if name not in RULES:
        raise ConfigError.of("rule", name, f"one of {', '.join(RULES)}")
    return RULES[name]


def best_rule(draft: Draft | DraftBatch) -> Rule:
    """Return the lossless rule that accepts most for this kind of draft."""
    if not draft.drawn:
        return RULES["point-mass"]
    return RULES["block" if draft.is_chain else "token"]
