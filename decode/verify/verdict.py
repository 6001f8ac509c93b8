"""What a verification decides."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the token behind it."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, from a child of the root downwards."""
    next_token: int
    """The correction after a rejection, or the bonus token after the path's last token."""
    overlap: tuple[float, ...]
    """For each draft position that was tested, from the first on: sum over v of min(p_v, q_v); for tokens that were not
    drawn from a q, the target's probability of the candidates; 1.0 or 0.0 under greedy decoding."""

    @property
    def accepted(self) -> int:
        return len(self.path)
