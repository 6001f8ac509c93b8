"""Exact output distributions: every outcome of every random draw is enumerated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.drafts.builder import Children, DraftBuilder, draw_children
from draftsmith.decode.draws import NOT_DRAWN, Draws, MakeDraws, Node
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.rules import Rule
from draftsmith.decode.rules.outcome import VerifyResult
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.verification import verify as verify_batch
from draftsmith.heads.draft_tree import Draft, children_of, depths_of

Tokens = tuple[int, ...]


class LookedAt(Exception):
    """Raised when code reads an open token, whose outcomes must then be enumerated."""


class Open:
    """A drawn token that no code has read yet: it represents all of its outcomes.

    The correction or bonus is the last draw of a rule, which returns it without reading it, so one run of the rule
    covers all V outcomes. A rule that reads the token is run again for each outcome.
    """

    def __init__(self, weights: list[float]) -> None:
        total = sum(weights)
        self.outcomes = [(token, weight / total) for token, weight in enumerate(weights) if weight > 0]

    def _look(self, *_: object) -> Any:
        raise LookedAt

    __eq__ = __hash__ = __int__ = __index__ = __bool__ = _look


class BranchingRng:
    """Follows the outcomes `path`, then takes the first possible outcome of every further draw and records the others.

    With `leave_open`, a token that is drawn after `path` is `Open`, except the first `closed` tokens of all.
    """

    def __init__(self, path: tuple[int, ...] = (), *, leave_open: bool = False, closed: int = 0) -> None:
        self.path, self.weight = path, 1.0
        self.alternatives: list[tuple[int, ...]] = []
        self.taken: tuple[int, ...] = ()
        self.open: Open | None = None
        self._leave_open, self._closed = leave_open, closed

    def _branch(self, weights: list[float]) -> int:
        assert min(weights) >= 0, f"not a distribution: {weights}"
        if self.open is not None:
            raise LookedAt  # a draw after an open token might depend on it
        if len(self.taken) < len(self.path):
            outcome = self.path[len(self.taken)]
        else:
            outcome, *others = [index for index, weight in enumerate(weights) if weight > 0]
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
        if self._leave_open and self.open is None and self._closed <= 0 and len(self.taken) >= len(self.path):
            self.open = Open(weights)
            return self.open
        self._closed -= 1
        return self._branch(weights)


class Rng(Protocol):
    """A source of random draws, one after the other."""

    def bernoulli(self, probability: float) -> bool: ...

    def categorical(self, weights_V: Tensor) -> Any: ...


Verify = Callable[[Tensor, Draft, Rng], VerifyResult]
"""A rule for one text: p [P, V], the draft and the source of random draws to the result."""


class RowDraws(Draws):
    """`Draws` of which each row takes those of its source, one after the other; no draw may be made twice."""

    def __init__(self, rngs: Sequence[Rng]) -> None:
        self.rngs = rngs
        self.last: list[Any] = [None] * len(rngs)
        """The last token of each row as its source returned it, which may be `Open`."""
        self._made: set[tuple[int, str, int]] = set()
        self._rows = [*range(len(rngs))]
        """The row of each source in the draws of the round, with which draws of some rows share what was made."""

    def of(self, rows: Sequence[int]) -> "RowDraws":
        if list(rows) == list(range(len(self.rngs))):
            return self
        part = RowDraws([self.rngs[row] for row in rows])
        part._made, part._rows = self._made, [self._rows[row] for row in rows]
        return part

    def drafted(self, weights_BV: Tensor, node: Node, active_B: Tensor | None = None) -> Tensor:
        active = [True] * len(self.rngs) if active_B is None else active_B.tolist()
        rows = enumerate(zip(weights_BV, self._nodes(node), active, strict=True))
        return torch.tensor([self._token(row, "draft", n, w_V) if on else 0 for row, (w_V, n, on) in rows])

    def chain(self, weights_BDV: Tensor) -> Tensor:
        return torch.stack([self.drafted(weights_BV, node) for node, weights_BV in enumerate(weights_BDV.unbind(1))], 1)

    def passes(self, probability_B: Tensor, node: Node, active_B: Tensor) -> Tensor:
        rows = enumerate(zip(probability_B.tolist(), self._nodes(node), active_B.tolist(), strict=True))
        return torch.tensor([active and self._passes(row, number, p) for row, (p, number, active) in rows])

    def until_failure(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        N, found = probability_BN.shape[1], []
        for row, (probabilities, valid) in enumerate(self._with_valid(probability_BN, valid_BN)):
            nodes = (node for node in range(N) if valid[node] and not self._passes(row, node, probabilities[node]))
            found.append(next(nodes, N))
        return torch.tensor(found)

    def longest(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        found = []
        for row, (probabilities, valid) in enumerate(self._with_valid(probability_BN, valid_BN)):
            last = reversed(range(probability_BN.shape[1]))
            nodes = (node for node in last if valid[node] and self._passes(row, node, probabilities[node]))
            found.append(next(nodes, -1) + 1)
        return torch.tensor(found)

    def next(self, weights_BV: Tensor) -> Tensor:
        return torch.tensor([self._token(row, "target", 0, weights_V) for row, weights_V in enumerate(weights_BV)])

    def along(self, weights_BPV: Tensor, draft: DraftBatch) -> Tensor:
        B, places = weights_BPV.shape[:2]
        tokens = [[NOT_DRAWN] * places for _ in range(B)]
        nodes = draft.tokens_BN.tolist()
        valid = None if draft.valid_BN is None else draft.valid_BN.tolist()
        for row, weights_PV in enumerate(weights_BPV):
            place: int | None = 0
            depth, children = 0, children_of(draft.row(row)[0])
            while place is not None:
                token = self._token(row, "target", depth, weights_PV[place])
                here, place, depth = place, None, depth + 1
                for child in children[here]:
                    exists = valid is None or valid[row][child]
                    if exists and place is None and self.last[row] == nodes[row][child]:
                        place = child + 1
                tokens[row][here] = token
        return torch.tensor(tokens)

    def _token(self, row: int, kind: str, node: int, weights_V: Tensor) -> int:
        self._once(row, kind, node)
        self.last[row] = self.rngs[row].categorical(weights_V)
        return self.last[row] if isinstance(self.last[row], int) else 0

    def _passes(self, row: int, node: int, probability: float) -> bool:
        self._once(row, "test", node)
        return self.rngs[row].bernoulli(probability)

    def _once(self, row: int, kind: str, node: int) -> None:
        assert (self._rows[row], kind, node) not in self._made, f"the {kind} of node {node} is drawn twice"
        self._made.add((self._rows[row], kind, node))

    def _nodes(self, node: Node) -> list[int]:
        return [node] * len(self.rngs) if isinstance(node, int) else node.tolist()

    def _with_valid(self, values_BN: Tensor, valid_BN: Tensor | None) -> Iterator[tuple[list[float], list[bool]]]:
        valid = [[True] * values_BN.shape[1]] * len(values_BN) if valid_BN is None else valid_BN.tolist()
        return zip(values_BN.tolist(), valid, strict=True)


def draws_of(rngs: Sequence[Rng]) -> MakeDraws:
    """Return the draws of a decoder whose texts have their place in `rngs` as seed; no round may draw twice."""
    rounds: set[tuple[int, int]] = set()

    def make(seeds: Sequence[int], lengths: Sequence[int], device: torch.device) -> RowDraws:
        own = set(zip(seeds, lengths, strict=True))
        assert len(own) == len(seeds), "two texts draw the same numbers"
        assert not own & rounds, "two rounds of a text draw the same numbers"
        rounds.update(own)
        return RowDraws([rngs[seed] for seed in seeds])

    return make


def verify(rule: Rule | None, p_PV: Tensor, draft: Draft, rng: Rng) -> VerifyResult:
    """Apply a rule (None: the best one) to the draft of one text."""
    draws = RowDraws([rng])
    outcome = verify_batch(rule, p_PV[None], DraftBatch.of([draft]), draws)
    result = outcome.result(outcome.packed()[0].tolist())
    assert draws.last[0] is not None, "the rule drew the next token"
    return replace(result, next_token=draws.last[0])


def drawn_draft(parents: Sequence[int], q: Callable[[int], Tensor], rng: Rng) -> Draft:
    """Return a draft whose nodes have these parents, all drawn: each from `q(parent)`."""
    builder, draws = empty_builder(), RowDraws([rng])
    for parent in parents:
        q_1V = q(parent)[None]
        draw_children([Children(builder, [parent], [1], 0)], q_1V, draws.drafted, chances=False)
    return builder.draft()


def empty_builder() -> DraftBuilder:
    """Return a builder for draws from distributions that are given."""
    return DraftBuilder(DecodeSequence([], 100), 99, Processors(Sampling(1.0)))


AT_ONCE = 2048
"""Rows that a rule verifies in one call."""


def verified(
    rule: Rule, cases: Sequence[tuple[Tensor, Draft]], *, leave_open: bool = False
) -> Iterator[tuple[float, int, VerifyResult]]:
    """Yield (probability, index of the case, result) for every outcome of a batched rule on (p, draft).

    With `leave_open`, the token after the path is `Open`, and one row covers all of its outcomes. A rule that reads it
    from the tensor that the draw returned goes unnoticed: verify some cases without.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (_, draft) in enumerate(cases):
        groups.setdefault(draft.parents, []).append(number)
    for parents, numbers in groups.items():
        # The point-mass rule draws a token after every node, and reads all but those after leaves.
        closed = max(depths_of(parents), default=0) if rule.name == "point-mass" else 0
        pending: list[tuple[int, tuple[int, ...]]] = [(number, ()) for number in numbers]
        while pending:
            rows, pending = pending[:AT_ONCE], pending[AT_ONCE:]
            draws = RowDraws([BranchingRng(path, leave_open=leave_open, closed=closed) for _, path in rows])
            batch = DraftBatch.of([cases[number][1] for number, _ in rows])
            outcome = verify_batch(rule, torch.stack([cases[number][0] for number, _ in rows]), batch, draws)
            for (number, _), rng, values in zip(rows, draws.rngs, outcome.packed().tolist(), strict=True):
                pending += [(number, path) for path in rng.alternatives]
                result = outcome.result(values)
                yield rng.weight, number, result if rng.open is None else replace(result, next_token=rng.open)


def verified_together(
    rule: Rule | None, cases: Sequence[tuple[Tensor, Draft]]
) -> Iterator[tuple[float, int, VerifyResult]]:
    """Yield what `verified` does, for drafts of all shapes in the batches that the decoder makes of them."""
    widest = max(len(p_PV) for p_PV, _ in cases)
    pending: list[tuple[int, tuple[int, ...]]] = [(number, ()) for number in range(len(cases))]
    while pending:
        rows, pending = pending[:AT_ONCE], pending[AT_ONCE:]
        rngs, drafts = [BranchingRng(path) for _, path in rows], [cases[number][1] for number, _ in rows]
        # Places that a text does not have hold p of its last one, which must not count.
        p = [cases[number][0] for number, _ in rows]
        p_BQV = torch.stack([torch.cat([p_PV, p_PV[-1:].expand(widest - len(p_PV), -1)]) for p_PV in p])
        outcome = verify_batch(rule, p_BQV, DraftBatch.of(drafts), RowDraws(rngs))
        for (number, _), rng, values in zip(rows, rngs, outcome.packed().tolist(), strict=True):
            yield rng.weight, number, outcome.result(values)
        pending += [(number, path) for (number, _), rng in zip(rows, rngs, strict=True) for path in rng.alternatives]


def outcomes(
    run: Callable[[BranchingRng], Any], *, start: tuple[int, ...] = (), leave_open: bool = False
) -> Iterator[tuple[float, Any]]:
    """Yield (probability, result) for every sequence of outcomes of `run` that begins with `start`."""
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
    """Return the outcomes of a token with their probabilities; a known token has one."""
    return token.outcomes if isinstance(token, Open) else [(token, 1.0)]


def add(distribution: dict, key: object, weight: float) -> None:
    distribution[key] = distribution.get(key, 0.0) + weight


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def string_distribution(
    p: Callable[[Tokens], list[float]], count: int, eos: frozenset[int], start: Tokens = ()
) -> Iterator[tuple[Tokens, float]]:
    """Yield every continuation of `start` to `count` new tokens (fewer with an EOS), with its probability under p."""
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
    """A decoder after some rounds, with its texts, which the decoder drops when they have ended."""

    decoding: DecodeLoop
    texts: tuple[DecodeSequence, ...]
    rng: BranchingRng
    rounds: int

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        return tuple(tuple(text.tokens) for text in self.texts)


def played(make: Callable[[], DecodeLoop], rng: BranchingRng, rounds: int | None = None) -> State:
    """Return the state of a new decoder after `rounds` rounds, or at the end."""
    decoding = make()
    texts = tuple(decoding.sequences)
    for place, text in enumerate(texts):
        text.seed = place
    decoding.draws_of = draws_of([rng] * len(texts))
    decoding.prefill()
    done = 0
    while decoding.sequences and done != rounds:
        decoding.round()
        done += 1
    return State(decoding, texts, rng, done)


def whole_runs(make: Callable[[], DecodeLoop]) -> dict[tuple[Tokens, ...], float]:
    """Return the probability of every batch of texts; no histories are merged."""
    distribution: dict[tuple[Tokens, ...], float] = {}
    for weight, state in outcomes(lambda rng: played(make, rng)):
        add(distribution, state.tokens, weight)
    return distribution


def whole_runs_together(make: Callable[[int], DecodeLoop], at_once: int) -> dict[tuple[Tokens], float]:
    """Return the result of `whole_runs` for one text, whose histories are rows of batches of at most `at_once`."""
    distribution: dict[tuple[Tokens], float] = {}
    pending: list[tuple[int, ...]] = [()]
    while pending:
        paths, pending = pending[:at_once], pending[at_once:]
        for rng, tokens, _, _ in replayed(make, paths, None):
            add(distribution, (tokens,), rng.weight)
            pending += rng.alternatives
    return distribution


@dataclass
class Waiting:
    """The probability of all histories that lead to an unfinished text, and the most probable one with its own."""

    mass: float
    path: tuple[int, ...]
    weight: float


def replayed(
    make: Callable[[int], DecodeLoop], paths: Sequence[tuple[int, ...]], rounds: int | None
) -> Iterator[tuple[BranchingRng, Tokens, DecodeLoop, int | None]]:
    """Decode one batch with a text for each path; yield its outcomes, tokens, decoder, and row unless it has ended.

    `rounds`: None decodes to the end.
    """
    decoding, rngs = make(len(paths)), [BranchingRng(path) for path in paths]
    texts = tuple(decoding.sequences)
    for place, text in enumerate(texts):
        text.seed = place
    decoding.draws_of = draws_of(rngs)
    decoding.prefill()
    done = 0
    while decoding.sequences and done != rounds:
        decoding.round()
        done += 1
    rows = {id(text): row for row, text in enumerate(decoding.sequences)}
    for text, rng in zip(texts, rngs, strict=True):
        yield rng, tuple(text.tokens), decoding, rows.get(id(text))


def merged_runs(
    make: Callable[[int], DecodeLoop],
    memory_of: Callable[[DecodeLoop, int], Any],
    agree: Callable[[Any, Any], bool],
    at_once: int = 1,
) -> dict[tuple[Tokens], float]:
    """Return the result of `whole_runs` for one text, one round at a time, with histories of equal tokens merged.

    Args:
        make: returns a decoder of this number of equal texts, the rows of one batch; each draws for itself.
        memory_of: returns a copy of the decoder's state of a row (cache entries, lengths).
        agree: returns whether two histories of equal tokens, after any numbers of rounds, left equal states. Then the
            most probable history of a number of rounds is replayed for all.
        at_once: the largest batch.
    """
    memories: dict[Tokens, Any] = {}
    finished: dict[tuple[Tokens], float] = {}

    def play(starts: Iterable[Waiting], rounds: int) -> dict[Tokens, Waiting]:
        """Replay these histories and enumerate the last of `rounds`; return the texts that have not ended."""
        waiting: dict[Tokens, Waiting] = {}
        pending = [(start.mass / start.weight, start.path) for start in starts]
        while pending:
            played, pending = pending[:at_once], pending[at_once:]
            ends = replayed(make, [path for _, path in played], rounds)
            for (share, _), (rng, tokens, decoding, row) in zip(played, ends, strict=True):
                if rng.weight == 0:  # positive only through rounding, which differs with the size of the batch
                    continue
                pending += [(share, path) for path in rng.alternatives]
                if row is None:
                    add(finished, (tokens,), share * rng.weight)
                    continue
                memory = memory_of(decoding, row)
                same = agree(memories.setdefault(tokens, memory), memory)
                assert same, f"the state depends on more than the tokens {tokens}"
                known = waiting.setdefault(tokens, Waiting(0.0, rng.taken, rng.weight))
                known.mass += share * rng.weight
                if rng.weight > known.weight:
                    known.path, known.weight = rng.taken, rng.weight
        return waiting

    rounds, waiting = 0, play([Waiting(1.0, (), 1.0)], 0)
    while waiting:
        rounds += 1
        waiting = play(waiting.values(), rounds)
    return finished
