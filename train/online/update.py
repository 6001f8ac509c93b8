"""An event of online learning: an update was adopted or refused, learning paused or resumed."""

from dataclasses import dataclass
from typing import Literal

from draftsmith.train.online.judge import Verdict

Kind = Literal["adopted", "refused", "paused", "resumed"]


@dataclass(frozen=True)
class Update:
    """An event of learning."""

    kind: Kind
    tokens: int
    """Decoded tokens so far."""
    steps: int
    """Optimizer steps so far."""
    verdict: Verdict | None = None
    """On the held-back rows; None where no candidate was judged."""
    reason: str = ""

    def __str__(self) -> str:
        head = f"learning: {self.kind} after {self.tokens} tokens and {self.steps} steps"
        if self.verdict is None:
            return f"{head}{self.reason and f': {self.reason}'}"
        low, high = self.verdict.interval
        return (
            f"{head}: tau {self.verdict.served:.2f} -> {self.verdict.candidate:.2f} on held-back text "
            f"({self.verdict.gain:+.1%} [{low:+.1%}, {high:+.1%}]){self.reason and f'; {self.reason}'}"
        )
