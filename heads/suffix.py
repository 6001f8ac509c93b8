"""A suffix automaton over a growing text: the longest end of the text that has occurred before, at once.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; each token costs amortised O(1).
"""

from collections.abc import Iterable


class SuffixAutomaton:
    """Every substring of the text so far is a path from state 0; a state stands for substrings with the same ends."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        """The state of the longest suffix of this state's substrings that also ends elsewhere."""
        self._longest = [0]
        self._end = [0]
        """Tokens up to and including the end at which this state was made, or matched last."""
        self._last = 0
        """The state of the whole text. Its link is the longest suffix that ends earlier too."""
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
                self._end[matched] = len(self._text)  # the next time, this is the most recent end

    def match(self) -> tuple[int, int]:
        """(length of the longest suffix that also ended earlier, how many tokens stand up to that end); (0, 0) if none.

        Of several earlier ends it is the last at which this very match was found, otherwise the first.
        """
        return self._longest[max(self._link[self._last], 0)], self._match_end

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the match; past the text's end it repeats, as a copy of itself would."""
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
        """The state behind `state` by `token` that holds no longer substrings; made from the present one if need be."""
        behind = self._next[state][token]
        if self._longest[behind] == self._longest[state] + 1:
            return behind
        clone = self._add(dict(self._next[behind]), self._longest[state] + 1, self._end[behind])
        self._link[clone] = self._link[behind]
        self._link[behind] = clone
        while state != -1 and self._next[state].get(token) == behind:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, transitions: dict[int, int], longest: int, end: int) -> int:
        self._next.append(transitions)
        self._longest.append(longest)
        self._end.append(end)
        self._link.append(-1)
        return len(self._next) - 1
