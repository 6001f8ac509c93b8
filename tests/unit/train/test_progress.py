"""Memory that a run measures, and gives back."""

import sys

import psutil
import pytest
import torch

from draftsmith.train.progress import TRIM_EVERY, MemoryMeter

SIZE, COUNT = 2**14, 4096
"""Numbers of a tensor, which is small enough that glibc takes it from its heap; 256 MiB together."""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_freed_memory_is_given_back_every_few_steps() -> None:
    """A tensor at the end of the heap keeps all that was freed before it."""
    meter = MemoryMeter(torch.device("cpu"))
    tensors = [torch.ones(SIZE) for _ in range(COUNT)]
    full = psutil.Process().memory_info().rss
    del tensors[:-1]
    for _ in range(TRIM_EVERY - 1):
        peak = meter.trimmed()
    kept = psutil.Process().memory_info().rss
    assert peak > 0.9 * 4 * SIZE * COUNT
    assert kept > full - 2**26, "otherwise nothing is shown"
    assert meter.trimmed() >= peak
    assert psutil.Process().memory_info().rss < kept - 2**27
