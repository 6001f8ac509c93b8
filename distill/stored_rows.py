"""Rows of a tensor in a safetensors file. They are read, and the file is not mapped into memory.

The pages of a mapped file count as memory of the process until it is closed, and each is fetched when it is touched,
which takes long on a network's file system.

A file begins with 8 bytes, the length of a header in JSON, which has the place of each tensor after the header:
https://huggingface.co/docs/safetensors/index#format.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError, reason_of


class StoredRows:
    """A tensor [N, ...] in a file that this package has written.

    Raises:
        DraftsmithError: here and in `read`, for a file that is gone, damaged or shorter than it was.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                found = json.loads(file.read(size))[name]
        except (OSError, ValueError, KeyError) as error:
            raise self._unreadable(reason_of(error)) from error
        self.shape: tuple[int, ...] = tuple(found["shape"])
        begin, end = found["data_offsets"]
        self._start, self._row_bytes = 8 + size + begin, (end - begin) // self.shape[0]

    def read(self, first: int, rows_n: Tensor) -> None:
        """Read rows from `first` on into `rows_n` [n, ...], a contiguous tensor of the stored dtype."""
        wanted = rows_n.view(torch.uint8).numpy().data
        try:
            with self._path.open("rb") as file:
                file.seek(self._start + first * self._row_bytes)
                count = file.readinto(wanted)
        except OSError as error:
            raise self._unreadable(reason_of(error)) from error
        if count != wanted.nbytes:
            raise self._unreadable("it has become shorter")

    def _unreadable(self, reason: str) -> DraftsmithError:
        return DraftsmithError(f"{self._path} cannot be read ({reason}); the same command builds it again")
