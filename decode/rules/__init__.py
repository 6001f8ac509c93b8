"""Verification rules by name: functions of the target's distributions, the drafts and the random draws.

    token, block    chains drawn from q
    traversal       the block rule for trees whose siblings were drawn from q without replacement, leaf by leaf
    point-mass      any draft, however its tokens were chosen, sorted or pruned
    typical         any draft; LOSSY: texts are not distributed as the target's
    greedy          any draft under greedy decoding: the target's argmax

A rule verifies the drafts of B texts, of any shapes that fit it, on the device: it reads no value, so a round needs one
transfer to the host, that of the packed outcome. `p_BPV` is always [B, N + 1, V]: place 0 holds the target's
distribution after the last committed token, place i + 1 the one after draft node i.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import Draws
from draftsmith.decode.rules.any_draft import point_mass_rule, typical_rule
from draftsmith.decode.rules.chains import block_rule, token_rule
from draftsmith.decode.rules.outcome import Decided
from draftsmith.decode.rules.traversal import traversal_rule
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.rows import constant

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


def verify(rule: Rule | None, p_BPV: Tensor, batch: DraftBatch, draws: Draws) -> Decided:
    """Apply a rule (None: the `best_rule` of each draft) to all drafts, with one call of each rule.

    Raises:
        ConfigError: for a draft for which the rule is wrong.
    """
    if len(batch) == 0:
        empty_B0 = p_BPV[:, 0, :0]
        return Decided(empty_B0, draws.next(p_BPV[:, 0]), empty_B0)
    parts = []
    for chosen, rows in _by_rule(rule, batch).items():
        part, p_bPV = batch.part(rows), p_BPV
        if part is not batch:
            p_bPV = p_BPV[constant(tuple(rows), p_BPV.device), : len(part) + 1]
        parts.append((rows, chosen.verify(p_bPV, part, draws.of(rows))))
    return Decided.together(parts)


def _by_rule(rule: Rule | None, batch: DraftBatch) -> dict[Rule, list[int]]:
    """Return the rows that each rule verifies; ConfigError for a draft for which the rule is wrong."""
    if batch.drafts is None:
        chosen = rule or best_rule(batch)
        chosen.require(drawn=batch.drawn, is_chain=True)
        return {chosen: list(range(len(batch.tokens_BN)))}
    rows: dict[Rule, list[int]] = {}
    for row, draft in enumerate(batch.drafts):
        chosen = rule or best_rule(draft)
        if draft.tokens:
            chosen.require(drawn=draft.drawn, is_chain=draft.is_chain)
        elif chosen.drawn:
            chosen = RULES["point-mass"]  # nothing was drawn: all rules draw the next token from p
        rows.setdefault(chosen, []).append(row)
    return rows
