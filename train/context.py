"""The run context of the trainer and of `draftsmith data prepare`: recipe, accelerator, console, target placement."""

from dataclasses import dataclass
from typing import Self

from accelerate import Accelerator

from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.target_placement import Placement


@dataclass(frozen=True)
class RunContext:
    """A recipe and the processes that run it."""

    recipe: Recipe
    accelerator: Accelerator
    console: Console
    placement: Placement
    """Where the target's layers are stored."""

    @classmethod
    def of(cls, recipe: Recipe, accelerator: Accelerator) -> Self:
        """Build the context of `recipe`, with a console and a target placement for this process."""
        return cls(recipe, accelerator, Console(accelerator.is_main_process), Placement(recipe, accelerator))

    @property
    def text_share(self) -> tuple[int, int]:
        """The number of shares that a batch is divided into, and the place of this process's."""
        together, accelerator = self.recipe.train.sequence_parallel, self.accelerator
        return accelerator.num_processes // together, accelerator.process_index // together
