"""Retrieval with a memory of earlier texts: it drafts from them where such drafts have been accepted more often.

The memory is a table of bounded size that learns from what was decoded which token followed the last ones:

    "... and they lived" ──▶ hashes of the last 2, 3, 5, ... tokens ──▶ one entry each: the next token, and a score
                             the entry whose length and score have been right most often ──▶ "happily", "ever", ...

Tables by several lengths of history, entries with a tag and a score that falls before an entry is replaced: the branch
predictor TAGE (Seznec and Michaud 2006). Drafting from earlier responses: SuffixDecoding (Oliaro et al. 2024,
arXiv:2411.04975), with suffix trees.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from draftsmith.heads.base import Context, Drafter, SequenceState
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.retrieval import Hybrid, Retrieval

PRIOR = 4.0
"""Rounds that an expectation counts for beside those that were seen."""
TRUST = 0.5
"""Of the tokens that the memory expects to be accepted before any round has shown it."""
EXPLORED = 64
"""Rounds with a known draft after which the other one is tried once in the same situation."""
PROMPT = 512
"""Tokens at the end of a prompt that the memory reads, too: about 3 ms."""
RECENT_ROUNDS = 200.0
"""Rounds of one situation, or of the drafter, after which earlier ones count half."""


@dataclass
class Accepted:
    """Accepted tokens and rounds, of which older ones count less."""

    tokens: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int) -> None:
        """Add a round."""
        self.tokens, self.rounds = self.tokens + tokens, self.rounds + 1

    def halve(self) -> None:
        """Let later rounds count more."""
        self.tokens, self.rounds = self.tokens / 2, self.rounds / 2

    def mean(self, expected: float) -> float:
        """Return the accepted tokens a round, with an expectation that counts for `PRIOR` rounds."""
        return (self.tokens + PRIOR * expected) / (self.rounds + PRIOR)


@dataclass
class Situation:
    """Rounds in which a draft was known and another one could be proposed instead."""

    known: Accepted = field(default_factory=Accepted)
    """Also rounds with the other draft: the known tokens are compared with the committed ones."""
    other: Accepted = field(default_factory=Accepted)

    def prefers_known(self, expected: float, usual: float) -> bool:
        """Return whether to propose the known draft, of which `expected` tokens are accepted, `usual` of the other."""
        if self.other.rounds * EXPLORED < self.known.rounds - PRIOR:
            return False
        return self.known.mean(expected) >= self.other.mean(usual)

    def count(self, known: int, other: int | None) -> None:
        """Add a round; `other` is None where the other draft was not proposed."""
        self.known.add(known)
        if other is not None:
            self.other.add(other)
        if self.known.rounds > RECENT_ROUNDS:
            self.known.halve()
            self.other.halve()


@dataclass
class RememberedText:
    """A text and its last round."""

    text: SequenceState
    read: int
    """Tokens that the memory has read."""
    choices: list[tuple[Situation, tuple[int, ...], Draft | None]] | None = None
    """Decisions of the last round: the situation, the known draft, and the other one, None for that of the drafter.

    None before the first round."""
    proposed: Draft | None = None
    """None where the drafter drafted."""


class NoDrafter(Drafter):
    """Stands for the trained drafter where there is none: its drafts are empty."""

    type: ClassVar[str] = "none"
    only_retrieves = True

    def retrieve(self, row: int, room: int) -> Draft:
        return Draft()


class Recall(Hybrid):
    """A hybrid with a memory of all texts that it has decoded, and of the ends of their prompts.

    The memory reads committed tokens between rounds, and a draft is fixed before it is verified, so decoding stays
    lossless. Which draft a round proposes is decided by counts of accepted tokens in similar situations.

    Args:
        drafter: drafts where neither the text nor the memory has a better draft; None: such rounds have no draft.
        retrieval, min_match: as for `Hybrid`.
    """

    type: ClassVar[str] = "recall"

    def __init__(
        self, drafter: Drafter | None = None, retrieval: Retrieval | None = None, *, min_match: int = 4
    ) -> None:
        super().__init__(drafter or NoDrafter(), retrieval, min_match=min_match)
        self.only_retrieves = self.drafter.only_retrieves
        if self.only_retrieves:
            self.max_draft_length = self.retrieval.max_draft_length
        self.recalled = self.drafted = 0
        """Rounds with a draft from memory, and rounds that were left to the drafter."""
        self.forget()

    def forget(self) -> None:
        """Discard the memory of earlier texts and of what was accepted."""
        self.memory = NgramMemory()
        self._situations: dict[tuple[int, int], Situation] = {}
        self._drafter = Accepted()
        self._rows: list[RememberedText] = []

    def start(self, context: Context) -> None:
        for row in self._rows:
            self._learn(row)  # what was committed in the last round of earlier texts
        super().start(context)
        self._rows = [RememberedText(text, max(0, len(text.tokens) - 1 - PROMPT)) for text in context.texts]

    def retrieve(self, row: int, room: int) -> Draft | None:
        length, match = self.retrieval.matched(row, room)
        one = self._rows[row]
        self._learn(one)
        one.choices, one.proposed, usual = [], None, self._drafter.mean(0.0 if self.only_retrieves else 1.0)
        if (
            length >= self.min_match
            and len(match)
            and self._prefers(one, (0, len(match)), match, len(match) / 2, usual)
        ):
            one.proposed, usual = match, len(match) / 2
        tokens, expected = self.memory.propose(one.text.tokens, room)
        if tokens:
            situation = 1 + min(int(2 * expected), 12), 0 if one.proposed is None else len(one.proposed)
            remembered = Draft.chain(tokens)
            if self._prefers(one, situation, remembered, TRUST * expected, usual):
                one.proposed = remembered
                self.recalled += 1
        if one.proposed is None:
            self.drafted += 1
            return self.drafter.retrieve(row, room)
        return one.proposed

    def drop(self, rows: list[int]) -> None:
        for gone in set(range(len(self._rows))).difference(rows):
            self._learn(self._rows[gone])
        super().drop(rows)
        self._rows = [self._rows[row] for row in rows]

    def _prefers(
        self, row: RememberedText, situation: tuple[int, int], known: Draft, expected: float, usual: float
    ) -> bool:
        """Return whether to propose a known draft rather than what the row has so far; `_learn` counts the outcome.

        `situation`: what is expected of the known draft or where it is from, and the length of a draft.
        """
        if self.only_retrieves and row.proposed is None:
            return True  # the alternative is no draft
        source, length = situation
        seen = self._situations.setdefault((source, length.bit_length()), Situation())
        assert row.choices is not None, "a round has begun"
        row.choices.append((seen, known.tokens, row.proposed))
        return seen.prefers_known(expected, usual)

    def _learn(self, row: RememberedText) -> None:
        """Read the tokens that were committed since the last round, and count what was accepted in it."""
        new = row.text.tokens[row.read :]
        if not new:
            return
        accepted = len(new) - 1  # the last token is the target's own
        for situation, tokens, other in row.choices or []:
            agreed = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, new, strict=False))
            situation.count(sum(1 for _ in agreed), accepted if row.proposed is other else None)
        if row.choices is not None and row.proposed is None:
            self._drafter.add(accepted)
            if self._drafter.rounds > RECENT_ROUNDS:
                self._drafter.halve()
        self.memory.read(row.text.tokens, row.read)
        row.read = len(row.text.tokens)


def memories(drafter: Drafter) -> list[Recall]:
    """Return the parts of a drafter that remember earlier texts, itself included."""
    return [module for module in drafter.modules() if isinstance(module, Recall)]


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
