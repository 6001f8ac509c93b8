"""Exact output distributions: every random choice is branched over instead of drawn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.sequence import DecodeSequence

Tokens = tuple[int, ...]


class LookedAt(Exception):
    """What happens next depends on an open token, so its outcomes have to be branched over."""


class Open:
    """A drawn token that nobody has looked at yet: it stands for all of its outcomes at once.

    The correction or bonus is a rule's last draw and is returned unseen, so one run of the rule serves all V of them.
    A rule that does look at the token is run again for each.
    """

    def __init__(self, weights: list[float]) -> None:
        total = sum(weights)
        self.outcomes = [(token, weight / total) for token, weight in enumerate(weights) if weight > 0]

    def _look(self, *_: object) -> Any:
        raise LookedAt

    __eq__ = __hash__ = __int__ = __index__ = __bool__ = _look


class BranchingRng:
    """Follows `path`, then takes the first possible outcome of every further choice and notes the others.

    With `leave_open`, a token drawn behind `path` is an `Open` one.
    """

    def __init__(self, path: tuple[int, ...] = (), *, leave_open: bool = False) -> None:
        self.path, self.weight = path, 1.0
        self.alternatives: list[tuple[int, ...]] = []
        self.taken: tuple[int, ...] = ()
        self.open: Open | None = None
        self._leave_open = leave_open

    def _branch(self, weights: list[float]) -> int:
        assert min(weights) >= 0, f"not a distribution: {weights}"
        if self.open is not None:
            raise LookedAt  # a choice behind an open token might depend on it
        if len(self.taken) < len(self.path):
            outcome = self.path[len(self.taken)]
        else:
            outcome, *others = (index for index, weight in enumerate(weights) if weight > 0)
            self.alternatives += [(*self.taken, other) for other in others]
        self.taken += (outcome,)
        self.weight *= weights[outcome] / sum(weights)
        return outcome

    def bernoulli(self, probability: float) -> bool:
        assert probability >= 0, f"not a probability: {probability}"
        certain = min(probability, 1.0)
        return self._branch([1 - certain, certain]) == 1

    def categorical(self, weights_V: Tensor) -> Any:
        weights = weights_V.tolist()
        assert sum(weights) > 0, "nothing to draw from"
        if self._leave_open and self.open is None and len(self.taken) == len(self.path):
            self.open = Open(weights)
            return self.open
        return self._branch(weights)


def outcomes(
    run: Callable[[BranchingRng], Any], *, start: tuple[int, ...] = (), leave_open: bool = False
) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every way that `run` can go after the choices `start`."""
    pending = [start]
    while pending:
        rng = BranchingRng(pending.pop(), leave_open=leave_open)
        try:
            result = run(rng)
        except LookedAt:
            pending += [*rng.alternatives, *((*rng.taken, token) for token, _ in rng.open.outcomes)]
            continue
        pending += rng.alternatives
        yield rng.weight, result


def spread(token: int | Open) -> list[tuple[int, float]]:
    """The outcomes of a token with their probabilities; a known token has one."""
    return token.outcomes if isinstance(token, Open) else [(token, 1.0)]


def add(distribution: dict, key: object, weight: float) -> None:
    distribution[key] = distribution.get(key, 0.0) + weight


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def string_distribution(
    p: Callable[[Tokens], list[float]], count: int, eos: frozenset[int], start: Tokens = ()
) -> Iterator[tuple[Tokens, float]]:
    """The target's own text: every string of `count` new tokens, or fewer where it ends, given that it has `start`."""
    if len(start) == count or (start and start[-1] in eos):
        yield start, 1.0
        return
    for token, weight in enumerate(p(start)):
        if weight > 0:
            for string, rest in string_distribution(p, count, eos, (*start, token)):
                yield string, weight * rest


# The whole decoder.


@dataclass
class State:
    """A decoder after some rounds, with its texts, which it forgets when they have ended."""

    decoding: DecodeLoop
    texts: tuple[DecodeSequence, ...]
    rng: BranchingRng
    rounds: int

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        return tuple(tuple(text.tokens) for text in self.texts)


def played(make: Callable[[], DecodeLoop], rng: BranchingRng, rounds: int | None = None) -> State:
    """A decoder from its prompts through `rounds` rounds, or to the end."""
    decoding = make()
    texts = tuple(decoding.texts)
    for text in texts:
        text.rng = rng
    decoding.prefill()
    done = 0
    while decoding.texts and done != rounds:
        decoding.round()
        done += 1
    return State(decoding, texts, rng, done)


def whole_runs(make: Callable[[], DecodeLoop]) -> dict[tuple[Tokens, ...], float]:
    """The probability of every batch of texts, with nothing merged."""
    found: dict[tuple[Tokens, ...], float] = {}
    for weight, state in outcomes(lambda rng: played(make, rng)):
        add(found, state.tokens, weight)
    return found


def merged_runs(
    make: Callable[[], DecodeLoop], same_state: Callable[[DecodeLoop, DecodeLoop], bool]
) -> dict[tuple[Tokens, ...], float]:
    """The same, one round at a time, with histories of equal tokens merged.

    `same_state` checks that nothing else of the decoder's state (caches, pointers) differs between two of them; then
    the first is replayed for both.
    """
    waiting: dict[tuple[Tokens, ...], tuple[float, State]] = {}
    finished: dict[tuple[Tokens, ...], float] = {}

    def arrive(weight: float, state: State) -> None:
        tokens = state.tokens
        if not state.decoding.texts:
            add(finished, tokens, weight)
            return
        mass, first = waiting.get(tokens, (0.0, state))
        assert same_state(first.decoding, state.decoding), f"the state depends on more than the tokens {tokens}"
        waiting[tokens] = (mass + weight, first)

    for weight, state in outcomes(lambda rng: played(make, rng, 0)):
        arrive(weight, state)
    while waiting:
        shortest = min(waiting, key=lambda tokens: sum(map(len, tokens)))
        mass, before = waiting.pop(shortest)
        after = partial(played, make, rounds=before.rounds + 1)
        for weight, state in outcomes(after, start=before.rng.taken):
            arrive(mass * weight / before.rng.weight, state)
    return finished
