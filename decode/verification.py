"""Decides on the drafts of a round by the target's logits, and reads the outcome."""

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import NOT_DRAWN, Draws
from draftsmith.decode.rules import Rule, verify
from draftsmith.decode.rules.any_draft import verify_greedy
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import MakeContexts, Processors

# Shapes: B texts, Q places of each, V vocabulary.


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
