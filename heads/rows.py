"""Integers for each sequence of a batch, stored on the host and copied to the device when they are first needed there.

A round of decoding reads lengths, tokens and indices of accepted tokens on both sides, and the device may have to wait
for each copy. `Rows.together` therefore copies several lists in one upload, and arithmetic of `Counts` whose values are
on the device stays there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shapes: B rows, W integers of the longest row, Q columns of a pass, X values of a column.


def upload(values: Tensor | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a host tensor, or rows of equal length as [B, W], to the device; the host does not wait for the copy."""
    host = values if isinstance(values, Tensor) else torch.tensor(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@lru_cache(maxsize=4096)
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return values, or rows of values, as a cached tensor on the device.

    For values that repeat in later rounds, since they follow from the shape of drafts or the rows of a batch alone. The
    dtype is part of the cache's key, since (0, 1) equals (False, True).
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def rows_of(values_BX: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of these rows; indexing with a list would upload the list."""
    if not rows:
        return values_BX[:0].clone()
    return torch.stack([values_BX[row] for row in rows])


class Counts(Sequence[int]):
    """One integer for each sequence of a batch.

    Args:
        on_device: returns the counts [B] on the device; None: they are copied when they are first needed there.
    """

    def __init__(
        self, values: Iterable[int], device: torch.device, on_device: Callable[[], Tensor] | None = None
    ) -> None:
        self.values, self.device, self._on_device = list(values), device, on_device

    @classmethod
    def of(cls, values: Sequence[int], device: torch.device) -> "Counts":
        """Return `values` themselves if they are `Counts`."""
        return values if isinstance(values, Counts) else cls(values, device)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: Any) -> Any:
        return self.values[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.values == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @cached_property
    def equal(self) -> bool:
        """All rows have the same count."""
        return min(self.values) == max(self.values)

    @cached_property
    def on_device_B(self) -> Tensor:
        """The counts [B] on the device; equal ones are not copied."""
        if self.equal:
            return torch.full((len(self.values),), self.values[0], device=self.device)
        return upload([self.values], self.device)[0] if self._on_device is None else self._on_device()

    def map(self, function: Callable) -> "Counts":
        """Return `function` of each count; it is also called with the tensor of all of them."""
        return self._changed(map(function, self.values), lambda: function(self.on_device_B))

    def __add__(self, other: "Counts | int") -> "Counts":
        if isinstance(other, int):
            return self.map(lambda number: number + other)
        pairs = zip(self.values, other.values, strict=True)
        return self._changed((a + b for a, b in pairs), lambda: self.on_device_B + other.on_device_B)

    def keep(self, rows: Sequence[int]) -> "Counts":
        """Return the counts of these rows."""
        return self._changed((self.values[row] for row in rows), lambda: rows_of(self.on_device_B, rows))

    def _changed(self, values: Iterable[int], on_device: Callable[[], Tensor]) -> "Counts":
        changed = Counts(values, self.device)
        if not changed.equal:  # at once, or later rounds would keep what earlier ones were computed from
            changed.on_device_B = on_device()
        return changed


class _Upload:
    """Lists of integers of several `Rows`, which are copied to the device when the first of them is needed there."""

    def __init__(self, device: torch.device, *lists: Sequence[list[int]]) -> None:
        self._device, self._lists = device, lists

    def part(self, number: int) -> Tensor:
        """Return [B, 1 + W]: the length of each row and its integers, padded with 0."""
        return self._parts[number]

    @cached_property
    def _parts(self) -> Sequence[Tensor]:
        widths = [max(map(len, rows)) for rows in self._lists]
        packed = [
            [number for row, width in zip(together, widths, strict=True) for number in _padded(row, width)]
            for together in zip(*self._lists, strict=True)
        ]
        return upload(packed, self._device).split([1 + width for width in widths], 1)


def _padded(row: list[int], width: int) -> list[int]:
    return [len(row), *row, *[0] * (width - len(row))]


class Rows(Sequence[list[int]]):
    """A list of integers for each sequence of a batch.

    Args:
        on_device: returns their lengths and integers [B, 1 + W] on the device; None: they are copied when they are
            first needed there.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[int]],
        device: torch.device,
        on_device: Callable[[], Tensor] | None = None,
    ) -> None:
        self.lists, self.device = [list(row) for row in lists], device
        self._on_device = partial(_Upload(device, self.lists).part, 0) if on_device is None else on_device
        self.counts = Counts(map(len, self.lists), device, partial(_first_column, self._on_device))
        """The length of each row."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], device: torch.device) -> "Rows":
        """Return `lists` themselves if they are `Rows`."""
        return lists if isinstance(lists, Rows) else cls(lists, device)

    @classmethod
    def together(cls, device: torch.device, *lists: Sequence[Sequence[int]]) -> "tuple[Rows, ...]":
        """Return `Rows` of each argument, which are copied to the device in one upload."""
        own = [[list(row) for row in rows] for rows in lists]
        parts = _Upload(device, *own)
        return tuple(cls(rows, device, partial(parts.part, number)) for number, rows in enumerate(own))

    @classmethod
    def rising(cls, counts: Counts) -> "Rows":
        """Return 0, 1, …, n - 1 in each row, with n from `counts`."""

        def on_device() -> Tensor:
            most = max(counts)
            return torch.arange(-1, most, device=counts.device).repeat(len(counts), 1)

        rows = cls([list(range(count)) for count in counts], counts.device, on_device)
        rows.counts = counts
        return rows

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, row: Any) -> Any:
        return self.lists[row]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.lists == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @cached_property
    def width(self) -> int:
        """The length of the longest row."""
        return max(map(len, self.lists))

    @cached_property
    def rise_from_0(self) -> bool:
        """The integers of every row are 0, 1, 2, …"""
        return all(row == list(range(len(row))) for row in self.lists)

    @cached_property
    def values_BW(self) -> Tensor:
        """The integers on the device, padded with 0."""
        return self._on_device()[:, 1:]

    @cached_property
    def after_root(self) -> "Rows":
        """The positions of a root and of these nodes: 0, and each number plus 1."""
        if self.rise_from_0:
            return Rows.rising(self.counts + 1)
        positions = Rows([[0, *(number + 1 for number in row)] for row in self.lists], self.device)
        positions.counts = self.counts + 1
        positions.values_BW = torch.nn.functional.pad(self.values_BW + 1, (1, 0))
        return positions

    def keep(self, rows: Sequence[int]) -> "Rows":
        """Return these rows."""
        lists = [self.lists[row] for row in rows]
        width = max(map(len, lists))
        return Rows(lists, self.device, lambda: rows_of(self._on_device()[:, : 1 + width], rows))

    def last(self) -> Counts:
        """Return the last integer of each row; 0 for an empty one."""
        if self.rise_from_0:
            return self.counts.map(lambda count: count - 1 + (count == 0))

        def on_device() -> Tensor:
            return self.values_BW.gather(1, (self.counts.on_device_B[:, None] - 1).clamp_min(0))[:, 0]

        return Counts([row[-1] if row else 0 for row in self.lists], self.device, on_device)


def _first_column(on_device: Callable[[], Tensor]) -> Tensor:
    return on_device()[:, 0]


class Columns(NamedTuple):
    """The columns of a forward pass whose output is needed: `width` columns of each row, which begin at its `first`."""

    first: Counts
    width: int = 1

    def of(self, values_BQX: Tensor) -> Tensor:
        """Return a copy of these columns, [B, width, X]; the values themselves where there are no others.

        A view would do for equal columns, but bf16 products on a CPU read one 60 times slower than a copy (torch 2.13).
        """
        if values_BQX.shape[1] == self.width:
            return values_BQX
        if self.first.equal:
            start = self.first[0]
            return values_BQX[:, start : start + self.width].clone(memory_format=torch.contiguous_format)
        device = values_BQX.device
        column_Bw = self.first.on_device_B[:, None] + torch.arange(self.width, device=device)
        return values_BQX[torch.arange(len(self.first), device=device)[:, None], column_Bw]
