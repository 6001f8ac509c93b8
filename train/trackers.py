"""wandb and tensorboard, through accelerate."""

import os
from importlib.util import find_spec
from typing import Any

from accelerate import Accelerator

from draftsmith.errors import ConfigError
from draftsmith.train.recipe import Recipe

PROJECT = "draftsmith"
TRACKER_FOLDER = "tracker"


def require_tracker(tracker: str) -> None:
    """ConfigError when the tracker's package is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(f"tracker={tracker} is not installed; expected none, or: pip install 'draftsmith[{tracker}]'")


def start_tracker(accelerator: Accelerator, recipe: Recipe) -> None:
    """Open the tracker's run. Without a key wandb writes to the run's folder instead of the network."""
    if recipe.tracker == "none":
        return
    if not os.environ.get("WANDB_API_KEY"):
        os.environ.setdefault("WANDB_MODE", "offline")
    folder = os.path.join(recipe.output, TRACKER_FOLDER)
    os.makedirs(folder, exist_ok=True)
    options = {"wandb": {"name": recipe.name, "dir": folder}} if recipe.tracker == "wandb" else {}
    accelerator.init_trackers(PROJECT, config=_flat(recipe.model_dump(mode="json")), init_kwargs=options)


def tracker_row(row: dict[str, Any]) -> dict[str, float]:
    """Metrics under flat names: `train/alpha_1`, `evaluation/tau`."""
    if "evaluation" in row:
        return {f"evaluation/{key}": value for key, value in _flat(row["evaluation"]).items()}
    return {f"train/{key}": value for key, value in _flat(row).items() if key != "step"}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by a slash, lists numbered from 1; None becomes text, which every tracker takes."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}/")
        elif isinstance(value, list):
            flat |= {f"{name}_{index}": item for index, item in enumerate(value, 1)}
        else:
            flat[name] = "none" if value is None else value
    return flat
