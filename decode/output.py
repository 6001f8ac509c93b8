"""What a decoded text carries: its tokens and a record of every round."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Round:
    """One target forward pass behind the prefill. Times are wall-clock seconds."""

    drafted: int
    """Draft tokens that were verified."""
    depth: int
    """Draft tokens on the longest path; equal to `drafted` for a chain."""
    accepted: int
    committed: int
    """Tokens kept: accepted draft tokens and the target's own, less what an EOS or the length cut off."""
    overlap: tuple[float, ...]
    """Sum over v of min(p_v, q_v) at each draft position that was tested; under greedy decoding 1.0 or 0.0."""
    draft_seconds: float
    verify_seconds: float
    seconds: float
    """The whole round; what draft and verify leave is overhead."""

    @property
    def tested(self) -> int:
        """Draft positions at which the accepted path had a draft token: of a tree, another path may be deeper."""
        return len(self.overlap)


@dataclass(frozen=True)
class DecodeOutput:
    """A decoded text. The first token comes from the prefill, all others from `rounds`."""

    prompt_tokens: list[int]
    tokens: list[int]
    """New tokens, including the EOS when there is one."""
    rounds: list[Round]
    prefill_seconds: float
    stopped_by: Literal["eos", "length", "criteria"]

    @property
    def decode_tokens(self) -> int:
        """Tokens that the rounds committed."""
        return len(self.tokens) - 1

    @property
    def decode_seconds(self) -> float:
        return sum(record.seconds for record in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decode only; 0 when the prefill's token was the only one."""
        return self.decode_tokens / self.decode_seconds if self.rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens committed per target forward pass, the bonus or correction included."""
        return self.decode_tokens / len(self.rounds) if self.rounds else 0.0

    @property
    def drafted(self) -> list[bool]:
        """For each new token whether the drafter proposed it; the others are the target's own."""
        flags = [False]
        for record in self.rounds:
            ours = min(record.accepted, record.committed)
            flags += [True] * ours + [False] * (record.committed - ours)
        return flags

    @property
    def alpha(self) -> float:
        """Mean of sum_v min(p_v, q_v) over the tested draft positions; 0 when none was tested."""
        overlaps = [value for record in self.rounds for value in record.overlap]
        return sum(overlaps) / len(overlaps) if overlaps else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """For each draft position, the share accepted among rounds that accepted everything before it and had a draft
        token behind that."""
        return acceptance_at(self.rounds)


def acceptance_at(rounds: list[Round]) -> list[float]:
    """Return measured acceptance by draft position, given a draft token there below what was accepted."""
    shares = []
    for position in range(max((record.tested for record in rounds), default=0)):
        accepted = [record.accepted > position for record in rounds if record.tested > position]
        shares.append(sum(accepted) / len(accepted))
    return shares
