"""The drafts of a round for all sequences: retrieved ones, chains on the device, and those that policies grow.

The length of a chain is known whatever q is, so the host needs no token of it before it is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedSequence, CommittedTokens, Contexts
from draftsmith.decode.drafts.batch import NO_DRAFT, DraftBatch
from draftsmith.decode.drafts.builder import DraftBuilder, fitted
from draftsmith.decode.draws import Draws
from draftsmith.decode.growing import grow_drafts
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import Processors, precise
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_tree import NO_NODE, Draft
from draftsmith.heads.rows import Counts

# Shapes: B sequences, N tokens of a chain, V vocabulary of the target.


@dataclass(frozen=True)
class Proposer:
    """Builds the drafts of one drafter.

    Args:
        shared: (tokens that the drafter may draft, size of the target's vocabulary), where it may not draft all.
    """

    drafter: Drafter
    processors: Processors
    shared: tuple[int, int] | None = None

    def propose(
        self,
        sequences: Sequence[DecodeSequence],
        rooms: Counts,
        length: int | None,
        draws: Draws | None,
        committed: CommittedTokens | None,
    ) -> tuple[DraftBatch, list[DraftBuilder]]:
        """Return drafts for all sequences, and the builders of those that the host built.

        Args:
            rooms: the maximum depth of each draft.
            length: of all drafts that are not retrieved; None where it depends on q.
            draws: None: the likeliest tokens are chosen.
            committed: the tokens of the sequences, where a processor reads them.
        """
        found = self._retrieved(rooms)
        retrieved = [self._worth(sequence, draft) for sequence, draft in zip(sequences, found, strict=True)]
        if (most := self.drafter.max_draft_length) is not None:  # a limit of its logits, not of retrieval
            rooms = rooms.map(lambda room: room - (room - most) * (room > most))
        if length is not None and all(draft is None for draft in retrieved):
            if min(length, max(rooms)) <= 0:
                return DraftBatch.empty(len(sequences), rooms.device), []
            return self.chains(sequences, rooms, length, draws, committed), []
        builders = []
        for sequence, room, draft in zip(sequences, rooms, found, strict=True):
            builders.append(DraftBuilder(sequence, room, self.processors, self.shared))
            builders[-1].found = 0 if draft is None else len(draft)
        policies = [sequence.policy for sequence in sequences]
        return DraftBatch.of(self.build(policies, builders, retrieved, draws, committed), rooms.device), builders

    def build(
        self,
        policies: Sequence[Policy | None],
        builders: Sequence[DraftBuilder],
        retrieved: Sequence[Draft | None],
        draws: Draws | None,
        committed: CommittedTokens | None = None,
    ) -> list[Draft]:
        """Return a draft for each sequence: the retrieved one, where there is one, else one that its policy builds.

        Args:
            builders: of all sequences; that of a retrieved draft stays empty.
            draws: of all sequences; None where decoding is greedy.
            committed: the tokens of the sequences, see `probabilities`.
        """
        to_build: dict[int, Policy] = {}
        for row, (policy, builder) in enumerate(zip(policies, builders, strict=True)):
            if retrieved[row] is None and builder.room >= 1:
                assert policy is not None, "a drafter that computes logits has a policy"
                to_build[row] = policy
        lengths = [policy.fixed_length for policy in to_build.values() if policy.fixed_length is not None]
        if lengths:
            assert len(lengths) == len(to_build), "all sequences have one policy"
            built = self._chains_of(list(to_build), builders, max(lengths), draws, committed)
        else:
            built = grow_drafts(self.drafter, to_build, builders, draws, committed)
        return [built.get(row, draft or NO_DRAFT) for row, draft in enumerate(retrieved)]

    def chains(
        self,
        sequences: Sequence[CommittedSequence],
        rooms: Sequence[int],
        length: int,
        draws: Draws | None,
        committed: CommittedTokens | None,
    ) -> DraftBatch:
        """Return chains without reading a value; the drafter reads all tokens but the last.

        All tokens are chosen, or all are drawn from q and kept.

        Args:
            rooms: the maximum length of each chain; not all 0.
            draws: None: the likeliest tokens are chosen.
            committed: the tokens of the sequences, for processors that read them; made here where they are not kept.
        """
        logits_BV = self.drafter.begin([row for row, room in enumerate(rooms) if room > 0])
        B, device = len(sequences), logits_BV.device
        rooms = Counts.of(rooms, device)
        if 1 < length <= min(rooms) and self.processors.only_temperature:
            logits_BNV = self.drafter.chain_logits(length)
            if logits_BNV is not None:  # which do not depend on the tokens
                return self._independent(logits_BNV, draws)
        tokens: list[Tensor] = []
        valid: list[Tensor | None] = []
        """Sequences that have each node; None: all."""
        q: list[Tensor] = []

        def contexts() -> Contexts:
            before = committed or CommittedTokens.of(sequences, device)
            paths_BN, depths = torch.stack(tokens, 1) if tokens else None, Counts([len(tokens)] * B, device)
            return before.with_paths(range(B), paths_BN, depths, [sequence.number for sequence in sequences])

        for depth in range(min(length, max(rooms))):
            if depth > 0:
                logits_BV = self.drafter.extend(Level(tokens[-1][:, None], None, depth))[:, 0]
            scores_BV = self.processors.scores(fitted(logits_BV, self.shared), contexts)
            valid_B = valid[-1] if valid else None
            if min(rooms) <= depth:
                valid_B = _both(valid_B, rooms.on_device_B > depth)
            if self.processors.may_empty:
                valid_B = _both(valid_B, ~scores_BV.isneginf().all(-1))
            valid.append(valid_B)
            if draws is None:
                tokens.append(scores_BV.argmax(-1))
                continue
            q_BV = scores_BV.softmax(-1)
            q.append(q_BV.nan_to_num(0.0) if self.processors.may_empty else q_BV)
            tokens.append(draws.drafted(q[-1], depth, valid_B))
        tokens_BN, valid_BN = torch.stack(tokens, 1), None
        if valid[-1] is not None:  # nodes follow valid ones
            all_B = torch.ones_like(valid[-1])
            valid_BN = torch.stack([all_B if valid_B is None else valid_B for valid_B in valid], 1)
        return DraftBatch(tokens_BN, valid_BN, q_BNV=torch.stack(q, 1) if q else None)

    def _independent(self, logits_BNV: Tensor, draws: Draws | None) -> DraftBatch:
        """Return chains of tokens whose logits do not depend on the tokens before them."""
        scores_BNV = precise(fitted(logits_BNV, self.shared))
        if draws is None:
            return DraftBatch(scores_BNV.argmax(-1))
        q_BNV = (scores_BNV / self.processors.sampling.temperature).softmax(-1)
        return DraftBatch(draws.chain(q_BNV), q_BNV=q_BNV)

    def _chains_of(
        self,
        rows: list[int],
        builders: Sequence[DraftBuilder],
        length: int,
        draws: Draws | None,
        committed: CommittedTokens | None,
    ) -> dict[int, Draft]:
        """Return chains for these rows, beside others whose drafts were retrieved, from one transfer."""
        rooms = [builder.room if row in rows else 0 for row, builder in enumerate(builders)]
        draws = None if self.processors.greedy else draws
        batch = self.chains([builder.sequence for builder in builders], rooms, length, draws, committed)
        (packed_BN,) = batch.packed()
        table = packed_BN.tolist()
        for row in rows:
            builder, (_, q) = builders[row], batch.row(row)
            for node, token in enumerate(table[row]):
                if token == NO_NODE:
                    break
                if q is None:
                    builder.choose(node - 1, token)
                else:
                    builder.keep_drawn(node - 1, token, q[node])
                if node + 1 < len(table[row]):
                    builder.slots[node] = node
        return {row: builders[row].draft() for row in rows}

    def _retrieved(self, rooms: Sequence[int]) -> list[Draft | None]:
        """Return the retrieved draft of each sequence, None where the drafter retrieves none."""
        if type(self.drafter).retrieve is Drafter.retrieve:
            return [None for _ in rooms]
        return [self.drafter.retrieve(row, room) if room > 0 else None for row, room in enumerate(rooms)]

    def _worth(self, sequence: DecodeSequence, draft: Draft | None) -> Draft | None:
        """Return the first tokens of a retrieved draft, as many as the sequence's policy keeps; None: it builds one."""
        if draft is None or not draft.tokens or sequence.policy is None:
            return draft
        kept = sequence.policy.retrieved(draft, greedy=self.processors.greedy)
        return kept if kept.tokens else None


def _both(one_B: Tensor | None, other_B: Tensor) -> Tensor:
    return other_B if one_B is None else one_B & other_B
