"""The environment variables by which a launcher tells a process its rank, and where all processes connect."""

import os
from dataclasses import dataclass

from draftsmith.errors import ConfigError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
"""The variables that are whole numbers, with the least value of each."""


@dataclass(frozen=True)
class LaunchVariables:
    """The launch of this process; by default it was started alone."""

    rank: int = 0
    processes: int = 1
    address: str | None = None
    """Host and port where all processes connect; None without a launcher."""


def launch_variables() -> LaunchVariables:
    """Read the variables from the environment.

    Raises:
        ConfigError: for values that no launcher sets, and for some of the variables without the others, as an earlier
            launch may leave them in a shell.
    """
    numbers = {name: _number(name, least) for name, least in LEAST.items() if name in os.environ}
    rank, processes = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
    if "LOCAL_RANK" not in numbers and rank == 0 and processes == 1:
        return LaunchVariables()
    present = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing or rank >= processes:
        without = f" without {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"{', '.join(present)} in the environment{without}; expected all of a launcher's variables, RANK less than "
            "WORLD_SIZE, or none of them (unset) to train in one process"
        )
    return LaunchVariables(rank, processes, f"{os.environ['MASTER_ADDR']}:{numbers['MASTER_PORT']}")


def _number(name: str, least: int) -> int:
    value = os.environ[name]
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name}={value!r} in the environment; expected a whole number >= {least}, or unset")
    return int(value)
