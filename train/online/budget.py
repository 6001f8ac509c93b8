"""The budget of learning: a step is due by the time that decoding and learning take, or by decoded tokens alone."""

from collections import deque
from dataclasses import dataclass
from math import exp, log1p, sqrt

from draftsmith.train.online.judge import Verdict

START = 0.02
"""Share of the time that learning takes before an update was adopted. With copies of states and drafts from memory,
which are not counted, decoding stays above 97 % of its speed without learning."""
SPENT = 0.5
"""Part of the time saved by adopted updates that learning takes in addition: the other part is gained at once."""
HORIZON = 2**16
"""Tokens that an update is expected to serve at least: early updates pay later."""
RECENT = 4
"""Steps or comparisons whose fastest is the time that the next one is expected to take: others may be interrupted."""
JUDGEMENT = 10
"""Steps that the first comparison is expected to take: it scores the held-back rows so far for two drafters."""


@dataclass
class Account:
    """Seconds since a number of decoded tokens."""

    tokens: int
    decoding: float = 0.0
    learning: float = 0.0
    saved: float = 0.0
    """By adopted updates, at least: their gain is bounded from below."""


class Budget:
    """The time that learning may take: a small share of all, and a part of the time that it has saved.

    With the decoding time D, the learning time L and the saved time S, all since learning began or woke,

        L <= START (D + L) + SPENT S    and    L <= share (D + L)

    so that decoding, with learning, takes at most (D + S) / (1 - START) and is faster than without once L < S.

    Args:
        share: largest share of the time that learning takes.
        every: decoded tokens per step; then seconds play no part, and `share` is taken for the cost.
    """

    def __init__(self, share: float, every: int | None) -> None:
        self._share, self._every = share, every
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._judgements: deque[float] = deque(maxlen=RECENT)
        self.forget()
        self.start(0)

    @property
    def gained(self) -> float:
        """Return a lower bound of the acceptance length relative to that without learning, of all updates together."""
        return self._gained

    def expect(self, step: float) -> None:
        """Set the time of a step, before the first one was taken."""
        self._steps = deque([step], maxlen=RECENT)

    def adopted(self, verdict: Verdict, tokens: int) -> None:
        """Add the gain of an update that is in use from now on; errors of updates are taken as independent."""
        error = (log1p(verdict.gain) - log1p(verdict.interval[0])) / 1.96
        self._gain, self._variance = self._gain + log1p(verdict.gain), self._variance + error**2
        self._gained = max(exp(self._gain - 1.96 * sqrt(self._variance)), 1.0)
        self._update = Account(tokens)

    def forget(self) -> None:
        """Forget the gains so far: the texts have changed."""
        self._gain = self._variance = 0.0
        self._gained = 1.0

    def start(self, tokens: int) -> None:
        """Begin a new account after this number of decoded tokens: what was decoded before is no credit."""
        self._due = tokens
        self._all, self._update = Account(tokens), Account(tokens)

    def decoded(self, seconds: float) -> None:
        """Add the time of decoding."""
        self._all.decoding += seconds
        self._update.decoding += seconds
        self._all.saved += seconds * (self._gained - 1)

    def learned(self, seconds: float) -> None:
        """Add the time of one step."""
        self._spend(seconds)
        self._steps.append(seconds)
        self._due += self._every or 0

    def judged(self, seconds: float) -> None:
        """Add the time of one comparison."""
        self._spend(seconds)
        self._judgements.append(seconds)

    def _spend(self, seconds: float) -> None:
        self._all.learning += seconds
        self._update.learning += seconds

    def owes(self, tokens: int, *, judgement: bool = False) -> bool:
        """Return whether another step or comparison, as long as recent ones, stays within the budget."""
        if self._every is not None:
            return judgement or self._due + self._every <= tokens
        step = min(self._steps, default=0.0)
        expected = min(self._judgements, default=JUDGEMENT * step) if judgement else step
        learning = self._all.learning + expected
        total = self._all.decoding + learning
        return learning <= min(self._share * total, START * total + SPENT * self._all.saved)

    def cost(self) -> float:
        """Return the share of the time that learning has taken since the last update was adopted."""
        total = self._update.decoding + self._update.learning
        return self._share if self._every is not None or not total else self._update.learning / total

    def pays(self, gain: float, tokens: int) -> bool:
        """Return whether an update that is ready after `tokens` decoded tokens is worth what it cost.

        It is expected to serve as many tokens as have been decoded so far, and at least `HORIZON`: gain times these
        tokens >= cost * tokens since the last update.
        """
        return gain * max(tokens, HORIZON) >= self.cost() * (tokens - self._update.tokens)
