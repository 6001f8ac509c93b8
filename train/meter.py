"""The memory that a process has really taken."""

import sys
from pathlib import Path

import psutil
import torch

if sys.platform != "win32":
    import resource


class MemoryMeter:
    """From the moment it is made; to be made before models are loaded.

    On an accelerator it asks torch's allocator. On a CPU it compares the process's resident memory with that at the
    beginning, so that what Python and its libraries take does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._before = psutil.Process().memory_info().rss
        self._most = 0

    def peak(self) -> int:
        """Most bytes so far."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        # Linux counts each core's share apart, so that its own maximum can fall by a few pages.
        self._most = max(self._most, _most_resident() - self._before)
        return self._most


def in_units(count: float) -> str:
    """Bytes as people write them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _most_resident() -> int:
    """The most memory that the process has had at once, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the process that started this one had at that moment
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
