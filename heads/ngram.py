"""Drafters without training: they propose the tokens that followed an earlier match, in the text or in a corpus.

    ... the cat sat on the | mat and slept ...        earlier in the text, or in the datastore
                         ... on the |                 end of the text: proposes "mat and slept"

Their tokens are not drawn from a distribution q; the point-mass rule verifies them exactly. Prompt lookup: Saxena 2023;
suffix
automata for drafting: Hu et al. 2024 (SAM decoding), arXiv:2411.10666; a datastore: He et al. 2023 (REST),
arXiv:2311.08252.
"""

import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from draftsmith.errors import ConfigError
from draftsmith.heads.base import Context, DraftedChain, Drafter, Level, WantedChain
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.suffix import Datastore, SuffixAutomaton

SEPARATOR = -1
"""Separates the source of an encoder from the decoder's tokens; no token has this id."""


class Index(Protocol):
    """Index of one text that finds earlier occurrences of its end."""

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        ...

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return (length of the match, up to `count` tokens that followed it); (0, []) without a match."""
        ...


class NgramIndex:
    """Index of the last end of each n-gram of up to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._text.append(token)
            end = len(self._text)
            for size in range(1, min(self._longest, end) + 1):
                gram = tuple(self._text[end - size :])
                if gram in self._ends:
                    self._before[gram] = self._ends[gram]
                self._ends[gram] = end

    def propose(self, count: int) -> tuple[int, list[int]]:
        for size in range(min(self._longest, len(self._text) - 1), 0, -1):
            # The last occurrence is the end of the text itself; the one before it has a continuation.
            end = self._before.get(tuple(self._text[-size:]))
            if end is not None:
                return size, self._text[end : end + count]
        return 0, []


class SuffixIndex:
    """Index for the longest match of any length: a suffix automaton of the text and a datastore of a corpus."""

    def __init__(self, datastore: Datastore | None = None) -> None:
        self._automaton = SuffixAutomaton()
        self._datastore = datastore
        self._tail: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        self._automaton.extend(tokens)
        self._tail = [*self._tail, *tokens][-16:]

    def propose(self, count: int) -> tuple[int, list[int]]:
        length = self._automaton.match()[0]
        if self._datastore is not None:
            # Ties go to the text itself, whose repetitions are more likely to continue than those of a corpus.
            matched, continuation = self._datastore.lookup(self._tail, count, min_match=length + 1)
            if matched > length:
                return matched, continuation
        return (length, self._automaton.continuation(count)) if length else (0, [])


class Retrieval(Drafter):
    """Proposes the continuation of a match in an index of the text; longer matches propose more tokens.

    Args:
        draft_length: maximum number of draft tokens per round.
        min_match: minimum length of a match; shorter matches propose nothing.
        factor: draft tokens per token of the match.
    """

    only_retrieves = True

    def __init__(self, *, draft_length: int = 10, min_match: int = 1, factor: float = 2.0) -> None:
        super().__init__()
        for key, value in {"draft_length": draft_length, "min_match": min_match}.items():
            if value < 1:
                raise ConfigError.of(key, value, ">= 1")
        if not factor > 0:
            raise ConfigError.of("factor", factor, "a number above 0")
        self.max_draft_length = self._draft_length = draft_length
        self.min_match, self.factor = min_match, factor

    def index(self) -> Index:
        """Return an empty index for a new text."""
        raise NotImplementedError

    def start(self, context: Context) -> None:
        super().start(context)
        self._indexes, self._read = [], []
        for text in context.texts:
            index = self.index()
            if text.source:
                index.extend([*text.source, SEPARATOR])
            self._indexes.append(index)
            self._read.append(0)

    def retrieve(self, row: int, room: int) -> Draft:
        return self.matched(row, room)[1]

    def matched(self, row: int, room: int) -> tuple[int, Draft]:
        """Return the length of the match and the draft, which is empty when the match is too short."""
        text, index = self.context.texts[row], self._indexes[row]
        index.extend(text.tokens[self._read[row] :])
        self._read[row] = len(text.tokens)
        length, tokens = index.propose(min(room, self._draft_length))
        if length < self.min_match:
            return length, Draft()
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return length, Draft.chain(tokens[: max(1, round(self.factor * length))])

    def drop(self, rows: list[int]) -> None:
        self._indexes, self._read = [self._indexes[row] for row in rows], [self._read[row] for row in rows]


class PromptLookup(Retrieval):
    """Prompt lookup: matches the most recent earlier occurrence of the last `max_ngram` tokens or fewer."""

    type: ClassVar[str] = "prompt-lookup"

    def __init__(self, *, max_ngram: int = 3, draft_length: int = 10, min_match: int = 1, factor: float = 4.0) -> None:
        if max_ngram < 1:
            raise ConfigError.of("max_ngram", max_ngram, ">= 1")
        super().__init__(draft_length=draft_length, min_match=min_match, factor=factor)
        self.max_ngram = max_ngram

    def index(self) -> NgramIndex:
        return NgramIndex(self.max_ngram)


class SuffixRetrieval(Retrieval):
    """Matches the longest earlier occurrence of any length, or of the corpus in `datastore` when that is longer."""

    type: ClassVar[str] = "suffix"

    def __init__(
        self,
        *,
        datastore: Datastore | str | Path | None = None,
        draft_length: int = 32,
        min_match: int = 2,
        factor: float = 2.0,
    ) -> None:
        super().__init__(draft_length=draft_length, min_match=min_match, factor=factor)
        if isinstance(datastore, (str, Path)):
            datastore = Datastore.load(Path(os.path.expanduser(datastore)))
        self.datastore = datastore

    def index(self) -> SuffixIndex:
        return SuffixIndex(self.datastore)


class Hybrid(Drafter):
    """Proposes the retrieved draft when at least `min_match` tokens match, otherwise the trained drafter's draft.

    A long match is likely to continue and costs no model pass. The drafter reads the skipped tokens at its next call.
    """

    type: ClassVar[str] = "hybrid"

    def __init__(self, drafter: Drafter, retrieval: Retrieval | None = None, *, min_match: int = 4) -> None:
        super().__init__()
        if min_match < 1:
            raise ConfigError.of("min_match", min_match, ">= 1")
        self.drafter, self.retrieval, self.min_match = drafter, retrieval or SuffixRetrieval(), min_match
        self.vocab_size, self.shared_vocabulary = drafter.vocab_size, drafter.shared_vocabulary
        self.context_limit, self.draft_length_hint = drafter.context_limit, drafter.draft_length_hint
        self.max_draft_length, self.target_quality = drafter.max_draft_length, drafter.target_quality
        self.model = getattr(drafter, "model", None)
        self.needs = drafter.needs

    def start(self, context: Context) -> None:
        super().start(context)
        self.retrieval.start(context)
        self.drafter.start(context)

    def retrieve(self, row: int, room: int) -> Draft | None:
        length, draft = self.retrieval.matched(row, room)
        return draft if length >= self.min_match and len(draft) else self.drafter.retrieve(row, room)

    def begin(self, rows: list[int]) -> Tensor:
        return self.drafter.begin(rows)

    def extend(self, level: Level) -> Tensor:
        return self.drafter.extend(level)

    def chain_logits(self, length: int) -> Tensor | None:
        return self.drafter.chain_logits(length)

    def chain(self, logits_BV: Tensor, wanted: WantedChain) -> DraftedChain | None:
        return self.drafter.chain(logits_BV, wanted)

    def confidences(self) -> Tensor | None:
        return self.drafter.confidences()

    def rollback(self, slots: Sequence[list[int]]) -> None:
        self.drafter.rollback(slots)

    def drop(self, rows: list[int]) -> None:
        self.retrieval.drop(rows)
        self.drafter.drop(rows)
