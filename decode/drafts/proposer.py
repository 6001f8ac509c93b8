"""The drafts of a round for all texts: retrieved ones, chains of one length, and those that policies grow.

The length of a chain is known whatever q is, so the host needs no token of it before it is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedTokens, Contexts
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.drafts.builder import DraftBuilder, fitted
from draftsmith.decode.drafts.drawing import ChainDrawing, drawn_at_once
from draftsmith.decode.drafts.growing import propose
from draftsmith.decode.draws import Draws
from draftsmith.decode.sampling import Processors, precise
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.rows import Counts

# Shapes: B texts, D tokens of a chain, V vocabulary of the target.


@dataclass(frozen=True)
class Proposer:
    """Proposes with one drafter."""

    drafter: Drafter
    processors: Processors
    shared: tuple[int, int] | None = None
    """(tokens that the drafter may draft, size of the target's vocabulary), where it may not draft all."""

    def propose(
        self,
        texts: Sequence[DecodeSequence],
        rooms: Counts,
        length: int | None,
        draws: Draws | None,
        committed: CommittedTokens | None,
    ) -> tuple[DraftBatch, list[DraftBuilder]]:
        """Return drafts for all texts, and the builders of those that the host built.

        Args:
            rooms: the maximum depth of each draft.
            length: of all drafts that are not retrieved; None where it depends on q.
            draws: None: the likeliest tokens are chosen.
            committed: the tokens of the texts, where a processor reads them.
        """
        found = self._retrieved(rooms)
        retrieved = [self._worth(text, draft) for text, draft in zip(texts, found, strict=True)]
        if (most := self.drafter.max_draft_length) is not None:  # a limit of its logits, not of retrieval
            rooms = rooms.map(lambda room: room - (room - most) * (room > most))
        if length is not None and all(draft is None for draft in retrieved):
            if min(length, max(rooms)) == 0:
                return DraftBatch.empty(len(texts), rooms.device), []
            return self.chains([text.number for text in texts], rooms, length, draws, committed), []
        builders = []
        for text, room, draft in zip(texts, rooms, found, strict=True):
            builders.append(DraftBuilder(text, room, self.processors, self.shared))
            builders[-1].found = 0 if draft is None else len(draft)
        policies = [text.policy for text in texts]
        drafts = propose(self.drafter, policies, builders, retrieved, draws, committed)
        return DraftBatch.of(drafts, rooms.device), builders

    def _retrieved(self, rooms: Sequence[int]) -> list[Draft | None]:
        """Return the retrieved draft of each text, None where the drafter retrieves none."""
        if type(self.drafter).retrieve is Drafter.retrieve:
            return [None for _ in rooms]
        return [self.drafter.retrieve(row, room) if room > 0 else None for row, room in enumerate(rooms)]

    def _worth(self, text: DecodeSequence, draft: Draft | None) -> Draft | None:
        """Return the first tokens of a retrieved draft, as many as the text's policy keeps; None: it builds one."""
        if draft is None or not draft.tokens or text.policy is None:
            return draft
        kept = text.policy.retrieved(draft, greedy=self.processors.greedy)
        return kept if kept.tokens else None

    def chains(
        self,
        numbers: Sequence[int],
        rooms: Counts,
        length: int,
        draws: Draws | None,
        committed: CommittedTokens | None,
    ) -> DraftBatch:
        """Return chains, shorter where a text has less room; the drafter reads all tokens but the last.

        On the device and without reading a value. `numbers`: the index of each text in the whole batch.
        """
        logits_BV = self.drafter.begin([row for row, room in enumerate(rooms) if room > 0])
        if 1 < length <= min(rooms) and self.processors.only_temperature:
            logits_BDV = self.drafter.chain_logits(length)
            if logits_BDV is not None:
                return self._at_once(precise(fitted(logits_BDV, self.shared)), draws)
        drawing = ChainDrawing(None if draws is None else draws.drafted)

        def contexts() -> Contexts:
            assert committed is not None, "kept where a processor reads the text"
            paths_BD, rows = torch.stack(drawing.tokens, 1) if drawing.tokens else None, range(len(numbers))
            depths = Counts([len(drawing.tokens)] * len(rows), rooms.device)
            return committed.with_paths(rows, paths_BD, depths, numbers)

        for depth in range(min(length, max(rooms))):
            if depth > 0:
                logits_BV = self.drafter.extend(Level(drawing.tokens[-1][:, None], None, depth))[:, 0]
            scores_BV = self.processors.scores(fitted(logits_BV, self.shared), contexts)
            valid_B = self._valid(rooms, drawing.valid, scores_BV)
            if draws is None:
                drawing.choose(scores_BV.argmax(-1), valid_B)
            else:
                q_BV = scores_BV.softmax(-1)
                drawing.draw(q_BV.nan_to_num(0.0) if self.processors.may_empty else q_BV, valid_B)
        return drawing.batch()

    def _at_once(self, scores_BDV: Tensor, draws: Draws | None) -> DraftBatch:
        """Return chains of a drafter whose logits do not depend on their tokens."""
        if draws is None:
            return DraftBatch(scores_BDV.argmax(-1))
        return drawn_at_once((scores_BDV / self.processors.sampling.temperature).softmax(-1), draws.chain)

    def _valid(self, rooms: Counts, valid: Sequence[Tensor | None], scores_BV: Tensor) -> Tensor | None:
        """Return the texts [B] that have a next token; None for all of them. `valid`: that of the tokens before."""
        valid_B, depth = valid[-1] if valid else None, len(valid)
        if min(rooms) <= depth:
            fits_B = rooms.on_device_B > depth
            valid_B = fits_B if valid_B is None else valid_B & fits_B
        if self.processors.may_empty:
            allowed_B = ~scores_BV.isneginf().all(-1)
            valid_B = allowed_B if valid_B is None else valid_B & allowed_B
        return valid_B
