"""The type of a draft states how its tokens were made, and rules that compare p with q require it."""

from dataclasses import replace

import pytest
import torch
from exact.enumeration import BranchingRng, RowDraws, drawn_draft, empty_builder, verify

from draftsmith.decode.drafts.builder import Children, draw_children
from draftsmith.decode.rules import RULES, best_rule
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import ROOT, Draft

Q_V = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)
RATIO_RULES = ("token", "block")


def drawn(parents: list[int]) -> Draft:
    return drawn_draft(parents, lambda _: Q_V, BranchingRng())


CHAIN, TREE = drawn([ROOT, 0]), drawn([ROOT, ROOT, 0])
CHOSEN = {"chosen chain": Draft.chain([2, 3]), "chosen tree": Draft((2, 3), (ROOT, ROOT))}
CHOSEN |= {"pruned chain": CHAIN.keep([0]), "whole chain, kept": CHAIN.keep([0, 1]), "pruned tree": TREE.keep([0, 2])}
CHOSEN |= {"re-sorted tree": TREE.keep([1, 0, 2]), "whole tree, kept": TREE.keep([0, 1, 2])}


def require_refusal(rule: str, draft: Draft, kind: str) -> None:
    """ConfigError that names the rule, what it needs and what it was given."""
    with pytest.raises(ConfigError) as refusal:
        verify(RULES[rule], Q_V.expand(len(draft) + 1, -1), draft, BranchingRng())
    for part in (rule, RULES[rule].takes, kind):
        assert part in str(refusal.value)


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("draft", CHOSEN)
def test_a_ratio_rule_refuses_tokens_that_were_chosen(rule: str, draft: str) -> None:
    assert not CHOSEN[draft].drawn
    require_refusal(rule, CHOSEN[draft], "chosen, not drawn")


def test_the_block_rule_refuses_trees() -> None:
    require_refusal("block", TREE, "tree drawn from q")


@pytest.mark.parametrize("draft", [*CHOSEN.values(), CHAIN, TREE])
def test_the_default_rule_fits_and_is_lossless(draft: Draft) -> None:
    best_rule(draft).require(drawn=draft.drawn, is_chain=draft.is_chain)
    assert best_rule(draft).lossless


def test_a_drawn_draft_cannot_be_made_by_hand() -> None:
    assert CHAIN.drawn
    assert not replace(CHAIN, tokens=(3, 2)).drawn
    with pytest.raises(TypeError, match="_q"):
        Draft((2, 3), (ROOT, 0), _q=CHAIN.q)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="_q"):
        replace(Draft.chain([2, 3]), _q=CHAIN.q)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        Draft.chain([2, 3]).q = CHAIN.q  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError, match="chosen"):
        _ = CHAIN.keep([0, 1]).q


def test_every_draw_of_a_level_has_a_number_of_its_own() -> None:
    """`RowDraws` refuses a number that is drawn twice."""
    builder, draws = empty_builder(), RowDraws([BranchingRng()])
    for parents, counts in (([ROOT], [2]), ([0, 1], [2, 2])):
        q_nV = Q_V.expand(len(parents), -1)
        draw_children([Children(builder, parents, counts, 0)], q_nV, draws.drafted, chances=False)
    assert builder.draft().parents == (ROOT, ROOT, 0, 0, 1, 1)


@pytest.mark.parametrize("rows", [[0], [1]])
def test_draws_for_which_no_token_is_left_keep_their_numbers(rows: list[int]) -> None:
    """After top-k 2, three children are asked for and two are drawn: a level begins after all that was asked for."""
    of_all, builder = RowDraws([BranchingRng(), BranchingRng()]), empty_builder()
    q_V = torch.tensor([0.5, 0.5, *[0.0] * (len(Q_V) - 2)], dtype=Q_V.dtype)
    for parents in ([ROOT], [0, 1], [2, 3]):
        children = [Children(builder, parents, [3] * len(parents), 0)]
        q_nV = q_V.expand(len(parents), -1)
        draw_children(children, q_nV, of_all.of(rows).drafted, chances=False)
    assert builder.draft().parents == (ROOT, ROOT, 0, 0, 1, 1, 2, 2, 3, 3)
