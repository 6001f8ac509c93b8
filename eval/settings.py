"""What a run measures, and what its arms are called."""

from dataclasses import dataclass, field
from typing import Any

Arm = tuple[str, str]
"""A drafter's name and how its drafts grow."""
BASELINE: Arm = ("target alone", "")


@dataclass(frozen=True)
class Settings:
    """What a run measures; two runs with equal settings are the same measurement made again."""

    target: str
    drafters: dict[str, str]
    """Name in the table: folder or Hub id."""
    prompts: str
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Of a Hub data set."""
    count: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    draft_lengths: tuple[int, ...] = ()
    """Chains of these lengths (gamma), each measured with each drafter."""
    policies: tuple[str, ...] = ()
    """Other ways in which drafts grow. Without any, and without draft lengths, every drafter's own chain."""
    batch_sizes: tuple[int, ...] = (1,)
    """Prompts that are decoded together, in both arms."""
    rule: str | None = None
    """The verification rule of sampled decoding; without one, the best lossless for each draft."""
    top_k: int | None = None
    top_p: float | None = None
    repeats: int = 3
    seed: int = 0
    dtype: str = "float32"
    chat_template: str | None = None
    """A file with a chat template, or the name of a shipped one, instead of the tokenizer's."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""
