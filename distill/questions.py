"""Numbers that belong to a question wherever it stands in a data set, and the seeds of its answers."""

import hashlib
import json
from collections import Counter

from datasets import Dataset

from draftsmith.provenance import fingerprint


def question_numbers(questions: Dataset) -> list[int]:
    """Return a number below 2**60 for each question, from its tokens, turns and images.

    Questions that are equal get different numbers, by their order.
    """
    images = questions["images"] if "images" in questions.column_names else [""] * len(questions)
    seen: Counter[str] = Counter()
    numbers = []
    for ids, turns, shown in zip(questions["input_ids"], questions["turns"], images, strict=True):
        key = fingerprint([ids, turns, json.loads(shown)["content"] if shown else ""])
        numbers.append(int(fingerprint([key, seen[key]])[:15], 16))
        seen[key] += 1
    return numbers


def text_seed(*parts: int) -> int:
    """Return a seed of 63 bits; different for different parts."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8]) >> 1
