"""Several samples in one row: little is padding, and no sample sees another."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, List, Value, concatenate_datasets

KNOWN = ("top_ids", "top_logprobs")
"""What a teacher's file knows of each trained token."""
AT_ONCE = 1000
"""Packed rows that are Python numbers at a time, which take several times the room of columns."""


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
    known = [name for name in KNOWN if name in rows.column_names]
    features = Features({name: rows.features[name] for name in ("input_ids", "spans", *known)})
    features["documents"] = List(Value("int64"))
    # Not `from_generator`, whose cache on disk does not know when this code changes.
    parts = [
        Dataset.from_list(list(_rows(rows, bins[start : start + AT_ONCE], known)), features=features)
        for start in range(0, len(bins), AT_ONCE)
    ]
    return concatenate_datasets(parts)


def _rows(rows: Dataset, bins: list[list[int]], known: list[str]) -> Iterator[dict[str, Any]]:
    for indices in bins:
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
