"""Suffix automaton of a growing text, and suffix array of a corpus, for drafting from earlier occurrences.

`SuffixAutomaton` finds the longest suffix of the text that occurred before, in amortised O(1) per token: Blumer et al.
1985, "The smallest automaton recognizing the subwords of a text". `Datastore` finds a text's suffix in a corpus and
its most frequent continuation: Manber & Myers 1990, by prefix doubling; for drafting: REST, He et al. 2023,
arXiv:2311.08252.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftsmith.errors import ConfigError, reason_of

SEPARATOR = -1
"""Marks the end of each document; no match or continuation crosses it."""
FORMAT = "1"
LOOKED_AT = 512
"""Occurrences that are counted for the most frequent next token; of more, an evenly spaced sample."""

# Shapes: N tokens of the corpus, separators included.


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

    def __len__(self) -> int:
        return len(self._text)

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

    def continuation(self, count: int) -> list[int]:
        """Return `count` tokens that followed the match; at the end of the text they repeat periodically."""
        if self._match_end == 0:
            return []
        period = len(self._text) - self._match_end
        return [self._text[self._match_end + step % period] for step in range(count)]

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
