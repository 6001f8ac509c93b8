"""When the next optimizer step is due, by the time that decoding and learning have taken or by decoded tokens alone."""

FLOOR = 0.97
"""Speed, relative to the drafter as it was, below which the cost of learning never brings decoding: before an update is
adopted it takes at most 3 % of the time, and afterwards the adopted gain too, up to the share."""


class Budget:
    """The account of learning since it last began or woke.

    Args:
        share: largest share of the time that learning takes.
        every: decoded tokens per step; then seconds play no part, and `share` is taken for the cost.
    """

    def __init__(self, share: float, every: int | None) -> None:
        self._share, self._every = share, every
        self.gained = 1.0
        """Lower bound of the acceptance length over that without learning."""
        self.start(0)

    def start(self, tokens: int) -> None:
        """Begin a new account after this number of decoded tokens: what was decoded before is no credit."""
        self._since = self._due = tokens
        self._decoding = self._learning = self._last = 0.0

    def decoded(self, seconds: float) -> None:
        """Add the time of decoding."""
        self._decoding += seconds

    def learned(self, seconds: float) -> None:
        """Add the time of one step, with the comparison after it if there was one."""
        self._learning += seconds
        self._last = seconds
        self._due += self._every or 0

    def owes(self, tokens: int) -> bool:
        """Return whether another step, as long as the last one, stays within the budget."""
        if self._every is not None:
            return self._due + self._every <= tokens
        allowed = min(self._share, 1 - FLOOR / max(self.gained, 1.0))
        learning = self._learning + self._last
        return learning <= allowed * (self._decoding + learning)

    def cost(self) -> float:
        """Return the share of the time that learning has taken."""
        total = self._decoding + self._learning
        return self._share if self._every is not None or not total else self._learning / total

    def pays(self, gain: float, tokens: int) -> bool:
        """Return whether an update that was adopted after `tokens` decoded tokens is worth what it cost.

        It is assumed to be in use for as many tokens as have been decoded so far: gain * tokens >= cost * tokens of
        this account.
        """
        return gain * tokens >= self.cost() * (tokens - self._since)
