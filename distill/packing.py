"""Several samples in one row: little is padding, and no sample sees another."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from datasets import Dataset


def pack(rows: Dataset, width: int) -> Dataset:
    """Rows of at most `width` tokens: `input_ids`, `spans`, and `documents`, the lengths of the samples in each.

    What a teacher's file knows of the trained tokens (`top_ids`, `top_logprobs`) stays in their order.

    Samples go, longest first, into the fullest row that still has room for them (best fit, decreasing). A sample that
    is longer than `width` has a row of its own.
    """
    lengths = list(map(len, rows["input_ids"]))
    bins: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # sorted, each once
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        tightest = bisect_left(rooms, length)
        if tightest == len(rooms):
            place, room = [], max(width, length)
            bins.append(place)
        else:
            room = rooms[tightest]
            place = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(tightest)
        place.append(index)
        left = by_room.setdefault(room - length, [])
        if not left:
            insort(rooms, room - length)
        left.append(place)
    return Dataset.from_generator(_rows, gen_kwargs={"rows": rows, "bins": bins})


def _rows(rows: Dataset, bins: list[list[int]]) -> Iterator[dict[str, Any]]:
    for indices in bins:
        known = [name for name in ("top_ids", "top_logprobs") if name in rows.column_names]
        packed: dict[str, list[Any]] = {name: [] for name in ("input_ids", "spans", "documents", *known)}
        for index in indices:
            begin, row = len(packed["input_ids"]), rows[index]
            packed["input_ids"] += row["input_ids"]
            packed["documents"].append(len(row["input_ids"]))
            # The first token of a document has nothing before it to be predicted from.
            packed["spans"] += [[begin + max(1, start), begin + end] for start, end in row["spans"] if end > 1]
            for name in known:
                packed[name] += row[name]
        yield packed
