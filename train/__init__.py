"""Training: the recipe, the accelerate loop, checkpoints and resume. `train(recipe)` is the API."""

from typing import Any

__all__ = ["load_recipe", "train"]


def __getattr__(name: str) -> Any:
    # Lazily, so that reading a recipe does not load torch and accelerate.
    if name == "train":
        from draftsmith.train.trainer import train

        return train
    if name == "load_recipe":
        from draftsmith.train.recipe import load_recipe

        return load_recipe
    raise AttributeError(f"module 'draftsmith.train' has no attribute {name!r}")
