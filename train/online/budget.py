"""When the next optimizer step is due, by the time that decoding and learning have taken or by decoded tokens alone."""

from math import exp, log1p, sqrt

from draftsmith.train.online.judge import Verdict

FLOOR = 0.97
"""Speed, relative to the drafter as it was, below which the cost of learning never brings decoding: before an update is
adopted it takes at most 3 % of the time, and afterwards the adopted gain too, up to the share."""

HORIZON = 2**16
"""Tokens that an update is expected to serve at least: early updates pay later."""
JUDGEMENT = 5
"""Steps that the first comparison is expected to take: it scores the held-back rows so far for two drafters."""


class Budget:
    """The account of learning since it last began or woke.

    Args:
        share: largest share of the time that learning takes.
        every: decoded tokens per step; then seconds play no part, and `share` is taken for the cost.
    """

    def __init__(self, share: float, every: int | None) -> None:
        self._share, self._every = share, every
        self._step: float | None = None
        self._judgement = 0.0
        self.forget()
        self.start(0)

    @property
    def measured(self) -> bool:
        """Return whether the time of a step is known."""
        return self._step is not None

    @property
    def gained(self) -> float:
        """Return a lower bound of the acceptance length relative to that without learning, of all updates together."""
        return max(exp(self._gain - 1.96 * sqrt(self._variance)), 1.0)

    def adopted(self, verdict: Verdict) -> None:
        """Add the gain of an update that is in use from now on; errors of updates are taken as independent."""
        error = (log1p(verdict.gain) - log1p(verdict.interval[0])) / 1.96
        self._gain, self._variance = self._gain + log1p(verdict.gain), self._variance + error**2

    def forget(self) -> None:
        """Forget the gains so far: the texts have changed."""
        self._gain = self._variance = 0.0

    def start(self, tokens: int) -> None:
        """Begin a new account after this number of decoded tokens: what was decoded before is no credit."""
        self._since = self._due = tokens
        self._decoding = self._learning = 0.0

    def decoded(self, seconds: float) -> None:
        """Add the time of decoding."""
        self._decoding += seconds

    def learned(self, seconds: float, part: float = 1.0) -> None:
        """Add the time of one step; `part`: of a step's rows."""
        self._learning += seconds
        self._step = seconds / part
        self._due += self._every or 0

    def judged(self, seconds: float) -> None:
        """Add the time of one comparison."""
        self._learning += seconds
        self._judgement = seconds

    def owes(self, tokens: int, *, judgement: bool = False) -> bool:
        """Return whether another step or comparison, as long as the last one, stays within the budget.

        Before the first step its time is not known: a part of its rows is taken.
        """
        if self._every is not None:
            return judgement or self._due + self._every <= tokens
        step = self._step or 0.0
        expected = (self._judgement or JUDGEMENT * step) if judgement else step
        allowed = min(self._share, 1 - FLOOR / self.gained)
        learning = self._learning + expected
        return learning <= allowed * (self._decoding + learning)

    def cost(self) -> float:
        """Return the share of the time that learning has taken."""
        total = self._decoding + self._learning
        return self._share if self._every is not None or not total else self._learning / total

    def pays(self, gain: float, tokens: int) -> bool:
        """Return whether an update that was adopted after `tokens` decoded tokens is worth what it cost.

        It is expected to serve as many tokens as have been decoded so far, and at least `HORIZON`: gain times these
        tokens >= cost * tokens of this account.
        """
        return gain * max(tokens, HORIZON) >= self.cost() * (tokens - self._since)
