"""The decoding loop: propose, verify, commit, until every text has ended; without a drafter all drafts are empty.

Drafts are retrieved where the drafter can, else built by the policy, for all texts of a batch in lockstep.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.model_runner import ModelRunner
from draftsmith.decode.policies.base import Growing, Policy
from draftsmith.decode.sampling import Contexts, Processors, Sampling, SeededRng
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import Target
from draftsmith.decode.verification import Rule, VerifyResult, verify, verify_greedy
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_tree import ROOT, Draft

Rows = TypeVar("Rows", Tensor, list[int])
"""Processed logits of several nodes: distributions [N, V], or tokens [N]."""

EXAMPLE = 8
"""Maximum depth of an example draft."""


def propose(drafter: Drafter, policies: list[Policy | None], builders: list[DraftBuilder]) -> list[Draft]:
    """Return a draft for each text. Each pass of the drafter covers all texts whose drafts are unfinished.

    The `DraftBuilder` of a retrieved draft remains empty.
    """
    drafts = [Draft() for _ in builders]
    growing: dict[int, Growing] = {}
    wanted: dict[int, list[int]] = {}

    def note_confidences(asked: list[list[int]]) -> None:
        """Store the drafter's own confidences in the builders, where policies read them."""
        for builder, nodes, confidences in zip(
            builders, asked, drafter.confidences(builders, asked) or (), strict=False
        ):
            builder.estimates.update(zip(nodes, confidences, strict=True))

    def advance(row: int, logits_nV: Tensor | None) -> None:
        """Send logits to the policy of one text (None starts it); store the nodes that it requests, or its draft."""
        try:
            wanted[row] = next(growing[row]) if logits_nV is None else growing[row].send(logits_nV)
        except StopIteration as end:
            drafts[row] = end.value
            del growing[row]
            wanted.pop(row, None)

    for row, builder in enumerate(builders):
        if builder.room < 1:
            continue
        retrieved = drafter.retrieve(row, builder.room)
        if retrieved is not None:
            drafts[row] = retrieved
            continue
        if drafter.max_draft_length is not None:  # a limit of its logits, not of retrieval
            builder.room = min(builder.room, drafter.max_draft_length)
        policy = policies[row]
        assert policy is not None, "a drafter that computes logits has a policy"
        growing[row] = policy.grow(builder)
        advance(row, None)
    if not growing:
        return drafts
    assert all(nodes == [ROOT] for nodes in wanted.values()), "the first request of a policy is the root"
    logits_BV = drafter.begin(list(growing))
    note_confidences([wanted.get(row, []) for row in range(len(builders))])
    for row in list(growing):
        advance(row, logits_BV[row][None])
    while growing:
        asked = [wanted.get(row, []) for row in range(len(builders))]
        logits = drafter.extend(builders, asked)
        note_confidences(asked)
        for row in list(growing):
            advance(row, logits[row])
    return drafts


def example_draft(policy: Policy, sharpness: float) -> Draft:
    """Return a draft that the policy builds at temperature 1 with a drafter whose logits are equal after every node.

    `sharpness`: the difference between consecutive logits.
    """
    builder = DraftBuilder(DecodeSequence([0], 2 + EXAMPLE, SeededRng(0)), EXAMPLE, Processors(Sampling(1.0)))
    logits_V = -sharpness * torch.arange(2.0 * EXAMPLE)
    growing = policy.fresh().grow(builder)
    try:
        nodes = next(growing)
        while True:
            nodes = growing.send(logits_V.expand(len(nodes), -1))
    except StopIteration as end:
        return end.value


# Shapes: B texts, N draft nodes, H hidden size, V vocabulary.


class DecodeLoop:
    """Decodes several texts together. Implements `Context` of heads/base.py for the drafter.

    A text is removed from `texts` when it ends, and its row from every cache.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy | None,
        texts: Sequence[DecodeSequence],
        processors: Processors,
        rule: Rule | None = None,
        widths: dict[int, int] | None = None,
    ) -> None:
        self.texts = list(texts)
        self._target, self._drafter = target, drafter
        self._processors, self._rule, self._widths = processors, rule, widths
        self._shared: tuple[int, int] | None = None
        for text in self.texts:
            text.policy = None if policy is None else policy.fresh()

    def runner(self, model: nn.Module, *, padded: bool = True) -> ModelRunner:
        sources = [text.source for text in self.texts]
        model = cast(PreTrainedModel, model)  # or a `DraftNetwork`, which has the same interface
        return ModelRunner(model, len(self.texts), sources, widths=self._widths if padded else None)

    def prefill(self) -> list[tuple[DecodeSequence, list[int]]]:
        """Read the prompts and commit the first token of each; return every text with its new tokens."""
        layers = () if self._drafter is None else self._drafter.needs.layers
        logits_BV = self._target.prefill(self.texts, layers)
        if self._drafter is not None and self._drafter.vocab_size not in (None, logits_BV.shape[1]):
            assert self._drafter.shared_vocabulary is not None, "`SpeculativeDecoder` refuses other vocabularies"
            self._shared = (self._drafter.shared_vocabulary, logits_BV.shape[1])
        new = []
        results = self._verify([logits_V[None] for logits_V in logits_BV], [Draft() for _ in self.texts])
        for row, (text, result) in enumerate(zip(self.texts, results, strict=True)):
            text.hidden = self._target.hidden(row, ROOT)
            text.add_features(self._target.features(row))
            new.append((text, text.commit([result.next_token])))
        self._finish(started=False)
        if self._drafter is not None and self.texts:
            self._drafter.start(self)
        return new

    def round(self) -> list[tuple[DecodeSequence, list[int], Round]]:
        """Propose, verify and commit once; return every unfinished text with its new tokens and the round's record."""
        hidden = self.texts[0].hidden
        device = None if hidden is None else hidden.device
        started = now(device)
        drafts = [Draft() for _ in self.texts]
        builders: list[DraftBuilder] = []
        if self._drafter is not None:
            limit = self._drafter.context_limit
            builders = [DraftBuilder(text, _room(text, limit), self._processors, self._shared) for text in self.texts]
            drafts = propose(self._drafter, [text.policy for text in self.texts], builders)
        drafted = now(device)
        logits = self._target.verify([text.tokens[-1] for text in self.texts], drafts)
        results = self._verify(logits, drafts)
        verified = now(device)
        new = []
        for row, (text, draft, result) in enumerate(zip(self.texts, drafts, results, strict=True)):
            text.hidden = self._target.hidden(row, result.path[-1] if result.path else ROOT)
            text.add_features(self._target.features(row, list(result.path)))
            new.append(text.commit([*(draft.tokens[node] for node in result.path), result.next_token]))
        self._target.commit([list(result.path) for result in results])
        if self._drafter is not None:
            self._drafter.rollback(self._observe(builders, drafts, results))
        ended = now(device)
        out = []
        for text, draft, result, tokens in zip(self.texts, drafts, results, new, strict=True):
            record = Round(
                drafted=len(draft),
                depth=draft.depth,
                accepted=result.accepted,
                committed=len(tokens),
                overlap=result.overlap,
                draft_seconds=drafted - started,
                verify_seconds=verified - drafted,
                seconds=ended - started,
            )
            text.rounds.append(record)
            out.append((text, tokens, record))
        self._finish()
        return out

    def _observe(
        self, builders: list[DraftBuilder], drafts: list[Draft], results: list[VerifyResult]
    ) -> list[list[int]]:
        """Pass results to the policies; return the accepted nodes of each builder's tree, none for retrieved drafts."""
        paths: list[list[int]] = []
        for text, builder, draft, result in zip(self.texts, builders, drafts, results, strict=True):
            retrieved = len(draft) > 0 and not builder.tokens
            paths.append([] if retrieved else builder.origin(result.path))
            if text.policy is not None and not retrieved:
                text.policy.observe(builder, draft, result)
        return paths

    def _verify(self, logits: list[Tensor], drafts: list[Draft]) -> list[VerifyResult]:
        """Return the result of the verification rule for each text. `logits`: [N + 1, V] for each."""
        if self._processors.greedy:
            tokens = self._processed(self._processors.tokens, logits, drafts)
            return [verify_greedy(row, draft) for row, draft in zip(tokens, drafts, strict=True)]
        p = self._processed(self._processors.probabilities, logits, drafts)
        return [
            verify(self._rule, p_PV, draft, text.rng) for text, p_PV, draft in zip(self.texts, p, drafts, strict=True)
        ]

    def _processed(
        self, process: Callable[[Tensor, Contexts, int], Rows], logits: list[Tensor], drafts: list[Draft]
    ) -> list[Rows]:
        """Return the logits of each text after `process`."""
        if len(logits) > 1 and not self._processors.read_text:
            # One call for all texts: no processor reads the tokens before a position.
            processed = process(torch.cat(logits), list, 0)
            ends = list(accumulate(len(rows) for rows in logits))
            return [processed[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [
            process(rows, partial(_contexts, text, draft), text.number)
            for text, rows, draft in zip(self.texts, logits, drafts, strict=True)
        ]

    def _finish(self, *, started: bool = True) -> None:
        """Drop the rows of texts that have ended, in the target and, once it has `started`, in the drafter."""
        running = [row for row, text in enumerate(self.texts) if text.stopped_by is None]
        if len(running) == len(self.texts):
            return
        self.texts = [self.texts[row] for row in running]
        if not running:
            return
        self._target.drop(running)
        if started and self._drafter is not None:
            self._drafter.drop(running)


def _room(text: DecodeSequence, context_limit: int | None) -> int:
    """Return the maximum draft depth that the text's length and the drafter's context allow."""
    return text.room if context_limit is None else min(text.room, context_limit - len(text.tokens))


def _contexts(text: DecodeSequence, draft: Draft) -> list[list[int]]:
    """Return the tokens up to the root and up to each node, with padding, as processors read them."""
    shown = text.padding + text.tokens
    return [shown, *(shown + [draft.tokens[i] for i in draft.path(node)] for node in range(len(draft)))]


def now(device: torch.device | None) -> float:
    """Return the clock in seconds; on CUDA, after all queued work has finished."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
