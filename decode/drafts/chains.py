"""Chains for all texts of a batch, on the device.

The length of a chain is known whatever q is, so the host needs no token of it before it is verified.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedText, CommittedTokens, Contexts
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.drafts.builder import fitted
from draftsmith.decode.draws import Draws
from draftsmith.decode.sampling import Processors, precise
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.rows import Counts

# Shapes: B texts, N tokens of a chain, V vocabulary of the target.


def chains(
    drafter: Drafter,
    processors: Processors,
    shared: tuple[int, int] | None,
    texts: Sequence[CommittedText],
    rooms: Sequence[int],
    length: int,
    draws: Draws | None,
    committed: CommittedTokens | None,
) -> DraftBatch:
    """Return chains without reading a value; the drafter reads all tokens but the last.

    All tokens are chosen, or all are drawn from q and kept.

    Args:
        shared: see `fitted`.
        rooms: the most tokens of each text; not all 0.
        draws: None: the likeliest tokens are chosen.
        committed: the tokens of the texts, for processors that read them; made here where they are not kept.
    """
    logits_BV = drafter.begin([row for row, room in enumerate(rooms) if room > 0])
    device = logits_BV.device
    rooms = Counts.of(rooms, device)
    if 1 < length <= min(rooms) and processors.only_temperature:
        logits_BNV = drafter.chain_logits(length)
        if logits_BNV is not None:  # which do not depend on the tokens
            scores_BNV = precise(fitted(logits_BNV, shared))
            if draws is None:
                return DraftBatch(scores_BNV.argmax(-1))
            q_BNV = (scores_BNV / processors.sampling.temperature).softmax(-1)
            return DraftBatch(draws.chain(q_BNV), q_BNV=q_BNV)
    tokens: list[Tensor] = []
    valid: list[Tensor | None] = []
    """Texts that have each node; None: all."""
    q: list[Tensor] = []

    def contexts() -> Contexts:
        before = committed or CommittedTokens([text.padding + text.tokens for text in texts], device)
        paths_BN, depths = torch.stack(tokens, 1) if tokens else None, Counts([len(tokens)] * len(texts), device)
        return before.with_paths(range(len(texts)), paths_BN, depths, [text.number for text in texts])

    for depth in range(min(length, max(rooms))):
        if depth > 0:
            logits_BV = drafter.extend(Level(tokens[-1][:, None], None, depth))[:, 0]
        scores_BV = processors.scores(fitted(logits_BV, shared), contexts)
        valid_B = valid[-1] if valid else None
        if min(rooms) <= depth:
            valid_B = _both(valid_B, rooms.on_device_B > depth)
        if processors.may_empty:
            valid_B = _both(valid_B, ~scores_BV.isneginf().all(-1))
        valid.append(valid_B)
        if draws is None:
            tokens.append(scores_BV.argmax(-1))
            continue
        q_BV = scores_BV.softmax(-1)
        q.append(q_BV.nan_to_num(0.0) if processors.may_empty else q_BV)
        tokens.append(draws.drafted(q[-1], depth, valid_B))
    tokens_BN, valid_BN = torch.stack(tokens, 1), None
    if valid[-1] is not None:  # nodes follow valid ones
        all_B = torch.ones_like(valid[-1])
        valid_BN = torch.stack([all_B if valid_B is None else valid_B for valid_B in valid], 1)
    return DraftBatch(tokens_BN, valid_BN, q_BNV=torch.stack(q, 1) if q else None)


def _both(one_B: Tensor | None, other_B: Tensor) -> Tensor:
    return other_B if one_B is None else one_B & other_B
