"""The decoding loop: propose, verify, commit, until every sequence has ended; without a drafter all drafts are empty.

Drafts are retrieved where the drafter can, else built by the policy, for all sequences of a batch in lockstep.
"""

import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.committed import CommittedTokens, Contexts, FeatureQueue, contexts_of
from draftsmith.decode.clock import PartClock
from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.draws import NOT_DRAWN, Draws, MakeDraws, seeded_draws, signed
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.rules import Rule
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import Processors
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.decode.verification import decide
from draftsmith.heads.base import Drafter, Needs
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.rows import Counts, Rows, rows_of

# Shapes: B sequences, N draft nodes, H hidden size, V vocabulary.


class _RoundInputs:
    """The inputs of a round on the device, [B] each: seed, length, last token and room of every sequence.

    Args:
        limit: length of the longest sequence that the drafter can read.
    """

    def __init__(self, sequences: Sequence[DecodeSequence], limit: int | None, device: torch.device) -> None:
        self._limit, self._device = limit, device
        self.seeds = Counts([signed(sequence.seed) for sequence in sequences], device)
        self.lengths = Counts([len(sequence.tokens) for sequence in sequences], device)
        """Number of tokens."""
        self.roots = self.rooms = Rows([], device)
        """The last token, and the maximum depth of the draft after it."""

    def advance(
        self, sequences: Sequence[DecodeSequence], new: list[list[int]], *lists: Sequence[Sequence[int]]
    ) -> list[Rows]:
        """Return the new tokens and other lists on the device: all that rounds upload of their outcome, at once."""
        rooms = [
            sequence.room if self._limit is None else min(sequence.room, self._limit - len(sequence.tokens))
            for sequence in sequences
        ]
        roots = [sequence.tokens[-1:] for sequence in sequences]
        *rows, self.roots, self.rooms = Rows.together(self._device, new, *lists, roots, [[room] for room in rooms])
        self.lengths = self.lengths + rows[0].counts
        return rows

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order."""
        self.roots, self.rooms = self.roots.keep(rows), self.rooms.keep(rows)
        self.seeds, self.lengths = self.seeds.keep(rows), self.lengths.keep(rows)


class DecodeLoop:
    """Decodes several sequences together. Implements `Context` of heads/base.py for the drafter.

    A sequence is removed from `sequences` when it ends, and its row from every cache.
    """

    def __init__(
        self,
        target: TransformersTarget,
        drafter: Drafter | None,
        policy: Policy | None,
        sequences: Sequence[DecodeSequence],
        processors: Processors,
        rule: Rule | None = None,
        widths: dict[int, int] | None = None,
        *,
        compile: bool = False,
    ) -> None:
        self.sequences = list(sequences)
        self._compile = compile
        self._runners: list[ModelRunner] = []
        self._target, self._drafter = target, drafter
        self._processors, self._rule, self._widths = processors, rule, widths
        self._committed: CommittedTokens | None = None
        """The committed tokens, with padding, where a processor reads them."""
        self.hidden: Tensor | None = None
        self._features = FeatureQueue()
        self.draws_of: MakeDraws = seeded_draws
        """The source of all random draws, which the exact tests replace."""
        self._proposer: Proposer | None = None
        self.draft_length = None if policy is None else policy.fixed_length
        """Length of the next drafts that are not retrieved; None where it depends on q."""
        self.clock = time.perf_counter
        """The clock of the seconds in records, except for drafting on CUDA."""
        for sequence in self.sequences:
            sequence.shared_with = self.sequences[0].number
            sequence.policy = None if policy is None else policy.fresh()

    def runner(self, model: nn.Module, *, width: int = 0) -> ModelRunner:
        sources = [sequence.source for sequence in self.sequences]
        model = cast(PreTrainedModel, model)  # or a `DraftNetwork`, which has the same interface
        longest = max(sequence.max_length for sequence in self.sequences) + width  # a block may end after the sequence
        policy = self.sequences[0].policy
        if self._compile and policy is not None:  # storage does not grow
            longest += policy.most_nodes.read
        widths = {} if width else self._widths or {}
        plan = Plan(sources=sources, widths=widths, longest=longest, compile=self._compile, width=width)
        runner = ModelRunner(model, len(self.sequences), plan)
        self._runners.append(runner)
        return runner

    @property
    def last_tokens_B1(self) -> Tensor:
        return self._inputs.roots.values_BW

    def take_features(self, counts: Sequence[int]) -> Tensor:
        return self._features.take(counts)

    def close(self) -> None:
        """Leave the drafter's compiled passes to later sequences, and free its caches; this loop is not used again."""
        for runner in self._runners:
            runner.close()
        self._runners.clear()
        # Drafters keep the loop as their context until they start again.
        del self.sequences, self.hidden, self._features, self._committed, self._proposer

    def prefill(self) -> list[tuple[DecodeSequence, list[int]]]:
        """Read the prompts and commit the first token of each; return every sequence with its new tokens."""
        layers = () if self._drafter is None else self._drafter.needs.layers
        logits_BV, drafter = self._target.prefill(self.sequences, layers), self._drafter
        self._device = logits_BV.device
        self._clock = PartClock(self._device, ("draft",), self.clock)
        if self._processors.read_text:
            self._committed = CommittedTokens.of(self.sequences, self._device)
        if drafter is not None:
            self._proposer = Proposer(drafter, self._processors, _shared(drafter, logits_BV.shape[1]))
        sequences, batch = self.sequences, DraftBatch.empty(len(self.sequences), self._device)
        self._inputs = _RoundInputs(sequences, None if drafter is None else drafter.context_limit, self._device)
        results = self._decided(logits_BV[:, None], batch, self._draws())
        if drafter is not None:
            self._hand_over(None)
        new = self._commit(batch.read([]), results, logits_BV[:, None])
        (tokens,) = self._inputs.advance(sequences, new)
        if self._committed is not None:
            self._committed.append(tokens)
        self._finish(started=False)
        if drafter is not None and self.sequences:
            drafter.start(self)
        return list(zip(sequences, new, strict=True))

    def round(self) -> list[tuple[DecodeSequence, list[int], Round]]:
        """Propose, verify and commit once; return every unfinished sequence with its new tokens and its record."""
        started = self.clock()
        clock = self._clock
        clock.start()
        draws = self._draws()
        batch, builders = DraftBatch.empty(len(self.sequences), self._device), []
        if self._proposer is not None:
            rooms = self._inputs.rooms.last()
            batch, builders = self._proposer.propose(self.sequences, rooms, self.draft_length, draws, self._committed)
        clock.end("draft")
        tokens_BQ = torch.cat([self._inputs.roots.values_BW, batch.tokens_BN], 1)
        logits_BQV = self._target.verify(tokens_BQ, batch.shapes)
        results = self._decided(logits_BQV, batch, draws)
        verified = self.clock()  # the device has nothing left to do: the outcome was read
        draft_seconds = clock.seconds()["draft"]
        drafts = batch.read([])
        new = self._commit(drafts, results, logits_BQV)
        results = [result.first(len(tokens)) for result, tokens in zip(results, new, strict=True)]
        slots = self._observe(drafts, builders, results)
        paths = [list(result.path) for result in results]
        tokens, accepted, read = self._inputs.advance(self.sequences, new, paths, slots)
        self._take_over(accepted, tokens)
        if self._drafter is not None:
            self._drafter.rollback(read)
        ended = self.clock()
        out = []
        seconds = (draft_seconds, verified - started - draft_seconds, ended - started)
        same: dict[tuple, Round] = {}
        """The record of sequences with equal outcomes, which share it."""
        for sequence, draft, result, tokens in zip(self.sequences, drafts, results, new, strict=True):
            outcome = (draft.drafted, draft.depth, result.accepted, len(tokens), result.overlap)
            record = same.get(outcome) or same.setdefault(outcome, Round(*outcome, *seconds))
            sequence.rounds.append(record)
            out.append((sequence, tokens, record))
        self._finish()
        return out

    def _draws(self) -> Draws | None:
        """Return the random draws of the next round; greedy decoding has none."""
        if self._processors.greedy:
            return None
        return self.draws_of(self._inputs.seeds, self._inputs.lengths, self._device)

    def _decided(self, logits_BQV: Tensor, batch: DraftBatch, draws: Draws | None) -> list[VerifyResult]:
        """Return the outcome for each sequence."""

        def contexts() -> Contexts:
            assert self._committed is not None, "kept where a processor reads the sequence"
            return batch.contexts(self._committed, [sequence.number for sequence in self.sequences])

        return decide(logits_BQV, batch, draws, self._processors, self._rule, contexts)

    def _commit(self, drafts: list[Draft], results: list[VerifyResult], logits_BQV: Tensor) -> list[list[int]]:
        """Commit what was accepted and the tokens after it, and return the new tokens of each sequence.

        Raises:
            DraftsmithError: if a sequence has not ended where the processors forbid every token.
        """
        new = []
        for row, (sequence, draft, result) in enumerate(zip(self.sequences, drafts, results, strict=True)):
            path = [draft.tokens[node] for node in result.path]
            new.append(sequence.commit(path if result.next_token == NOT_DRAWN else [*path, result.next_token]))
            if result.next_token == NOT_DRAWN and sequence.stopped_by is None:
                position = result.path[-1] + 1 if result.path else 0
                before = contexts_of([sequence.padding + sequence.tokens], self._device, sequence.number)
                self._processors.raise_empty(logits_BQV[row, position][None], before)
        return new

    def _take_over(self, paths: Rows, new: Rows) -> None:
        """Hand the target's states over to the drafter, and keep the accepted tokens."""
        if self._drafter is not None:
            self._hand_over(paths)
        self._target.commit(paths)
        if self._committed is not None:
            self._committed.append(new)

    def _hand_over(self, paths: Rows | None) -> None:
        """Keep the target's states after these paths, after the prompts with None, for the drafter."""
        assert self._drafter is not None, "its needs are handed over"
        if self._drafter.needs == Needs():
            return
        read = Rows([[]] * len(self.sequences), self._device) if paths is None else paths
        self.hidden = None
        if self._drafter.needs.hidden:
            self.hidden = self._target.hidden(read.after_root.last() + ROOT)
        counts = read.counts + 1
        if paths is None:
            counts = Counts([len(sequence.tokens) for sequence in self.sequences], self._device)
        features_BnF = self._target.features(paths)
        if features_BnF is not None:
            self._features.add(features_BnF, counts)

    def _observe(
        self, drafts: list[Draft], builders: list[DraftBuilder], results: list[VerifyResult]
    ) -> list[list[int]]:
        """Pass results to the policies; return the slots of accepted nodes that the drafter has read.

        Policies learn nothing from a draft inside which its sequence ended: its other tokens are neither right nor
        wrong.
        """
        if not builders:  # chains on the device, of which the drafter has read all tokens but the last
            return [[node for node in result.path if node < len(drafts[0]) - 1] for result in results]
        slots: list[list[int]] = []
        for sequence, draft, builder, result in zip(self.sequences, drafts, builders, results, strict=True):
            retrieved = len(draft) > 0 and not builder.tokens
            slots.append([] if retrieved else builder.read_slots(result.path))
            if sequence.policy is None or not sequence.policy.learns or result.next_token == NOT_DRAWN:
                continue
            if retrieved:
                greedy = self._processors.greedy
                sequence.policy.observe_retrieved(builder.found, len(draft), result.accepted, greedy=greedy)
            else:
                sequence.policy.observe(builder, draft, result)
        return slots

    def _finish(self, *, started: bool = True) -> None:
        """Drop the rows of sequences that have ended, in the target and, once it has `started`, in the drafter."""
        running = [row for row, sequence in enumerate(self.sequences) if sequence.stopped_by is None]
        if len(running) == len(self.sequences):
            return
        running = _moved_up(running)
        self.sequences = [self.sequences[row] for row in running]
        if not running:
            return
        self._target.drop(running)
        if self._committed is not None:
            self._committed.keep(running)
        self._features.keep(running)
        self._inputs.keep(running)
        if self.hidden is not None:
            self.hidden = rows_of(self.hidden, running)
        if started and self._drafter is not None:
            self._drafter.drop(running)


def _moved_up(rows: list[int]) -> list[int]:
    """Return these rows in an order in which few of them move: the last ones take the rows of those that have ended."""
    kept, last = set(rows), [row for row in rows if row >= len(rows)]
    return [row if row in kept else last.pop() for row in range(len(rows))]


def _shared(drafter: Drafter, vocabulary: int) -> tuple[int, int] | None:
    """Return (tokens that the drafter may draft, size of the target's vocabulary), where it may not draft all."""
    if drafter.vocab_size is None or drafter.shared_vocabulary is None:
        assert drafter.vocab_size in (None, vocabulary), "`SpeculativeDecoder` refuses other vocabularies"
        return None
    return drafter.shared_vocabulary, vocabulary
