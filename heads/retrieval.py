"""Drafters without training: they propose the tokens that followed an earlier match in the text.

    ... the cat sat on the | mat and slept ...        earlier in the text
                         ... on the |                 end of the text: proposes "mat and slept"

Their tokens are not drawn from a distribution q; the point-mass rule verifies them exactly. Prompt lookup: Saxena 2023.
Suffix automata for drafting: Hu et al. 2024 (SAM decoding), arXiv:2411.10666. `SuffixAutomaton` finds the longest
suffix of the text that occurred before, in amortised O(1) per token: Blumer et al. 1985, "The smallest automaton
recognizing the subwords of a text".
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import Tensor

from draftsmith.errors import ConfigError
from draftsmith.heads.base import Context, Drafter, Level
from draftsmith.heads.draft_tree import Draft

SEPARATOR = -1
"""Ends the source of an encoder; no token has this id."""


class NgramIndex:
    """The last two ends of each n-gram of up to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}
        """For each n-gram, the number of tokens up to its last end and up to the one before it, or 0."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._tokens.append(token)
            for size in range(1, min(self._longest, len(self._tokens)) + 1):
                ngram = tuple(self._tokens[-size:])
                self._ends[ngram] = len(self._tokens), self._ends.get(ngram, (0, 0))[0]

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return (length of the match, up to `count` tokens that followed it); (0, []) without a match."""
        for size in range(min(self._longest, len(self._tokens)), 0, -1):
            _, end = self._ends[tuple(self._tokens[-size:])]
            if end:
                return size, self._tokens[end : end + count]
        return 0, []


class SuffixAutomaton:
    """Automaton in which every substring of the text is a path from state 0; a state is a set of substrings with equal
    end positions."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        """For each state, the state of the longest suffix of its substrings that also ends elsewhere."""
        self._longest = [0]
        self._end = [0]
        """For each state, the number of tokens up to the end at which it was created or matched last."""
        self._last = 0
        """The state of the whole text. Its link is the longest suffix that also ends earlier."""
        self._match_end = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)
            matched = self._link[self._last]
            self._match_end = self._end[matched]
            if matched:
                self._end[matched] = len(self._text)  # most recent end for the next match

    def match(self) -> tuple[int, int]:
        """Return (length of the longest suffix that also ended earlier, number of tokens up to that end), or (0, 0).

        Of several earlier ends it is the last at which the same match was returned, otherwise the first.
        """
        return self._longest[max(self._link[self._last], 0)], self._match_end

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return (length of the match, `count` tokens that followed it); at the end of the text they repeat."""
        length, end = self.match()
        if not length:
            return 0, []
        period = len(self._text) - end
        return length, [self._text[end + step % period] for step in range(count)]

    def _append(self, token: int) -> None:
        self._text.append(token)
        new = self._add({}, self._longest[self._last] + 1, len(self._text))
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = 0
        else:
            self._link[new] = self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """Return the state after `state` and `token` without longer substrings, which may be split from another."""
        target = self._next[state][token]
        if self._longest[target] == self._longest[state] + 1:
            return target
        clone = self._add(dict(self._next[target]), self._longest[state] + 1, self._end[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, transitions: dict[int, int], longest: int, end: int) -> int:
        self._next.append(transitions)
        self._longest.append(longest)
        self._end.append(end)
        self._link.append(-1)
        return len(self._next) - 1


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

    def index(self) -> NgramIndex | SuffixAutomaton:
        """Return an empty index for a new sequence."""
        raise NotImplementedError

    def start(self, context: Context) -> None:
        super().start(context)
        self._indexes, self._read = [], []
        for sequence in context.sequences:
            index = self.index()
            if sequence.source:
                index.extend([*sequence.source, SEPARATOR])
            self._indexes.append(index)
            self._read.append(0)

    def retrieve(self, row: int, room: int) -> Draft:
        return self.matched(row, room)[1]

    def matched(self, row: int, room: int) -> tuple[int, Draft]:
        """Return the length of the match and the draft, which is empty when the match is too short."""
        sequence, index = self.context.sequences[row], self._indexes[row]
        index.extend(sequence.tokens[self._read[row] :])
        self._read[row] = len(sequence.tokens)
        length, tokens = index.propose(min(room, self._draft_length))
        if length < self.min_match:
            return length, Draft()
        most = self.shared_vocabulary
        ends = (n for n, token in enumerate(tokens) if token == SEPARATOR or (most is not None and token >= most))
        tokens = tokens[: next(ends, len(tokens))]
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
    """Matches the longest earlier occurrence of any length."""

    type: ClassVar[str] = "suffix"

    def __init__(self, *, draft_length: int = 32, min_match: int = 2, factor: float = 2.0) -> None:
        super().__init__(draft_length=draft_length, min_match=min_match, factor=factor)

    def index(self) -> SuffixAutomaton:
        return SuffixAutomaton()


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

    def limit_vocabulary(self, tokens: int) -> None:
        super().limit_vocabulary(tokens)
        self.retrieval.limit_vocabulary(tokens)

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

    def confidences(self) -> Tensor | None:
        return self.drafter.confidences()

    def rollback(self, slots: Sequence[list[int]]) -> None:
        self.drafter.rollback(slots)

    def drop(self, rows: list[int]) -> None:
        self.retrieval.drop(rows)
        self.drafter.drop(rows)
