"""Training: the recipe, the loop, checkpoints and resuming. `train(load_recipe(…))` is the Python API."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.train.recipe import load_recipe
    from draftsmith.train.trainer import train

__all__ = ["load_recipe", "train"]


def __getattr__(name: str) -> Any:
    # Lazily, so that reading a recipe does not load accelerate and the models.
    if name == "train":
        from draftsmith.train.trainer import train

        return train
    if name == "load_recipe":
        from draftsmith.train.recipe import load_recipe

        return load_recipe
    raise AttributeError(f"module 'draftsmith.train' has no attribute {name!r}")
