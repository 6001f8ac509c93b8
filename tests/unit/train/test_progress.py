"""Memory that a run measures, and gives back."""

import json
import subprocess
import sys

import pytest

COUNT, BYTES = 4096, 2**16
"""Tensors, each of which is small enough that glibc takes it from its heap."""
RUN = """
import json
import psutil
import torch
from draftsmith.train.progress import TRIM_EVERY, MemoryMeter

def resident():
    return psutil.Process().memory_info().rss

meter = MemoryMeter(torch.device("cpu"))
tensors = [torch.ones({numbers}) for _ in range({count})]
full = resident()
del tensors[:-1]
peaks = [meter.trimmed() for _ in range(TRIM_EVERY - 1)]
kept = resident()
peaks.append(meter.trimmed())
print(json.dumps([full, kept, resident(), *peaks]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_freed_memory_is_given_back_every_few_steps() -> None:
    """A tensor at the end of the heap keeps all that was freed before it. In a process whose heap has no gaps."""
    run = RUN.format(count=COUNT, numbers=BYTES // 4)
    printed = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True, timeout=300)
    full, kept, after, *peaks = json.loads(printed.stdout)
    assert 0.9 * COUNT * BYTES < peaks[0] <= peaks[-1] < 1.5 * COUNT * BYTES
    assert kept > full - 2**26, "otherwise nothing is shown"
    assert after < kept - 2**27
