"""Decides on the drafts of a round by the target's logits, and reads the outcome."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.draws import NOT_DRAWN, Draws
from draftsmith.decode.rules import RULES, Rule, best_rule
from draftsmith.decode.rules.any_draft import verify_greedy
from draftsmith.decode.rules.outcome import Decided, VerifyResult
from draftsmith.decode.sampling import MakeContexts, Processors
from draftsmith.errors import ConfigError
from draftsmith.heads.rows import constant

# Shapes: B sequences, Q or P positions of each, V vocabulary.


def decide(
    logits_BQV: Tensor,
    batch: DraftBatch,
    draws: Draws | None,
    processors: Processors,
    rule: Rule | None,
    contexts: MakeContexts,
) -> list[VerifyResult]:
    """Return the outcome for each sequence, and read the drafts into `batch`, in one transfer.

    Args:
        logits_BQV: the target's logits after the root and after every node.
        draws: None: the target's most likely tokens are followed.
        rule: None: the best one for each draft.
        contexts: the tokens before each position of each sequence.

    Raises:
        ConfigError: for processed logits that are NaN or infinite, except -inf for tokens that are forbidden.
    """
    scores_BQV = processors.scores(logits_BQV.flatten(0, 1), contexts).unflatten(0, logits_BQV.shape[:2])
    # Positions after which the processors forbid every token.
    empty_BQ = scores_BQV.isneginf().all(-1) if processors.may_empty else None
    if draws is None:
        tokens_BQ = scores_BQV.argmax(-1)  # NaN, if there is one
        wrong_BQ = ~scores_BQV.gather(-1, tokens_BQ[..., None])[..., 0].isfinite()
        if empty_BQ is not None:
            tokens_BQ.masked_fill_(empty_BQ, NOT_DRAWN)
        rows, Q = _read([tokens_BQ, *batch.packed()], wrong_BQ, empty_BQ, logits_BQV.dtype), tokens_BQ.shape[1]
        drafts = batch.read([row[Q : Q + len(batch)] for row in rows])
        return [verify_greedy(row, draft) for row, draft in zip(rows, drafts, strict=True)]
    p_BQV = scores_BQV.softmax(-1)
    wrong_BQ = p_BQV[..., 0].isnan()  # as is the whole row
    if empty_BQ is not None:  # any distribution: a result ends before the token that is drawn from it
        p_BQV.masked_fill_(empty_BQ[..., None], 1 / p_BQV.shape[-1])
    outcome = verify(rule, p_BQV, batch, draws)
    empty = [] if empty_BQ is None else [empty_BQ.double()]
    rows = _read([outcome.packed(), *empty, *batch.packed()], wrong_BQ, empty_BQ, logits_BQV.dtype)
    start = outcome.columns
    after = start if empty_BQ is None else start + empty_BQ.shape[1]
    batch.read([row[after : after + len(batch)] for row in rows])
    results = [outcome.result(row) for row in rows]
    if empty_BQ is None:
        return results
    return [result.until(row[start:after]) for result, row in zip(results, rows, strict=True)]


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


def _read(parts: Sequence[Tensor], wrong_BQ: Tensor, empty_BQ: Tensor | None, dtype: torch.dtype) -> list[list[Any]]:
    """Return the values [B, n] of all parts, in one transfer; ConfigError where a position is wrong and not empty."""
    wrong_BQ = wrong_BQ if empty_BQ is None else wrong_BQ & ~empty_BQ
    rows = torch.cat([*parts, wrong_BQ.any(1, keepdim=True).to(parts[0].dtype)], 1).tolist()
    if any(row[-1] for row in rows):
        name, maker = str(dtype).removeprefix("torch."), "" if empty_BQ is None else " or a logits_processor"
        raise ConfigError(
            f"the target{maker} returns NaN or infinite logits in {name}: the target's weights are damaged, or "
            "overflow in that dtype; expected finite logits"
        )
    return rows
