"""Whether acceptance has fallen since learning paused, by more than texts differ from each other."""

from collections import deque
from collections.abc import Iterable
from math import sqrt

import numpy as np

TEXTS = 32
"""Texts that each comparison needs on both sides; every text is compared once."""
MEMORY = 128
"""Most recent texts before the pause with which those after it are compared."""
FALL = 0.9
"""Share of the acceptance length before the pause below which learning continues."""
CERTAIN = 3.5
"""Standard errors by which it has to have fallen: about one comparison in 4,000 of equal texts, with a normal error."""


class Watch:
    """Committed tokens and rounds of the decoded texts, before and since a pause."""

    def __init__(self) -> None:
        self._before: list[tuple[int, int]] = []
        self._recent: deque[tuple[int, int]] = deque(maxlen=MEMORY)
        self._new = 0

    def add(self, tokens: int, rounds: int) -> None:
        """Add a text that has ended; rounds of one text are alike, so texts are compared and not rounds."""
        if rounds:
            self._recent.append((tokens, rounds))
            self._new += 1

    def pause(self) -> None:
        """Take the texts so far for those before the pause."""
        self._before, self._new = list(self._recent), 0
        self._recent.clear()

    def fallen(self) -> bool:
        """Return whether the last `TEXTS` texts, if none of them was compared before, commit clearly fewer tokens."""
        if self._new < TEXTS or len(self._before) < TEXTS:
            return False
        self._new = 0
        before, before_error = _mean(self._before)
        after, error = _mean(list(self._recent)[-TEXTS:])
        return after < FALL * before and after - before < -CERTAIN * sqrt(error**2 + before_error**2)


def _mean(texts: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Return tokens per round over all texts, and its standard error over texts: that of a ratio of two sums."""
    tokens, rounds = np.array(list(texts), dtype=float).T
    mean = tokens.sum() / rounds.sum()
    squares = ((tokens - mean * rounds) ** 2).sum() * len(tokens) / (len(tokens) - 1)
    return float(mean), float(np.sqrt(squares) / rounds.sum())
