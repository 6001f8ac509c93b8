"""The drafts of one round for all texts, known to the host or still on the device, and the transfer that reads them."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedTokens, Contexts
from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.draws import Draws
from draftsmith.decode.verification import Rule, takes_mixed, takes_united
from draftsmith.decode.verification_rules import Decided, VerifyResult
from draftsmith.heads.draft_tree import NO_NODE, Draft, DraftBatch, Parents, united
from draftsmith.heads.rows import Rows, constant

# Shapes: B texts, N draft nodes, Q = 1 + the most nodes of a text.

NO_DRAFT = Draft()
CHAIN, TREES = "drawn chain", "drawn trees"
"""Kinds of drawn drafts that are verified together."""
Group = tuple[list[int], DraftBatch, Draws]
"""Rows whose drafts are verified together, the drafts and the random draws of these rows."""


class Proposal:
    """The drafts of all texts.

    Args:
        drafts: None while the tokens of a `batch` are on the device, until `read`.
        batch: chains on the device, of which the drafter has read all tokens but the last.
        builders: of drafts that the host built.
    """

    def __init__(
        self,
        drafts: list[Draft] | None = None,
        builders: Sequence[DraftBuilder] = (),
        batch: DraftBatch | None = None,
    ) -> None:
        self._drafts, self.builders, self.batch = drafts, builders, batch

    @staticmethod
    def empty(count: int, device: torch.device) -> "Proposal":
        """Return drafts without tokens for this number of texts."""
        return Proposal(batch=DraftBatch(torch.empty(count, 0, dtype=torch.int64, device=device), ()))

    @property
    def drafts(self) -> list[Draft]:
        """The draft of each text; -1 is the token of a node that the text does not have."""
        assert self._drafts is not None, "read with the outcome"
        return self._drafts

    @property
    def shapes(self) -> list[Parents]:
        """The parents of each text's nodes, or one entry for all texts."""
        return [draft.parents for draft in self.drafts] if self.batch is None else [self.batch.parents]

    def tokens(self, roots: Rows) -> Tensor:
        """Return the tokens that the target reads, [B, Q]: the last committed ones and the drafts, padded with 0."""
        if self.batch is not None:
            return torch.cat([roots.values_BW, self.batch.tokens_BN], 1)
        rows = [[*root, *draft.tokens] for root, draft in zip(roots, self.drafts, strict=True)]
        return Rows(rows, roots.device).values_BW

    def contexts(self, committed: CommittedTokens | None, numbers: Sequence[int]) -> Contexts:
        """Return the tokens before each place of each text, padding included."""
        assert committed is not None, "kept where a processor reads the text"
        most = max(map(len, self.drafts)) if self.batch is None else len(self.batch)
        rows = [row for row in range(len(numbers)) for _ in range(most + 1)]
        texts = [numbers[row] for row in rows]
        if self.batch is not None:
            paths_nD = self.batch.tokens_BN.repeat_interleave(most + 1, 0) if most else None
            return committed.with_paths(rows, paths_nD, [*range(most + 1)] * len(numbers), texts)
        paths = []
        for draft in self.drafts:
            own = [[draft.tokens[step] for step in draft.path(node)] for node in range(len(draft))]
            paths += [[], *own, *([[]] * (most - len(own)))]
        return committed.with_tokens(rows, paths, texts)

    def packed(self) -> list[Tensor]:
        """Return the tensors that `read` needs: the tokens [B, N] of a batch, nothing for drafts of the host."""
        if self.batch is None or len(self.batch) == 0:
            return []
        tokens_BN, valid_BN = self.batch.tokens_BN, self.batch.valid_BN
        return [tokens_BN if valid_BN is None else tokens_BN.masked_fill(~valid_BN, NO_NODE)]

    def read(self, values: Sequence[Sequence[float]]) -> list[Draft]:
        """Return the drafts, from the packed values of a batch."""
        if self.batch is not None:
            parents = self.batch.parents
            self._drafts = [Draft(tuple(map(int, row)), parents) if parents else NO_DRAFT for row in values]
        return self.drafts

    def groups(self, draws: Draws, device: torch.device, rule: Rule | None) -> list[Group]:
        """Return the drafts in batches that `rule` verifies in one call each, with their rows.

        Drafts of one shape form a batch, and so do drawn chains of all lengths. Chosen drafts and drawn trees of
        different shapes do where the rule takes them, see `takes_mixed` and `takes_united`.
        """
        if self.batch is not None:
            return [(list(range(len(self.batch.tokens_BN))), self.batch, draws)]
        by_kind: dict[Hashable, list[int]] = {}
        for row, draft in enumerate(self.drafts):
            by_kind.setdefault(_kind(draft, rule), []).append(row)
        together = [part for rows in by_kind.values() for part in self._parts(rows)]
        return [(rows, DraftBatch.of([self.drafts[row] for row in rows], device), draws.of(rows)) for rows in together]

    def _parts(self, rows: list[int]) -> list[list[int]]:
        """Divide rows until the shape of each part has at most twice the nodes of its largest drawn tree.

        A batch of drawn trees holds p and q [V] of every node of its shape for each of its texts.
        """
        drafts = [self.drafts[row] for row in rows]
        if not drafts[0].drawn or len(united([draft.parents for draft in drafts])[0]) <= 2 * max(map(len, drafts)):
            return [rows]
        rows, half = sorted(rows, key=lambda row: self.drafts[row].parents), len(rows) // 2
        return self._parts(rows[:half]) + self._parts(rows[half:])

    def read_slots(self, row: int, path: Sequence[int]) -> list[int]:
        """Return the slots of those nodes on a path of a text that the drafter has read."""
        if self.builders:
            return self.builders[row].read_slots(tuple(path))
        assert self.batch is not None
        return [node for node in path if node < len(self.batch) - 1]


def _kind(draft: Draft, rule: Rule | None) -> Hashable:
    """Return a value that is equal for drafts that are verified together; see `Proposal.groups`."""
    if draft.drawn and draft.tokens:
        return CHAIN if draft.is_chain else TREES if takes_united(rule) else ("drawn", draft.parents)
    return "chosen" if takes_mixed(rule) and draft.tokens else draft.parents


def p_of(group: Group, p_BQV: Tensor) -> Tensor:
    """Return the target's distributions at the places of a group's batch, from those at the places of all drafts."""
    rows, batch, _ = group
    if batch.own_BN is None and len(rows) == len(p_BQV):
        return p_BQV
    rows_B = constant(tuple(rows), p_BQV.device)
    if batch.own_BN is None:
        return p_BQV[rows_B, : len(batch) + 1]
    return p_BQV[rows_B[:, None], torch.nn.functional.pad(batch.own_BN + 1, (1, 0))]


def read_outcomes(
    outcomes: Sequence[tuple[Group, Decided]], proposal: Proposal, empty_BQ: Tensor | None
) -> list[VerifyResult]:
    """Return the result of each text, which ends at a place that is `empty_BQ`, from one transfer."""
    count, tables = sum(len(rows) for (rows, _, _), _ in outcomes), []
    for (rows, _, _), outcome in outcomes:
        parts = [outcome.packed()]
        parts += (
            []
            if empty_BQ is None
            else [(empty_BQ if len(rows) == count else empty_BQ[constant(tuple(rows), empty_BQ.device)]).double()]
        )
        parts += proposal.packed()
        tables.append(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    widest = max(table.shape[1] for table in tables)
    padded = [torch.nn.functional.pad(table, (0, widest - table.shape[1])) for table in tables]
    values = (torch.cat(padded) if len(padded) > 1 else padded[0]).tolist()
    if proposal.batch is not None:
        proposal.read([row[widest - len(proposal.batch) :] for row in values])
    results: dict[int, VerifyResult] = {}
    place = iter(values)
    for (rows, batch, _), outcome in outcomes:
        for number, row in enumerate(rows):
            of_row = next(place)
            result = outcome.result(of_row, None if batch.own is None else batch.own[number])
            results[row] = result if empty_BQ is None else result.until(of_row[outcome.columns :])
    return [results[row] for row in range(count)]
