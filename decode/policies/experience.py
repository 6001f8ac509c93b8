"""Acceptance, speed and gain of a drafter, which policies learn from the verification of its drafts."""

from bisect import bisect_right
from collections.abc import Callable

from draftsmith.decode.costs import Costs

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR, MOST_COUNTED = 4.0, 60.0
"""Number of observations that the prior of a bin counts for, and the maximum that a bin keeps: older ones fade."""
CAUTION = 3.0
"""Number of expected acceptances at a depth at which its own correction has as much weight as the previous depth's."""
FADING = 0.99
"""Weight of earlier observations in the acceptance at a depth, per observation."""
MEMORY = 0.97
"""Weight of earlier rounds in the running speed, per round: about the last thirty rounds count."""
PATIENCE, MOST_PATIENCE = 4, 64
"""Rounds without a draft after which one token is drafted, to learn; their number doubles while that does not pay."""
GAINS = 10
"""Number of rounds over which the mean gain of the drafter's drafts is taken."""
RETRIEVED = {True: 0.8, False: 0.5}
"""Prior acceptance of retrieved tokens, by whether decoding is greedy; it counts for `PRIOR` tokens."""


class Calibration:
    """Measured acceptance rate by confidence under q, in bins that start with a prior.

    Args:
        prior: maps a confidence to the expected acceptance rate.
    """

    def __init__(self, prior: Callable[[float], float]) -> None:
        centres = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._accepted = [PRIOR * prior(centre) for centre in centres]
        self._count = [PRIOR] * len(centres)

    def rate(self, confidence: float) -> float:
        """Return the acceptance rate of tokens with this confidence."""
        index = bisect_right(EDGES, confidence)
        return self._accepted[index] / self._count[index]

    def observe(self, confidence: float, outcome: float) -> None:
        """Add an observation; `outcome` in [0, 1]: whether the token was accepted, or its acceptance probability."""
        index = bisect_right(EDGES, confidence)
        self._accepted[index] += outcome
        self._count[index] += 1
        if self._count[index] > MOST_COUNTED:
            self._accepted[index] *= MOST_COUNTED / self._count[index]
            self._count[index] = MOST_COUNTED

    @property
    def mean(self) -> float:
        """Acceptance rate over all bins, for a token of unknown confidence."""
        return sum(self._accepted) / sum(self._count)


class Survival:
    """Probability that a whole path is accepted, from the product of its tokens' acceptance rates and its depth.

    The product is too low for long paths: accepted tokens are correlated, and under the block rule a token that is more
    likely under p than under q compensates for others. It is corrected by the ratio of accepted to expected paths at
    that depth; a depth with few observations takes over the correction of the previous depth.
    """

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._expected: list[float] = []
        self._corrections: list[float] | None = []
        """By depth; None after an observation, until they are recomputed."""

    def rate(self, product: float, depth: int) -> float:
        """Return the corrected probability that a path of `depth` tokens is accepted."""
        return min(1.0, product * self._correction(depth))

    def _correction(self, depth: int) -> float:
        if self._corrections is None:
            self._corrections, correction = [], 1.0
            for accepted, expected in zip(self._accepted, self._expected, strict=True):
                correction = (accepted + CAUTION * correction) / (expected + CAUTION)
                self._corrections.append(correction)
        if not self._corrections:
            return 1.0
        return self._corrections[min(depth, len(self._corrections)) - 1]

    def observe(self, product: float, depth: int, accepted: bool) -> None:
        """Add an observation: whether a path of `depth` tokens was accepted."""
        self._corrections = None
        while len(self._accepted) < depth:
            self._accepted.append(0.0)
            self._expected.append(0.0)
        self._accepted[depth - 1] = FADING * self._accepted[depth - 1] + accepted
        self._expected[depth - 1] = FADING * self._expected[depth - 1] + product


class RetrievedAcceptance:
    """Acceptance rate of retrieved tokens by the length of the draft, which follows from that of the match."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._seen: dict[int, tuple[float, float]] = {}

    def rate(self, length: int) -> float:
        """Return the acceptance rate of a token of a retrieved draft of `length` tokens, given those before it."""
        accepted, tested = self._seen.get(length.bit_length(), (0.0, 0.0))
        return (accepted + PRIOR * self._prior) / (tested + PRIOR)

    def observe(self, length: int, verified: int, accepted: int) -> None:
        """Add an observation: of `length` retrieved tokens some were verified, and some of these accepted."""
        before, tested = self._seen.get(length.bit_length(), (0.0, 0.0))
        now, total = before + accepted, tested + min(accepted + 1, verified)
        fading = min(1.0, MOST_COUNTED / total)
        self._seen[length.bit_length()] = (fading * now, fading * total)


class Speed:
    """Tokens per second over the last rounds, with seconds from `Costs`: the lambda of `AdaptiveChain`."""

    def __init__(self, costs: Costs, acceptance: float = 0.7) -> None:
        tokens = 1 + 2 * acceptance
        seconds = costs.round_seconds(2, 2)
        # Starts as after four rounds with two draft tokens each.
        self._tokens, self._seconds = 4 * tokens, 4 * seconds
        self._plain = costs.token_seconds()

    def observe(self, tokens: float, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + tokens
        self._seconds = MEMORY * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the last rounds, or of rounds without drafts if those are faster: drafting never has to pay for less."""
        return max(self._tokens / self._seconds, 1 / self._plain)


class Experience:
    """The learned state of a policy, separate for greedy and sampled runs, whose acceptance differs.

    The target's argmax equals the drafter's most likely token more often than q of that token says; a token drawn from
    q is accepted with probability sum(min(p, q)), which is high even for a flat q. The priors follow from this.
    """

    def __init__(self, costs: Costs, *, greedy: bool) -> None:
        self.speed = Speed(costs)
        self.accepted = Calibration((lambda c: c**0.5) if greedy else (lambda c: 0.5 + 0.5 * c))
        """Acceptance by confidence: the token's own q when greedy, else the maximum of q."""
        self.survival = Survival()
        self.retrieved = RetrievedAcceptance(RETRIEVED[greedy])
        self.gain = 0.0
        """Running mean of what a draft of the drafter gained: its accepted tokens, less the tokens of its seconds."""
        self._idle, self._patience = 0, PATIENCE

    @property
    def curious(self) -> bool:
        """Whether so many rounds had no draft that the next one drafts a token, to learn."""
        return self._idle >= self._patience

    def drafted(self, tokens: int, gain: float) -> None:
        """Count a round with this number of drafted tokens, and what it gained, see `gain`."""
        self.gain += (gain - self.gain) / GAINS
        if tokens == 0:
            self._idle += 1
        elif not self.curious:
            self._idle, self._patience = 0, PATIENCE
        elif gain > 0:  # another one at once
            self._idle = self._patience = PATIENCE
        else:
            self._idle, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)

    def ahead(self, survival: float, start: int) -> Callable[[int], float]:
        """Return a function from a depth to the probability that a path is accepted up to there.

        `survival`: the product of the acceptance rates of the first `start` tokens; further tokens have the mean rate.
        """
        mean = self.accepted.mean
        return lambda depth: self.survival.rate(survival * mean ** (depth - start), depth)
