"""Online adaptation: a trained drafter goes on learning from the prompts that its target served."""

from pathlib import Path
from typing import Any

from draftsmith.errors import ConfigError
from draftsmith.reading import read_json
from draftsmith.train.recipe import Recipe, override, parse_recipe

RATE = 0.25
"""Of the learning rate that the drafter was trained with."""

SERVED = {"subset": None, "split": "train", "responses": 1, "refresh_every": None, "drafter_share": 0.0}
"""What the first training's data had, and served prompts have not."""


def adapted_recipe(
    drafter: str, prompts: str, output: str, *, target: str | None, answered: bool, overrides: list[str]
) -> Recipe:
    """The recipe that `drafter` was trained by, turned to served prompts.

    The drafter as it is counts as the first candidate: one that is no better on held-out prompts is not kept.

    Args:
        target: by default the one that the checkpoint names.
        answered: the file holds what the target answered; else it answers again.
        overrides: `section.key=value`, which win.

    Raises:
        ConfigError: for a drafter that keeps no recipe.
    """
    values = _stored(drafter)
    train = values["train"]
    values |= {
        "name": f"{values['name']}-adapted",
        "output": output,
        "start_from": drafter,
        "target": {**values["target"], **({} if target is None else {"model": target})},
        "data": {**values["data"], **SERVED, "prompts": prompts, "response": "text" if answered else "target"},
        "teacher": {},
        "train": {**train, "learning_rate": train["learning_rate"] * RATE},
        "evaluation": {**values["evaluation"], "prompts": None},
        "cotrain": None,
    }
    for entry in overrides:
        override(values, entry)
    return parse_recipe(values, f"the recipe of {drafter}")


def _stored(drafter: str) -> dict[str, Any]:
    file = Path(drafter).expanduser() / "config.json"
    try:
        stored = read_json(file)["draftsmith"]["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"drafter={drafter} keeps no recipe; expected a folder that `draftsmith train` wrote"
        ) from error
    if stored is None:
        raise ConfigError(f"drafter={drafter} keeps no recipe; expected a folder that `draftsmith train` wrote")
    return parse_recipe(stored, f"the recipe of {drafter}").model_dump(mode="json")
