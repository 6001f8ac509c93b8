"""What depends on how a run is launched: on how many processes, and on what machine."""

import os

import torch

from draftsmith.distill.embedded_training import bf16_is_fast
from draftsmith.errors import ConfigError
from draftsmith.train.recipe import Recipe


def on_cpu() -> bool:
    """Whether this is one of several processes on a machine without accelerators, which accelerate has to be told."""
    return "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def precision(recipe: Recipe) -> str:
    """accelerate's name of it; 'auto' asks the machine."""
    if recipe.train.mixed_precision != "auto":
        return recipe.train.mixed_precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return "bf16" if bf16_is_fast(device) else "no"


def require_divisible(recipe: Recipe, processes: int) -> None:
    """ConfigError for a global batch that the processes and accumulation steps cannot share evenly."""
    parts = processes * recipe.train.gradient_accumulation
    if recipe.train.batch_size % parts:
        raise ConfigError(
            f"train.batch_size={recipe.train.batch_size}; expected a multiple of {parts} = {processes} processes x "
            f"gradient_accumulation={recipe.train.gradient_accumulation}"
        )
