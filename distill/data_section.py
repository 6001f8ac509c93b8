"""The recipe's section `data`: which texts a run reads, and how the target's responses to them are sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field

from draftsmith.config import Count, Number, Section, Whole
from draftsmith.distill.server.settings import ServerSection

SELF = "self"
"""The value of `prompts` with which the target writes the prompts itself."""


class DataSection(Section):
    prompts: str = "embedded"
    """'embedded'; a file (JSONL, JSON, Parquet, text) or a folder of them; a Hub data set; or 'self': the target writes
    the user's turns of its own chat template (distill/self_prompts.py). Rows have `messages`, `conversations`
    (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`, or `input_ids` with `loss_mask`."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set."""
    count: Count = 1000
    """At most this many prompts, or samples of a file with answers."""
    prompt_tokens: Count = 48
    """Embedded prompts have this length; longer prompts of a file are left out and counted."""
    response: Literal["target", "text"] = "target"
    """'target' samples a response to each prompt from the target; 'text' uses the responses in the file, which follow
    another distribution than the one that the drafter will see."""
    response_tokens: Count = 128
    """Longest response; with several turns, everything after the first prompt. Longer ones in a file are left out and
    counted."""
    turns: Literal["first", "all"] = "first"
    """Turns of a conversation that the target answers; with 'all', each turn follows the target's own answers."""
    responses: Count = 1
    """Responses sampled for each prompt, each with its own seed; with several, a few hundred prompts suffice."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """Sampling temperature of the responses."""
    batch_size: Count = 64
    """Prompts that are decoded together."""
    drafter_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of the prompts whose responses the current drafter writes by itself; for draft models."""
    refresh_every: Count | None = None
    """Sample all responses again every so many steps, with the current drafter."""
    server: ServerSection | None = None
    """Sample the responses from a running server of the target instead of in this process; see
    distill/server/settings.py."""
    speculate: bool = True
    """Speed up that sampling with the drafter; false is faster where verifying a batch costs as much as decoding."""
    chat_template: str | None = None
    """A file with a chat template that replaces the tokenizer's."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""
    images: str | None = None
    """Folder of the images that messages name; needed for rows with images. A change inside it reads the rows again."""
    exclude_rows: list[Annotated[Whole, Field(ge=0)]] = Field(default_factory=list)
    """Rows to leave out of training and validation, by their number in failed_batch.json, such as one for which the
    target's states are not finite; may be changed when a run continues."""
    validation: Count | None = None
    """Keep the samples of this many prompts out of training, and compute the mean objective over them at every
    evaluation."""
    pack: bool = False
    """Pack several samples into one row of data.prompt_tokens + data.response_tokens, to reduce padding; attention
    stays within a sample."""

    @property
    def answered(self) -> bool:
        """Whether the responses are in the file."""
        return self.response == "text"

    @property
    def every_turn(self) -> bool:
        """Whether the target answers every turn of a conversation."""
        return self.turns == "all"
