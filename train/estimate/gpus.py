"""GPUs for which the memory and the time of a run are estimated."""

import re

from draftsmith.errors import ConfigError

MACHINES = {
    "h200": (989.0, 4800.0, 140),
    "h100": (989.0, 3350.0, 80),
    "a100": (312.0, 2039.0, 80),
    "l40s": (362.0, 864.0, 48),
    "rtx4090": (165.0, 1008.0, 24),
    "a10": (125.0, 600.0, 24),
    "l4": (121.0, 300.0, 24),
}
"""Dense bf16 TFLOP/s, memory bandwidth in GB/s, and memory in GiB, from the vendors' data sheets."""
USABLE = 0.94
"""Share of a GPU's memory that torch's allocator can fill; the context and fragments take the rest."""


def machine_named(name: str, key: str = "--on") -> str:
    """Return the entry of `MACHINES` for a name such as `H100`, `RTX 4090` or `A100-80GB`; ConfigError without one."""
    words = [word.removeprefix("rtx") for word in re.split(r"[^a-z0-9]+", name.lower())]
    for machine in MACHINES:
        if machine.removeprefix("rtx") in words:
            return machine
    raise ConfigError.of(key, name, f"one of {', '.join(MACHINES)}")


def room_on(machine: str) -> int:
    """Return the bytes of a machine's GPU that a run can fill."""
    return round(MACHINES[machine][2] * USABLE * 2**30)
