"""The negative control: a rule that is lossy on purpose. A check that does not find it has shown nothing."""

from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.decode.verify import Rule, Verdict, verify
from draftsmith.decode.verify.typical import typical_rule
from draftsmith.eval.pit import Verify
from draftsmith.heads.draft import Draft

SHARE = 0.5
"""Of the rounds that are verified the wrong way: a wrong rule that is half right is harder to find."""


def lossy(rule: Rule | None) -> Verify:
    """`rule`, but in half of all rounds draft tokens are kept because the target finds them likely."""

    def verify_wrongly(p_PV: Tensor, draft: Draft, chance: Chance) -> Verdict:
        if chance.bernoulli(SHARE):
            return typical_rule(p_PV, draft, chance)
        return verify(rule, p_PV, draft, chance)

    return verify_wrongly
