"""The queue of features holds for each text what a list of its own would hold."""

import random

import pytest
import torch

from draftsmith.decode.cache.committed import FeatureQueue
from draftsmith.heads.rows import Counts

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_each_text_gets_its_features_once_and_in_order(seed: int) -> None:
    rng, queue = random.Random(seed), FeatureQueue()
    expected: list[list[float]] = [[] for _ in range(8)]
    for _ in range(40):
        counts = [rng.choice([1, 1, 1, 4]) for _ in expected]  # rows without the widest one are often equal
        features_BQF = torch.rand(len(expected), 5, 1)
        queue.add(features_BQF, Counts(counts, CPU))
        for row, count in enumerate(counts):
            expected[row] += features_BQF[row, :count, 0].tolist()
        if rng.random() < 0.2 and len(expected) > 2:
            rows = rng.sample(range(len(expected)), len(expected) - 1)
            queue.keep(rows)
            expected = [expected[row] for row in rows]
        assert queue.counts == [len(held) for held in expected]
        if rng.random() < 0.6:
            taken = [rng.randint(0, len(held)) if rng.random() < 0.5 else len(held) for held in expected]
            values_BnF = queue.take(taken)
            assert values_BnF.shape == (len(expected), max(taken), 1)
            for row, count in enumerate(taken):
                assert values_BnF[row, :count, 0].tolist() == expected[row][:count]
            expected = [held[count:] for held, count in zip(expected, taken, strict=True)]
    assert queue.counts == [len(held) for held in expected]
