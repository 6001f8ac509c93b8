"""Drafters without training: they propose the tokens that followed an earlier match, in the text or in a corpus.

    ... the cat sat on the | mat and slept ...        earlier in the text, or in the datastore
                         ... on the |                 end of the text: proposes "mat and slept"

Their tokens are not drawn from a distribution q; the point-mass rule verifies them exactly. Prompt lookup: Saxena 2023;
suffix automata for drafting: Hu et al. 2024 (SAM decoding), arXiv:2411.10666; a datastore: He et al. 2023 (REST),
arXiv:2311.08252.

`SuffixAutomaton` finds the longest suffix of the text that occurred before, in amortised O(1) per token: Blumer et al.
1985, "The smallest automaton recognizing the subwords of a text". `Datastore` finds a text's suffix in a corpus and
its most frequent continuation: Manber & Myers 1990, by prefix doubling.
"""

import os.path
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import Context, Drafter, Level
from draftsmith.heads.draft_tree import Draft

SEPARATOR = -1
"""Ends the source of an encoder and each document of a corpus; no token has this id, and no match crosses it."""
FORMAT = "1"
LOOKED_AT = 512
"""Occurrences that are counted for the most frequent next token; of more, an evenly spaced sample."""

# Shapes: N tokens of the corpus, separators included.


class NgramIndex:
    """Index of the last end of each n-gram of up to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.append(token)
            end = len(self._text)
            for size in range(1, min(self._longest, end) + 1):
                gram = tuple(self._text[end - size :])
                if gram in self._ends:
                    self._before[gram] = self._ends[gram]
                self._ends[gram] = end

    def propose(self, count: int) -> tuple[int, list[int]]:
        """Return (length of the match, up to `count` tokens that followed it); (0, []) without a match."""
        for size in range(min(self._longest, len(self._text) - 1), 0, -1):
            # The last occurrence is the end of the text itself; the one before it has a continuation.
            end = self._before.get(tuple(self._text[-size:]))
            if end is not None:
                return size, self._text[end : end + count]
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


class Datastore:
    """A corpus and its suffix array, both int32 [N]. Created by `build` or `load`."""

    def __init__(self, tokens_N: np.ndarray, suffixes_N: np.ndarray) -> None:
        self._tokens, self._suffixes = tokens_N, suffixes_N

    def __len__(self) -> int:
        return len(self._tokens)

    @classmethod
    def build(cls, documents: Iterable[list[int]]) -> Self:
        """Build the suffix array of the documents."""
        parts = [np.asarray([*document, SEPARATOR], np.int32) for document in documents]
        tokens_N = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return cls(tokens_N, _suffix_array(tokens_N))

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        save_file({"tokens": self._tokens, "suffixes": self._suffixes}, path, metadata={"draftsmith_datastore": FORMAT})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a saved datastore; raise ConfigError for a missing or damaged file, or one of another format."""
        try:
            with safe_open(path, "np") as file:
                if (file.metadata() or {}).get("draftsmith_datastore") != FORMAT:
                    raise ConfigError(f"datastore={path} is no datastore; expected a file written by `Datastore.save`")
                tokens_N, suffixes_N = file.get_tensor("tokens"), file.get_tensor("suffixes")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"datastore={path} cannot be read ({reason_of(error)}); expected a whole file") from error
        return cls(tokens_N, suffixes_N)

    def lookup(
        self, context: list[int], count: int, *, max_match: int = 16, min_match: int = 1
    ) -> tuple[int, list[int]]:
        """Find the longest suffix of `context` in the corpus: (its length, up to `count` tokens of its continuation).

        Each token of the continuation is the most frequent one among the occurrences that agree so far. (0, []) when
        no suffix of at least `min_match` tokens occurs with a continuation.
        """
        # A suffix occurs only where its own suffixes do, so bisection on the length finds the longest.
        low, high, best = min_match, min(max_match, len(context)), (0, 0, 0)
        while low <= high:
            middle = (low + high) // 2
            start, end = self._interval(context[-middle:])
            if start < end:
                best, low = (middle, start, end), middle + 1
            else:
                high = middle - 1
        length, start, end = best
        tokens: list[int] = []
        while length and len(tokens) < count:
            token = self._most_frequent(start, end, length + len(tokens))
            if token is None:
                break
            tokens.append(token)
            start, end = self._narrowed(start, end, length + len(tokens) - 1, token)
        return (length, tokens) if tokens else (0, [])

    def _interval(self, pattern: list[int]) -> tuple[int, int]:
        """Return the interval of the suffix array whose suffixes begin with `pattern`."""
        size = len(pattern)

        def prefix(suffix: int) -> list[int]:
            return self._tokens[suffix : suffix + size].tolist()

        return bisect_left(self._suffixes, pattern, key=prefix), bisect_right(self._suffixes, pattern, key=prefix)

    def _next(self, suffix: int, offset: int) -> int:
        """Return the token at `offset` of a suffix."""
        place = suffix + offset
        return int(self._tokens[place]) if place < len(self._tokens) else SEPARATOR

    def _most_frequent(self, start: int, end: int, offset: int) -> int | None:
        """Return the most frequent token at `offset` of the suffixes; None where all of them end there."""
        step = max(1, (end - start) // LOOKED_AT)
        places = self._suffixes[start:end:step].astype(np.int64) + offset
        tokens = self._tokens[np.minimum(places, len(self._tokens) - 1)]
        values, counts = np.unique(tokens[tokens != SEPARATOR], return_counts=True)
        return int(values[counts.argmax()]) if len(values) else None

    def _narrowed(self, start: int, end: int, offset: int, token: int) -> tuple[int, int]:
        """Return the part of an interval whose suffixes have `token` at `offset`."""

        def following(suffix: int) -> int:
            return self._next(suffix, offset)

        return (
            bisect_left(self._suffixes, token, start, end, key=following),
            bisect_right(self._suffixes, token, start, end, key=following),
        )


def _suffix_array(tokens_N: np.ndarray) -> np.ndarray:
    """Return the start of every suffix in sorted order, int32 [N], from ranks by the first 1, 2, 4, … tokens."""
    N = len(tokens_N)
    if N == 0:
        return np.empty(0, np.int32)
    rank_N = np.unique(tokens_N, return_inverse=True)[1].astype(np.int64) + 1
    width = 1
    while True:
        second_N = np.zeros(N, np.int64)
        second_N[:-width] = rank_N[width:]
        key_N = rank_N * (N + 1) + second_N
        order_N = np.argsort(key_N, kind="stable")
        sorted_N = key_N[order_N]
        new_N = np.empty(N, np.int64)
        new_N[order_N] = np.cumsum(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))
        rank_N, width = new_N, 2 * width
        if rank_N.max() == N or width >= N:
            return order_N.astype(np.int32)


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
        length, tokens = self.found(index, text.tokens, min(room, self._draft_length))
        if length < self.min_match:
            return length, Draft()
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return length, Draft.chain(tokens[: max(1, round(self.factor * length))])

    def found(self, index: NgramIndex | SuffixAutomaton, tokens: list[int], count: int) -> tuple[int, list[int]]:
        """Return (length of the match, up to `count` tokens that followed it) for a text that `index` has read."""
        return index.propose(count)

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

    def index(self) -> SuffixAutomaton:
        return SuffixAutomaton()

    def found(self, index: NgramIndex | SuffixAutomaton, tokens: list[int], count: int) -> tuple[int, list[int]]:
        length, continuation = super().found(index, tokens, count)
        if self.datastore is None:
            return length, continuation
        # Ties go to the text itself, whose repetitions are more likely to continue than those of a corpus.
        matched = self.datastore.lookup(tokens, count, min_match=length + 1)
        return matched if matched[0] > length else (length, continuation)


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

    def confidences(self) -> Tensor | None:
        return self.drafter.confidences()

    def rollback(self, slots: Sequence[list[int]]) -> None:
        self.drafter.rollback(slots)

    def drop(self, rows: list[int]) -> None:
        self.retrieval.drop(rows)
        self.drafter.drop(rows)
