"""Which token followed the last tokens of earlier texts: a table of bounded memory that learns from what was decoded.

    "... and they lived" ──▶ hashes of the last 2, 3, 5, ... tokens ──▶ one entry each: the next token, and a score
                             the entry whose length and score have been right most often ──▶ "happily", "ever", ...

Tables by several lengths of history, entries with a tag and a score that falls before an entry is replaced: the branch
predictor TAGE (Seznec and Michaud 2006). Drafting from earlier responses: SuffixDecoding (Oliaro et al. 2024,
arXiv:2411.04975), with suffix trees.
"""

from array import array
from collections.abc import Sequence

HISTORIES = (2, 3, 5, 8, 12)
"""Lengths of the contexts, in tokens. With 1, 2, 3, 4, 6, 8, 12 and 16, as many tokens were accepted."""
LONGEST = HISTORIES[-1]
"""Tokens before a position that are read."""
MOST = 16
"""Tokens of a draft at most."""
LEAST = 0.3
"""A draft ends before the probability that all of it is accepted falls below this."""
SCORES = 15
"""Largest score of an entry: so often it has been right since it was last wrong."""
RECENT = 1000
"""Predictions at one length and score after which earlier ones count half."""
SCORE_BITS, TAG_BITS = 4, 24
TAGGED = SCORE_BITS + TAG_BITS
TAGS = (1 << TAG_BITS) - 1
"""An entry is the token, the tag and the score, from the highest bit to the lowest; 0 is an empty one."""


class NgramMemory:
    """Predicts the next token from the last ones, and how likely it is right.

    Args:
        slots: entries of 8 bytes. Each decoded token changes up to one entry for each length of history; new entries
            replace old ones whose score has fallen, so memory does not grow.
    """

    def __init__(self, slots: int = 2**20) -> None:
        self._slots = array("Q", bytes(8 * slots))
        self._counts = [[[0.5, 1.5] for _ in range(SCORES + 1)] for _ in HISTORIES]
        """By length of history and score: predictions that were right, and all of them."""

    @property
    def bytes(self) -> int:
        """Memory of the table."""
        return self._slots.itemsize * len(self._slots)

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Learn the tokens of a text from position `start` on; those before it are their context."""
        slots = self._slots
        for position in range(start, len(tokens)):
            token = tokens[position]
            for length, counts in zip(HISTORIES, self._counts, strict=True):
                if length > position:
                    break
                rest, place = divmod(hash(tuple(tokens[position - length : position])), len(slots))
                slots[place] = _learned(slots[place], rest & TAGS, token, counts)

    def propose(self, tokens: Sequence[int], room: int) -> tuple[list[int], float]:
        """Return at most `room` tokens that are likely to follow, and how many of them are expected to be accepted."""
        text = list(tokens[-LONGEST:])
        known, together, expected = len(text), 1.0, 0.0
        while len(text) - known < min(room, MOST):
            token, probability = self._predicted(text)
            together *= probability
            if together < LEAST:
                break
            expected += together
            text.append(token)
        return text[known:], expected

    def _predicted(self, text: Sequence[int]) -> tuple[int, float]:
        """Return the token that most likely follows, and the probability that it does; 0 without a prediction."""
        slots, best, likely = self._slots, 0, 0.0
        for length, counts in zip(HISTORIES, self._counts, strict=True):
            if length > len(text):
                break
            rest, place = divmod(hash(tuple(text[-length:])), len(slots))
            entry = slots[place]
            if entry and entry >> SCORE_BITS & TAGS == rest & TAGS:
                right, predictions = counts[entry & SCORES]
                if right >= likely * predictions:
                    best, likely = entry >> TAGGED, right / predictions
        return best, likely


def _learned(entry: int, tag: int, token: int, counts: list[list[float]]) -> int:
    """Return the entry after this token followed its context, and count whether the entry was right.

    `counts`: by score, predictions that were right and all of them, at this length of the context.
    """
    score = entry & SCORES
    if score and entry >> SCORE_BITS & TAGS == tag:
        right, of_score = entry >> TAGGED == token, counts[score]
        of_score[0] += right
        of_score[1] += 1
        if of_score[1] > RECENT:
            counts[score] = [of_score[0] / 2, of_score[1] / 2]
        if right:
            return entry + (score < SCORES)
        lowered = score // 2
    else:
        lowered = score - 1
    if lowered > 0:
        return entry - score + lowered
    return token << TAGGED | tag << SCORE_BITS | 1
