"""Compute memory and time of the recipes for real models from shapes, without loading weights.

    python benchmarks/recipe_costs.py             # a table
    python benchmarks/recipe_costs.py --write     # also write the headers of recipes/

The shapes are those of tests/recipes/architectures.yaml. Memory is the output of `draftsmith memory`, under bf16
autocast on one process, or on as many as a recipe divides its target or texts among. Time is operations at 40 % and
bytes at 50 % of the peak of a machine with that memory, see train/estimate/time.py; Python, kernel launches and layers
that are gathered from other GPUs come on top, most of all in sampling.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from draftsmith.train.estimate.gpus import MACHINES
from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.estimate.time import estimate_work
from draftsmith.train.recipe import Recipe, load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]
SIZES = (8, 16, 24, 48, 80, 141)
"""Memory sizes of accelerators, in GiB."""
ROOM = 0.9
"""Share of the memory that a run may use."""
OF_SHARDED = 8
"""GPUs of a recipe with `target.sharded`, as in accelerate/fsdp2_8gpu.yaml."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="*", help="default: all whose target is in the file of shapes, and that were not measured"
    )
    parser.add_argument("--on", choices=tuple(MACHINES), help="default: rtx4090 to 24 GB, h100 to 80 GB, else h200")
    parser.add_argument("--write", action="store_true", help="write both lines into the recipes")
    return parser.parse_args()


def architectures() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "tests" / "recipes" / "architectures.yaml").read_text(encoding="utf-8"))


def costs(name: str, shapes: dict[str, dict[str, Any]], on: str | None) -> tuple[str, str]:
    """Return the lines `Hardware` and `Time` of a recipe's header."""
    recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        if getattr(recipe.drafter, "model", None) is not None:
            AutoConfig.for_model(**shapes[recipe.drafter.model]).save_pretrained(folder)
            recipe = load_recipe(name, [f"drafter.model={folder}"])
        config = AutoConfig.for_model(**shapes[recipe.target.model])
        count = max(recipe.train.sequence_parallel, OF_SHARDED * recipe.target.sharded)
        memory = estimate_memory(recipe, config, bf16=True, processes=count, sharded=count > 1)
        work = estimate_work(recipe, config, memory, bf16=True, processes=count)
    size = next(size for size in SIZES if memory.peak < ROOM * size * 2**30)
    gpus = "one GPU" if count == 1 else f"{count} GPUs"
    on = on or ("rtx4090" if size <= 24 else "h100" if size <= 80 else "h200")
    hardware = (
        f"{gpus} of {size} GB: {_gib(memory.training)} in training, {_gib(memory.sampling)} while it samples (computed)"
    )
    return hardware, f"{work.on(on)} (computed)"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def write(name: str, hardware: str, time: str) -> None:
    file = ROOT / "recipes" / f"{name}.yaml"
    text = re.sub(r"(?m)^# Hardware: .*$", f"# Hardware: {hardware}", file.read_text(encoding="utf-8"), count=1)
    file.write_text(re.sub(r"(?m)^# Time:     .*$", f"# Time:     {time}", text, count=1), encoding="utf-8")


def real_recipes(shapes: dict[str, dict[str, Any]]) -> list[str]:
    recipes: dict[str, Recipe] = {name: load_recipe(name) for name in shipped_recipes()}
    others = {name for name, text in shipped_recipes().items() if "\n# Measured: " in text}
    others |= {name for name, recipe in recipes.items() if recipe.teacher.kind == "server"}  # their engine samples
    return [name for name, recipe in recipes.items() if recipe.target.model in shapes and name not in others]


def main() -> None:
    options, shapes = arguments(), architectures()
    table = Table("recipe", "memory", "time", title="Recipes for real models, on one accelerator")
    for name in options.recipes or real_recipes(shapes):
        hardware, time = costs(name, shapes, options.on)
        table.add_row(name, hardware, time)
        if options.write:
            write(name, hardware, time)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
