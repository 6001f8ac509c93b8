"""Which prompts are decoded together."""

from dataclasses import dataclass
from itertools import groupby

from draftsmith.eval.prompts import Prompt


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, in every arm."""

    prompts: list[Prompt]
    category: str | None
    """None for what was left of several categories: it counts towards the whole only."""

    @property
    def turns(self) -> int:
        return max(prompt.turns for prompt in self.prompts)


def batches(prompts: list[Prompt], size: int) -> list[Batch]:
    """Full batches of one category each, then what is left of all categories together, the last perhaps not full."""
    full, rest = [], []
    for category, found in groupby(sorted(prompts, key=lambda p: p.category), key=lambda p: p.category):
        members = list(found)
        end = len(members) - len(members) % size
        full += [Batch(members[start : start + size], category) for start in range(0, end, size)]
        rest += members[end:]
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        categories = {prompt.category for prompt in part}
        full.append(Batch(part, categories.pop() if len(categories) == 1 else None))
    return full
