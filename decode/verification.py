"""Decides on the drafts of a round by the target's logits, and reads the outcome."""

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import NOT_DRAWN, Draws
from draftsmith.decode.rules import RULES, Rule, best_rule
from draftsmith.decode.rules.any_draft import verify_greedy
from draftsmith.decode.rules.outcome import Decided, VerifyResult
from draftsmith.decode.sampling import MakeContexts, Processors
from draftsmith.heads.rows import constant

# Shapes: B texts, Q or P places of each, V vocabulary.


def decide(
    logits_BQV: Tensor,
    batch: DraftBatch,
    draws: Draws | None,
    processors: Processors,
    rule: Rule | None,
    contexts: MakeContexts,
) -> list[VerifyResult]:
    """Return the outcome for each text, and read the drafts into `batch`, in one transfer.

    Args:
        logits_BQV: the target's logits after the root and after every node.
        draws: None: the target's most likely tokens are followed.
        rule: None: the best one for each draft.
        contexts: the tokens before each place of each text.
    """
    scores_BQV = processors.scores(logits_BQV.flatten(0, 1), contexts).unflatten(0, logits_BQV.shape[:2])
    # Places after which the processors forbid every token.
    empty_BQ = scores_BQV.isneginf().all(-1) if processors.may_empty else None
    if draws is None:
        tokens_BQ = scores_BQV.argmax(-1)
        if empty_BQ is not None:
            tokens_BQ.masked_fill_(empty_BQ, NOT_DRAWN)
        rows, Q = torch.cat([tokens_BQ, *batch.packed()], 1).tolist(), tokens_BQ.shape[1]
        drafts = batch.read([row[Q:] for row in rows])
        return [verify_greedy(row, draft) for row, draft in zip(rows, drafts, strict=True)]
    p_BQV = scores_BQV.softmax(-1)
    if empty_BQ is not None:  # any distribution: a result ends before the token that is drawn from it
        p_BQV.masked_fill_(empty_BQ[..., None], 1 / p_BQV.shape[-1])
    outcome = verify(rule, p_BQV, batch, draws)
    empty = [] if empty_BQ is None else [empty_BQ.double()]
    rows, after = torch.cat([outcome.packed(), *batch.packed(), *empty], 1).tolist(), outcome.columns
    batch.read([row[after : after + len(batch)] for row in rows])
    results = [outcome.result(row) for row in rows]
    if empty_BQ is None:
        return results
    return [result.until(row[-empty_BQ.shape[1] :]) for result, row in zip(results, rows, strict=True)]


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
