"""Random numbers without state: u = f(seed of the text, number of its committed tokens, index).

Nothing is counted, so a text depends neither on the texts beside it nor on how its batch computes. f is SplitMix64
(Steele et al. 2014) in two levels: output `length` of a generator that starts at the seed is the start of another one,
whose output `index` is the number. Its operations wrap around at 64 bits, as those of int64 tensors do.
"""

from functools import lru_cache

import torch
from torch import Tensor

# Shapes: B texts, N indices.

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step of SplitMix64's state: 2^64 divided by the golden ratio; as a signed number, like those below."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 53
"""Of a number in [0, 1): as many as fp64 holds."""


def round_keys(seeds_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the keys [B] of texts with these seeds and numbers of committed tokens, all int64."""
    return _output(seeds_B + (lengths_B + 1) * GOLDEN)


def uniforms(keys_B: Tensor, index_BN: Tensor) -> Tensor:
    """Return the numbers [B, N] at these indices, [B, N] or [1, N], of each key: in [0, 1) and fp64."""
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
