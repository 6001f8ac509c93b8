"""The parts of Mooncake's store that hs-connectors calls, in this process's memory, for tests without the package."""

import ctypes
import os
import re
import time
from typing import ClassVar

MISSING, DEAD = -704, -800


class MooncakeDistributedStore:
    """All instances share their objects."""

    objects: ClassVar[dict[str, bytes]] = {}
    set_up: ClassVar[list[tuple[object, ...]]] = []
    """Arguments of every connection."""
    master: ClassVar[int] = 0
    """Status of keys while the master is away, such as -900; 0: it answers."""

    def setup(self, *arguments: object) -> int:
        self.set_up.append(arguments)
        time.sleep(float(os.environ.get("BLOCKED_SECONDS", 0)))  # of another process, too
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0

    def is_exist(self, key: str) -> int:
        return self.master or int(key in self.objects)

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else MISSING

    def put(self, key: str, value: bytes) -> int:
        self.objects[key] = value
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        return self.put(key, ctypes.string_at(address, size))

    def get_into(self, key: str, address: int, size: int) -> int:
        """Return the bytes that were copied; `DEAD` for a key whose segment has no process any more."""
        if key not in self.objects or "dead" in key:
            return DEAD if key in self.objects else MISSING
        ctypes.memmove(address, self.objects[key], size)
        return len(self.objects[key])

    def remove(self, key: str, force: bool = False) -> int:
        assert force, "a key that was read has a lease"
        return self.master or (0 if self.objects.pop(key, None) is not None else MISSING)

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        found = [key for key in self.objects if re.search(pattern, key)]
        return sum(self.remove(key, force) == 0 for key in found)
