"""Exact output distributions: every random choice of the decoder is branched over instead of drawn."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.decoder import Decoding
from draftsmith.decode.processors import Probabilities, Sampling
from draftsmith.heads.draft import Draft

Tokens = tuple[int, ...]


class BranchingChance:
    """Follows `path`, then takes the first possible outcome of every further choice and notes the others."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path, self.step, self.weight = path, 0, 1.0
        self.alternatives: list[tuple[int, ...]] = []
        self.taken: tuple[int, ...] = ()

    def _branch(self, weights: list[float]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if self.step < len(self.path):
            outcome = self.path[self.step]
        else:
            outcome = possible[0]
            self.alternatives += [(*self.taken, other) for other in possible[1:]]
        self.step += 1
        self.taken += (outcome,)
        self.weight *= weights[outcome] / sum(weights)
        return outcome

    def bernoulli(self, probability: float) -> bool:
        return self._branch([1 - probability, probability]) == 1

    def categorical(self, weights_V: Tensor) -> int:
        return self._branch(weights_V.tolist())


def outcomes(run: Callable[[BranchingChance], Any]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every way that `run` can go; the probabilities add up to 1."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        chance = BranchingChance(pending.pop())
        result = run(chance)
        pending += chance.alternatives
        yield chance.weight, result


class ToyModel:
    """fp64 logits that depend on the whole context, from a seed; `banned` tokens have probability zero."""

    def __init__(self, seed: int, vocab: int = 5, banned: frozenset[int] = frozenset(), scale: float = 1.5) -> None:
        self.vocab, self.banned = vocab, banned

        @cache
        def logits(context: Tokens) -> Tensor:
            generator = torch.Generator().manual_seed(hash((seed, context)) % 2**62)
            row = torch.randn(vocab, dtype=torch.float64, generator=generator) * scale
            row[list(banned)] = -torch.inf
            return row

        self.logits = logits

    def __deepcopy__(self, memo: dict) -> "ToyModel":
        return self


class ToyTarget:
    """A toy model behind the Target interface, with a text that is appended to and cut like a cache."""

    context_limit = None

    def __init__(self, model: ToyModel) -> None:
        self.model, self.read = model, ()

    def start(self, max_length: int) -> None:
        self.read = ()

    def prefill(self, tokens: list[int]) -> Tensor:
        return self.verify(tokens)[-1:]

    def verify(self, tokens: list[int]) -> Tensor:
        base, self.read = self.read, self.read + tuple(tokens)
        return torch.stack([self.model.logits(self.read[: len(base) + i + 1]) for i in range(len(tokens))])

    def commit(self, length: int) -> None:
        self.read = self.read[:length]

    def hidden(self, row: int) -> None:
        return None


class ToyDrafter:
    """Draws from a toy model of its own; `independent` ignores earlier draft tokens, as Medusa does."""

    def __init__(self, model: ToyModel, *, independent: bool = False, point_mass: bool = False) -> None:
        self.model, self.independent, self.point_mass = model, independent, point_mass

    def start(self, context: Decoding) -> None:
        pass

    def observe(self, committed_length: int) -> None:
        pass

    def propose(self, context: Decoding, draft_length: int) -> Draft:
        text, tokens, rows = tuple(context.tokens), [], []
        for k in range(draft_length):
            seen = (*text, -1 - k) if self.independent else text + tuple(tokens)
            logits_V = self.model.logits(seen)
            token, q_V = (int(logits_V.argmax()), None) if self.point_mass else context.choose(logits_V)
            tokens.append(token)
            rows.append(q_V)
        return Draft.chain(tokens, None if rows[0] is None else torch.stack(rows))


def decoder_distribution(
    make: Callable[[BranchingChance], Decoding], same_state: Callable[[Decoding, Decoding], bool] | None = None
) -> dict[Tokens, float]:
    """The exact probability of every text that the decoder can produce.

    Rounds are branched one at a time from a copy of the decoder's true state. Two histories with the same tokens
    are merged, after `same_state` has checked that nothing else of the state (caches, pointers) differs.
    """
    waiting: dict[Tokens, tuple[float, Decoding]] = {}
    finished: dict[Tokens, float] = {}

    def arrive(weight: float, decoding: Decoding) -> None:
        tokens = tuple(decoding.tokens)
        if decoding.stopped_by is not None:
            finished[tokens] = finished.get(tokens, 0.0) + weight
            return
        mass, first = waiting.get(tokens, (0.0, decoding))
        assert same_state is None or same_state(first, decoding), f"the state depends on more than the tokens {tokens}"
        waiting[tokens] = (mass + weight, first)

    def first_token(chance: BranchingChance) -> Decoding:
        decoding = make(chance)
        decoding.prefill()
        return decoding

    for weight, decoding in outcomes(first_token):
        arrive(weight, decoding)
    while waiting:
        tokens = min(waiting, key=len)
        mass, state = waiting.pop(tokens)

        def one_round(chance: BranchingChance, state: Decoding = state) -> Decoding:
            decoding = deepcopy(state)
            decoding._chance = chance
            decoding.round()
            return decoding

        for weight, decoding in outcomes(one_round):
            arrive(mass * weight, decoding)
    return finished


def target_distribution(
    logits: Callable[[Tokens], Tensor], prompt: Tokens, count: int, sampling: Sampling, eos: frozenset[int], vocab: int
) -> dict[Tokens, float]:
    """The probability of every text of at most `count` new tokens under the target alone."""

    @cache
    def probabilities(context: Tokens) -> list[float]:
        logits_V = logits(context)
        if sampling.greedy:
            return torch.nn.functional.one_hot(logits_V.argmax(), vocab).double().tolist()
        return Probabilities(sampling)(logits_V[None])[0].tolist()

    expected: dict[Tokens, float] = {}
    for new in product(range(vocab), repeat=count):
        stop = next((i + 1 for i, token in enumerate(new) if token in eos), count)
        text = prompt + new[:stop]
        if text in expected:
            continue
        weight = 1.0
        for i in range(stop):
            weight *= probabilities(prompt + new[:i])[new[i]]
        expected[text] = weight
    return expected


def total_variation(a: dict[Tokens, float], b: dict[Tokens, float]) -> float:
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys()) / 2
