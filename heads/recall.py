"""A hybrid that also drafts from the texts it has decoded before, where such drafts have been accepted more often."""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar, Self

from draftsmith.heads.base import Context, Drafter, SequenceState
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.memory import NgramMemory
from draftsmith.heads.ngram import Hybrid, Retrieval

PRIOR = 4.0
"""Rounds that an expectation counts for beside those that were seen."""
TRUST = 0.5
"""Of the tokens that the memory expects to be accepted before any round has shown it."""
EXPLORED = 32
"""Rounds with a draft from memory after which the other draft is tried once in the same situation."""
PROMPT = 512
"""Tokens at the end of a prompt that the memory reads, too: about 3 ms."""
RECENT = 200.0
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
    """Rounds in which the memory expected about as much, beside drafts of about the same length."""

    memory: Accepted = field(default_factory=Accepted)
    """Also rounds with the other draft: what memory would have drafted is compared with the committed tokens."""
    other: Accepted = field(default_factory=Accepted)


@dataclass
class Row:
    """A text and its last round."""

    text: SequenceState
    read: int
    """Tokens that the memory has read."""
    situation: Situation | None = None
    """Of the last round; None where the memory had no draft."""
    remembered: tuple[int, ...] = ()
    """The memory's draft of that round."""
    recalled: bool = False
    """The memory's draft was proposed."""
    drafted: bool = False
    """The drafter drafted, since nothing was retrieved."""


class Recall(Hybrid):
    """A hybrid with a memory of all texts that it has decoded, and of the ends of their prompts.

    The memory reads committed tokens between rounds, and a draft is fixed before it is verified, so decoding stays
    lossless. Which draft a round proposes is decided by counts of accepted tokens in similar situations.
    """

    type: ClassVar[str] = "recall"

    def __init__(self, drafter: Drafter, retrieval: Retrieval | None = None, *, min_match: int = 4) -> None:
        super().__init__(drafter, retrieval, min_match=min_match)
        self.memory = NgramMemory()
        self._situations: dict[tuple[int, int], Situation] = {}
        self._drafter = Accepted()
        self._rows: list[Row] = []
        self.rounds = self.recalled = self.drafted = 0
        """Rounds, those with a draft from memory, and those that the drafter drafted."""

    @property
    def drafted_share(self) -> float:
        """Share of the rounds that the drafter drafted."""
        return self.drafted / self.rounds if self.rounds else 1.0

    @classmethod
    def of(cls, drafter: Drafter) -> Self:
        """Return a hybrid with memory of a drafter, or of the parts of a hybrid."""
        if isinstance(drafter, Hybrid):
            return cls(drafter.drafter, drafter.retrieval, min_match=drafter.min_match)
        return cls(drafter)

    def start(self, context: Context) -> None:
        for row in self._rows:
            self._learn(row)  # what was committed in the last round of earlier texts
        super().start(context)
        self._rows = [Row(text, max(0, len(text.tokens) - 1 - PROMPT)) for text in context.texts]

    def retrieve(self, row: int, room: int) -> Draft | None:
        own, one = super().retrieve(row, room), self._rows[row]
        self._learn(one)
        draft, expected = self.memory.propose(one.text.tokens, room)
        one.remembered, one.situation, one.recalled = tuple(draft), None, False
        if draft:
            key = min(int(2 * expected), 12), 0 if own is None else len(own).bit_length()
            one.situation = self._situations.setdefault(key, Situation())
            one.recalled = self._prefers_memory(one.situation, expected, own)
        one.drafted = own is None and not one.recalled
        self.rounds += 1
        self.recalled += one.recalled
        self.drafted += one.drafted
        return Draft.chain(draft) if one.recalled else own

    def drop(self, rows: list[int]) -> None:
        for gone in set(range(len(self._rows))).difference(rows):
            self._learn(self._rows[gone])
        super().drop(rows)
        self._rows = [self._rows[row] for row in rows]

    def _prefers_memory(self, seen: Situation, expected: float, own: Draft | None) -> bool:
        if seen.other.rounds * EXPLORED < seen.memory.rounds - PRIOR:
            return False
        usual = self._drafter.mean(1.0) if own is None else len(own) / 2
        return seen.memory.mean(TRUST * expected) >= seen.other.mean(usual)

    def _learn(self, row: Row) -> None:
        """Read the tokens that were committed since the last round, and count what was accepted in it."""
        new = row.text.tokens[row.read :]
        if not new:
            return
        accepted, seen = len(new) - 1, row.situation  # the last token is the target's own
        if seen is not None:
            agreed = takewhile(lambda pair: pair[0] == pair[1], zip(row.remembered, new, strict=False))
            seen.memory.add(sum(1 for _ in agreed))
            if not row.recalled:
                seen.other.add(accepted)
            if seen.memory.rounds > RECENT:
                seen.memory.halve()
                seen.other.halve()
        if row.drafted:
            self._drafter.add(accepted)
            if self._drafter.rounds > RECENT:
                self._drafter.halve()
        self.memory.read(row.text.tokens, row.read)
        row.read = len(row.text.tokens)
