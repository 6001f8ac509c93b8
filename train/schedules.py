"""Schedules of the learning rate after the warm-up, by name."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Place(NamedTuple):
    """The place of a step in the run."""

    done: float
    """Share of the steps after the warm-up that have been taken."""
    decayed: float
    """Share of the decay, the last `train.decay_fraction` of the steps, that has been taken; 0 before it."""


class Schedule(NamedTuple):
    """The rate of a step relative to the peak, and its description in the first line of a run."""

    share: Callable[[Place], float]
    described: str
    """`{decay}` stands for the number of steps of the decay."""


SCHEDULES = {
    "cosine": Schedule(lambda at: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * at.done)), "cosine to a tenth"),
    "linear": Schedule(lambda at: 1 - at.done, "linear to zero"),
    # Hägele et al. 2024, arXiv:2405.18392, section 3: 1 - sqrt.
    "wsd": Schedule(lambda at: 1 - math.sqrt(at.decayed), "constant, over the last {decay} steps to zero"),
    "constant": Schedule(lambda at: 1.0, "constant"),
}
"""By the names that `train.schedule` accepts."""
