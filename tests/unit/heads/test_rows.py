"""Numbers of rows on the host and on the device: the same on both sides, with as few uploads as possible."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transfers import counted_reads

from draftsmith.heads.rows import Columns, Counts, Rows, constant, rows_of, upload

CPU = torch.device("cpu")

DERIVED: dict[str, Callable[[Counts, Counts], Counts]] = {
    "sum": lambda a, b: a + b,
    "less": lambda a, b: a + -3,
    "none": lambda a, b: a + a.map(lambda n: -n),
    "capped": lambda a, b: a.map(lambda n: n - (n - 4) * (n > 4)),
    "flags": lambda a, b: a.map(lambda n: n > 4),
    "kept": lambda a, b: (a + b).keep([2, 0]),
    "kept twice": lambda a, b: a.keep([1, 1, 1]) + 1,
}


@pytest.mark.parametrize("name", DERIVED)
def test_counts_are_the_same_on_both_sides(name: str) -> None:
    for a, b in (([5, 2, 7], [1, 4, 2]), ([3, 3, 3], [3, 3, 3]), ([1, 2, 3], [2, 1, 0])):
        derived = DERIVED[name](Counts(a, CPU), Counts(b, CPU))
        assert derived.on_device_B.tolist() == list(derived) == derived.values


def test_counts_that_are_equal_or_follow_from_others_are_not_uploaded() -> None:
    with counted_reads(nn.Linear(1, 1)) as transfers:
        ragged, equal = Counts([5, 2, 7], CPU), Counts([4, 4, 4], CPU)
        assert (equal + 2).on_device_B.shape == (3,)
        assert not transfers.uploads
        both = ragged + equal.map(lambda n: 2 * n)
        for _ in range(3):
            both = both.keep([2, 1, 0]) + ragged
        assert both.on_device_B.shape == (3,)
    assert len(transfers.uploads) == 1, str(transfers)
    assert not transfers


PARTS: dict[str, Callable[[Rows], tuple[Any, Any]]] = {
    "counts": lambda rows: (rows.counts.on_device_B.tolist(), [len(row) for row in rows]),
    "last": lambda rows: (rows.last().on_device_B.tolist(), [row[-1] if row else 0 for row in rows]),
    "end of a path": lambda rows: (rows.after_root.last().on_device_B.tolist(), [[-1, *row][-1] + 1 for row in rows]),
    "kept": lambda rows: (numbers(rows.keep([2, 1])), [rows[2], rows[1]]),
    "after a root": lambda rows: (numbers(rows.after_root), [[0, *(number + 1 for number in row)] for row in rows]),
    "rising": lambda rows: (numbers(Rows.rising(rows.counts)), [list(range(len(row))) for row in rows]),
    "all": lambda rows: (numbers(rows), rows.lists),
}


def numbers(rows: Rows) -> list[list[int]]:
    """Return the numbers of the device, and check that padding is 0 or follows no number."""
    values, counts = rows.values_BW.tolist(), rows.counts.on_device_B.tolist()
    assert len(values[0]) == rows.width
    return [row[:count] for row, count in zip(values, counts, strict=True)]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "lists", [[[5, 9], [7], []], [[0, 1], [0], [0, 1, 2]], [[3], [3], [3]], [[], [], []], [[1, 2], [0, 2], [4, 5]]]
)
def test_rows_are_the_same_on_both_sides(name: str, lists: list[list[int]]) -> None:
    for rows in (Rows(lists, CPU), Rows.together(CPU, [[8]] * 3, lists, [[], [1, 2], [3]])[1]):
        found, expected = PARTS[name](rows)
        assert found == expected


def test_several_rows_are_one_upload() -> None:
    rng = random.Random(0)
    lists = [[[rng.randrange(9) for _ in range(rng.randrange(4))] for _ in range(4)] for _ in range(3)]
    with counted_reads(nn.Linear(1, 1)) as transfers:
        made = Rows.together(CPU, *lists)
        assert not transfers.uploads, "not before they are needed"
        kept = [rows.keep([3, 1]) for rows in made]
        read = [numbers(rows) for rows in made]
        assert [numbers(rows) for rows in kept] == [[rows[3], rows[1]] for rows in lists]
    assert read == lists
    assert len(transfers.uploads) == 1


def test_copies_of_rows() -> None:
    values = upload([[1, 2], [3, 4]], CPU)
    copied = rows_of(values, [1, 0, 1])
    assert copied.tolist() == [[3, 4], [1, 2], [3, 4]]
    copied.zero_()
    assert values.tolist() == [[1, 2], [3, 4]]
    assert rows_of(values, []).shape == (0, 2)


def test_constants_that_are_equal_in_python_have_the_dtype_that_was_asked_for() -> None:
    assert constant((0, 1), CPU).dtype == torch.long
    assert constant((False, True), CPU, torch.bool).dtype == torch.bool
    assert constant((0, 1), CPU).dtype == torch.long


@pytest.mark.parametrize("first", [[2, 2, 2], [0, 3, 1]])
@pytest.mark.parametrize("width", [1, 3])
def test_columns_are_those_that_begin_at_the_first_of_each_row(first: list[int], width: int) -> None:
    values_BQX = torch.arange(3 * 6 * 2).view(3, 6, 2)
    chosen = Columns(Counts(first, CPU), width).of(values_BQX)
    assert torch.equal(chosen, torch.stack([values_BQX[row, at : at + width] for row, at in enumerate(first)]))
    assert chosen.is_contiguous()
    assert Columns(Counts([0, 0, 0], CPU), width).of(chosen) is chosen, "there are no others"
