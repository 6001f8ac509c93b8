"""The peak memory of a run is that of the time after its meter was made."""

import ctypes
import sys

import pytest
import torch

from draftsmith.train.progress import MemoryMeter

SIZE = 256 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not reset the peak of a process")
def test_memory_that_was_freed_before_does_not_count() -> None:
    """A GGUF file is converted before, with its weights in float32."""
    before = torch.ones(SIZE, dtype=torch.uint8)
    del before
    ctypes.CDLL(None).malloc_trim(0)
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.peak() < SIZE / 4
    later = torch.ones(SIZE, dtype=torch.uint8)
    assert meter.peak() > 0.9 * SIZE
    del later
    assert meter.peak() > 0.9 * SIZE
