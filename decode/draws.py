"""The random draws of one round for several sequences: u = f(seed of the sequence, number of its tokens, index).

A draw is identified by its kind and a node of its sequence's own draft, whatever the drafts of other sequences are.
Nothing is counted, so a sequence depends neither on the sequences beside it nor on how its batch computes. f is
SplitMix64 (Steele et al. 2014) in two levels: output `length` of a generator that starts at the seed is the start of
another one, whose output `index` is u. Its operations wrap around at 64 bits, as those of int64 tensors do.
The exact tests replace `Draws` by one that enumerates all outcomes.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.decode.drafts.batch import DraftBatch
from draftsmith.decode.sampling import index_at
from draftsmith.heads.rows import Counts, constant

NOT_DRAWN = -2
"""In place of a token that nothing has drawn; no node of a draft holds it."""
KINDS = 3
"""Uniform numbers of each node: for the token that a draft draws, for its test, and for a token of the target."""
ROOM = 16
"""Nodes for which uniform numbers are computed at once; more are computed when they are needed."""
Node = int | Tensor
"""The index of a draw in its sequence, for all sequences or for each [B]."""

# Shapes: B sequences, N nodes or indices, D tokens of a chain, P nodes and the root, V vocabulary.


class Draws:
    """Random draws for B sequences with these keys of the round. The result of an inactive row has no meaning."""

    def __init__(self, keys_B: Tensor) -> None:
        self._keys_B = keys_B
        self._uniforms_BNK = first_uniforms(keys_B, KINDS * ROOM).unflatten(1, (-1, KINDS))

    def of(self, rows: Sequence[int]) -> "Draws":
        """Return the draws of these sequences."""
        if list(rows) == list(range(len(self._keys_B))):
            return self
        return Draws(self._keys_B[constant(tuple(rows), self._keys_B.device)])

    def drafted(self, weights_BV: Tensor, node: Node, active_B: Tensor | None = None) -> Tensor:
        """Return the token [B] that a draft draws as its draw number `node`, in proportion to its weights.

        The weights of active rows are not all zero.
        """
        index_B = index_at(weights_BV, self._at(0, node))[:, 0]
        return index_B if active_B is None else index_B.clamp_max_(weights_BV.shape[1] - 1)

    def chain(self, weights_BDV: Tensor) -> Tensor:
        """Return [B, D]: `drafted` for all nodes of a chain."""
        return index_at(weights_BDV, self._uniforms(0, weights_BDV.shape[1])[..., None].contiguous())[..., 0]

    def passes(self, probability_B: Tensor, node: Node, active_B: Tensor) -> Tensor:
        """Return [B] bool, the test of `node`: True with this probability; values of 1 and above are certain."""
        return self._at(1, node)[:, 0] < probability_B

    def until_failure(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        """Test the valid nodes in order until a test fails: return the number [B] of nodes before it, N if none does.

        With `valid_BN`, nodes that are not valid count as passed.
        """
        failed_BN = self._uniforms(1, probability_BN.shape[1]) >= probability_BN
        if valid_BN is not None:
            failed_BN &= valid_BN
        return (failed_BN.cumsum(1) == 0).sum(1)  # the nodes up to which no test has failed

    def longest(self, probability_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
        """Test the valid nodes from the last one on until a test passes: return its node + 1 [B], or 0."""
        N = probability_BN.shape[1]
        passed_BN = self._uniforms(1, N) < probability_BN
        if valid_BN is not None:
            passed_BN &= valid_BN
        return N - (passed_BN.flip(1).cumsum(1) == 0).sum(1)

    def next(self, weights_BV: Tensor) -> Tensor:
        """Return the token [B] after the accepted path, in proportion to its weights, which are not all zero."""
        return index_at(weights_BV, self._uniforms(2, 1))[:, 0]

    def along(self, weights_BPV: Tensor, draft: DraftBatch) -> Tensor:
        """Return [B, P]: a token after every position, in proportion to its weights [V].

        Only the tokens along one path have a meaning: the one on which each node holds the token that was drawn after
        its parent.
        """
        uniform_BP = self._uniforms(2, weights_BPV.shape[1])
        if not draft.is_chain:  # positions of equal depth use the same number: no path has two of them
            uniform_BP = uniform_BP.gather(1, draft.depths().expand(weights_BPV.shape[:2]))
        return index_at(weights_BPV, uniform_BP[..., None])[..., 0]

    def _at(self, kind: int, node: Node) -> Tensor:
        """Return the uniform number [B, 1] of one node in each row."""
        if isinstance(node, int):
            return self._uniforms(kind, node + 1)[:, node:]
        return uniforms(self._keys_B, (KINDS * node + kind)[:, None])

    def _uniforms(self, kind: int, count: int) -> Tensor:
        """Return the uniform numbers [B, count] of drafted tokens (0), of tests (1), or of the target's tokens (2)."""
        if count > self._uniforms_BNK.shape[1]:
            self._uniforms_BNK = first_uniforms(self._keys_B, KINDS * 2 * count).unflatten(1, (-1, KINDS))
        return self._uniforms_BNK[:, :count, kind]


MakeDraws = Callable[[Sequence[int], Sequence[int], torch.device], Draws]
"""Returns the draws of sequences with these seeds and counts of committed tokens; `Counts` hold `signed` seeds."""


def seeded_draws(seeds: Sequence[int], lengths: Sequence[int], device: torch.device) -> Draws:
    """Return the draws of a round of sequences with these seeds and counts of committed tokens."""
    if not isinstance(seeds, Counts):
        seeds = Counts(map(signed, seeds), device)
    return Draws(round_keys(seeds.on_device_B, Counts.of(lengths, device).on_device_B))


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step of SplitMix64's state: 2^64 divided by the golden ratio; as a signed number, like those below."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 53
"""Of a number in [0, 1): as many as fp64 holds."""


def round_keys(seeds_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the keys [B] of sequences with these seeds and counts of committed tokens, all int64."""
    return _output(seeds_B + (lengths_B + 1) * GOLDEN)


def uniforms(keys_B: Tensor, index_BN: Tensor) -> Tensor:
    """Return the uniform numbers [B, N] at these indices, [B, N] or [1, N], of each key: in [0, 1) and fp64."""
    return _unit(_output(keys_B[:, None] + (index_BN + 1) * GOLDEN))


def first_uniforms(keys_B: Tensor, count: int) -> Tensor:
    """Return `uniforms` at the indices below `count`."""
    return _unit(_output(keys_B[:, None] + _steps(count, keys_B.device)))


def signed(seed: int) -> int:
    """Return the seed, of up to 64 bits, as the number with the same bits in an int64 tensor."""
    return seed - 2**64 if seed >= 2**63 else seed


def _output(state: Tensor) -> Tensor:
    """Return SplitMix64's output for each state, in place."""
    state ^= (state >> 30) & (2**34 - 1)  # the shift of a signed number copies its sign
    state *= FIRST
    state ^= (state >> 27) & (2**37 - 1)
    state *= SECOND
    state ^= (state >> 31) & (2**33 - 1)
    return state


def _unit(output: Tensor) -> Tensor:
    return ((output >> (64 - BITS)) & (2**BITS - 1)).double().mul_(2.0**-BITS)


@lru_cache(maxsize=64)
def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * GOLDEN
