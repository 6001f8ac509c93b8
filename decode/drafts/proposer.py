"""The drafts of a round for all texts: retrieved ones, chains of one length, and those that policies grow."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.decode.cache.committed import CommittedTokens
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.drafts.chains import chains
from draftsmith.decode.drafts.growing import propose
from draftsmith.decode.draws import Draws
from draftsmith.decode.sampling import Processors
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.rows import Counts


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
            if min(length, max(rooms)) <= 0:
                return DraftBatch.empty(len(texts), rooms.device), []
            return chains(self.drafter, self.processors, self.shared, texts, rooms, length, draws, committed), []
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
