"""The loop: propose, verify, commit, until every text has ended; the target alone is the loop with empty drafts."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from draftsmith.decode.growth import Growth
from draftsmith.decode.output import Round
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.processors import Processors
from draftsmith.decode.propose import propose
from draftsmith.decode.reader import Reader
from draftsmith.decode.target import Target
from draftsmith.decode.text import Text
from draftsmith.decode.verify import Rule, Verdict, verify, verify_greedy
from draftsmith.heads.draft import ROOT, Draft
from draftsmith.heads.drafter import Drafter

# Shapes: B texts, N draft nodes, H hidden size, V vocabulary.


class Decoding:
    """Texts while they are being decoded together. To the drafter it is the `Context` of heads/drafter.py.

    Texts leave `texts` when they end, and with them their rows in every cache.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy | None,
        texts: Sequence[Text],
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

    def reader(self, model: nn.Module, *, padded: bool = True) -> Reader:
        sources = [text.source for text in self.texts]
        return Reader(model, len(self.texts), sources, widths=self._widths if padded else None)

    def prefill(self) -> list[tuple[Text, list[int]]]:
        """Read the prompts and commit the first token of each: every text with its new tokens."""
        layers = () if self._drafter is None else self._drafter.needs.layers
        logits_BV = self._target.prefill(self.texts, layers)
        if self._drafter is not None and self._drafter.vocab_size not in (None, logits_BV.shape[1]):
            self._shared = (self._drafter.shared_vocabulary, logits_BV.shape[1])
        new = []
        verdicts = self._verdicts([logits_V[None] for logits_V in logits_BV], [Draft() for _ in self.texts])
        for row, (text, verdict) in enumerate(zip(self.texts, verdicts, strict=True)):
            text.hidden = self._target.hidden(row, ROOT)
            text.add_features(self._target.features(row))
            new.append((text, text.commit([verdict.next_token])))
        self._finish(started=False)
        if self._drafter is not None and self.texts:
            self._drafter.start(self)
        return new

    def round(self) -> list[tuple[Text, list[int], Round]]:
        """Propose, verify and commit once: every running text with its new tokens and the round's record."""
        hidden = self.texts[0].hidden
        device = None if hidden is None else hidden.device
        started = now(device)
        drafts = [Draft() for _ in self.texts]
        if self._drafter is not None:
            growths = [Growth(text, self._room(text), self._processors, self._shared) for text in self.texts]
            drafts = propose(self._drafter, [text.policy for text in self.texts], growths)
        drafted = now(device)
        logits = self._target.verify([text.tokens[-1] for text in self.texts], drafts)
        verdicts = self._verdicts(logits, drafts)
        verified = now(device)
        new = []
        for row, (text, draft, verdict) in enumerate(zip(self.texts, drafts, verdicts, strict=True)):
            text.hidden = self._target.hidden(row, verdict.path[-1] if verdict.path else ROOT)
            text.add_features(self._target.features(row, list(verdict.path)))
            new.append(text.commit([*(draft.tokens[node] for node in verdict.path), verdict.next_token]))
        self._target.commit([list(verdict.path) for verdict in verdicts])
        if self._drafter is not None:
            self._observe(growths, drafts, verdicts)
        ended = now(device)
        out = []
        for text, draft, verdict, tokens in zip(self.texts, drafts, verdicts, new, strict=True):
            record = Round(
                drafted=len(draft),
                depth=draft.depth,
                accepted=verdict.accepted,
                committed=len(tokens),
                overlap=verdict.overlap,
                draft_seconds=drafted - started,
                verify_seconds=verified - drafted,
                seconds=ended - started,
            )
            text.rounds.append(record)
            out.append((text, tokens, record))
        self._finish()
        return out

    def _observe(self, growths: list[Growth], drafts: list[Draft], verdicts: list[Verdict]) -> None:
        """Tell the drafter what was kept of its own nodes, and the policy what became of its drafts."""
        paths = []
        for text, growth, draft, verdict in zip(self.texts, growths, drafts, verdicts, strict=True):
            retrieved = len(draft) > 0 and not growth.tokens
            paths.append([] if retrieved else growth.origin(verdict.path))
            if text.policy is not None and not retrieved:
                text.policy.observe(growth, draft, verdict)
        self._drafter.observe(paths)

    def _room(self, text: Text) -> int:
        """The deepest draft that the text and the drafter's context allow."""
        room = text.room
        if self._drafter.context_limit is not None:
            room = min(room, self._drafter.context_limit - len(text.tokens))
        return room

    def _verdicts(self, logits: list[Tensor], drafts: list[Draft]) -> list[Verdict]:
        """What the rule decides for each text. `logits`: [N + 1, V] each."""
        processors = self._processors
        process = processors.tokens if processors.greedy else processors.probabilities
        if len(logits) > 1 and not processors.read_text:
            # One call for all texts: nothing that is applied looks at what stands before a token.
            processed = process(torch.cat(logits), list)
            sizes = [len(rows) for rows in logits]
            starts = [sum(sizes[:row]) for row in range(len(sizes))]
            parts = [processed[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        else:
            parts = []
            for text, rows, draft in zip(self.texts, logits, drafts, strict=True):
                parts.append(process(rows, partial(_contexts, text, draft), text.number))
        if processors.greedy:
            return [verify_greedy(tokens, draft) for tokens, draft in zip(parts, drafts, strict=True)]
        return [
            verify(self._rule, p_PV, draft, text.chance)
            for text, p_PV, draft in zip(self.texts, parts, drafts, strict=True)
        ]

    def _finish(self, *, started: bool = True) -> None:
        """Drop the rows of texts that have ended; the drafter's too, once it has `started`."""
        running = [row for row, text in enumerate(self.texts) if text.stopped_by is None]
        if len(running) == len(self.texts):
            return
        self.texts = [self.texts[row] for row in running]
        if not running:
            return
        self._target.drop(running)
        if started and self._drafter is not None:
            self._drafter.drop(running)


def _contexts(text: Text, draft: Draft) -> list[list[int]]:
    """What stands before the token behind the root and behind each node, as processors see it."""
    shown = text.padding + text.tokens
    return [shown, *(shown + [draft.tokens[i] for i in draft.path(node)] for node in range(len(draft)))]


def now(device: torch.device | None) -> float:
    """Seconds; on an accelerator, after the work queued so far is done."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
