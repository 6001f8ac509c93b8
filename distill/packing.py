"""Packing: several samples in one row, with little padding, and without attention between samples."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, concatenate_datasets

from draftsmith.distill.dataset import FEATURES

AT_ONCE = 1000
"""Packed rows that are converted from Python lists at a time; lists take several times the memory of columns."""


def pack(rows: Dataset, width: int) -> Dataset:
    """Return rows of at most `width` tokens: `input_ids`, `spans`, and `documents`, the lengths of the samples in each.

    `answers`, the spans of answers beside those of all trained tokens, are kept where the rows have them.

    Best-fit decreasing: samples are placed, longest first, into the fullest row that has room for them. A sample that
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
    of_spans = [name for name in ("spans", "answers") if name in rows.column_names]
    features = Features({"input_ids": FEATURES["input_ids"], "documents": FEATURES["input_ids"]})
    features.update(dict.fromkeys(of_spans, FEATURES["spans"]))
    # Not `from_generator`: its cache on disk would not notice a change of this code.
    parts = [
        Dataset.from_list(list(_rows(rows, bins[start : start + AT_ONCE], of_spans)), features=features)
        for start in range(0, len(bins), AT_ONCE)
    ]
    return concatenate_datasets(parts)


def _rows(rows: Dataset, bins: list[list[int]], of_spans: list[str]) -> Iterator[dict[str, Any]]:
    for indices in bins:
        packed: dict[str, list[Any]] = {name: [] for name in ("input_ids", "documents", *of_spans)}
        for index in indices:
            begin, row = len(packed["input_ids"]), rows[index]
            packed["input_ids"] += row["input_ids"]
            packed["documents"].append(len(row["input_ids"]))
            for name in of_spans:
                # The first token of a document has no token before it to be predicted from.
                packed[name] += [[begin + max(1, start), begin + end] for start, end in row[name] if end > 1]
        yield packed
