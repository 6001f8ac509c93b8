"""What the recipes for real models take in memory and time: computed from shapes, with nothing loaded.

    python benchmarks/recipe_costs.py             # a table
    python benchmarks/recipe_costs.py --write     # also into the headers of recipes/, which is where users look

The shapes are those of tests/recipes/architectures.yaml. Memory is what `draftsmith memory` says, under bf16 autocast
on one process. Time is operations and bytes by 40 % and 50 % of what the machine can do at most, see
train/estimate/time.py; what Python and launching kernels cost comes on top of it, most of all in sampling.
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

from draftsmith.train.estimate.memory import estimate_memory
from draftsmith.train.estimate.time import MACHINES, estimate_work
from draftsmith.train.recipe import Recipe, load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]
SIZES = (8, 16, 24, 48, 80, 141)
"""GiB of the accelerators that there are."""
ROOM = 0.9
"""What of it a run may take."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="by default all whose target is in the file of shapes")
    parser.add_argument("--on", choices=tuple(MACHINES), help="by default rtx4090 where 24 GB are enough, else h100")
    parser.add_argument("--write", action="store_true", help="put both lines into the recipes")
    return parser.parse_args()


def architectures() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "tests" / "recipes" / "architectures.yaml").read_text(encoding="utf-8"))


def costs(name: str, shapes: dict[str, dict[str, Any]], on: str | None) -> tuple[str, str]:
    """The lines `CostModel` and `Time` of a recipe's header."""
    recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        if getattr(recipe.drafter, "model", None) is not None:
            AutoConfig.for_model(**shapes[recipe.drafter.model]).save_pretrained(folder)
            recipe = load_recipe(name, [f"drafter.model={folder}"])
        config = AutoConfig.for_model(**shapes[recipe.target.model])
        memory = estimate_memory(recipe, config, bf16=True)
        work = estimate_work(recipe, config, bf16=True)
    size = next((size for size in SIZES if memory.peak < ROOM * size * 2**30), None)
    device = f"one GPU of {size} GB" if size else "several GPUs, with target.sharded"
    on = on or ("rtx4090" if size and size <= 24 else "h100")
    hardware = f"{device}: {_gib(memory.training)} in training, {_gib(memory.sampling)} while it samples (computed)"
    return hardware, f"{work.on(on)} (computed)"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def write(name: str, hardware: str, time: str) -> None:
    file = ROOT / "recipes" / f"{name}.yaml"
    text = re.sub(r"(?m)^# Hardware: .*$", f"# Hardware: {hardware}", file.read_text(encoding="utf-8"), count=1)
    file.write_text(re.sub(r"(?m)^# Time:     .*$", f"# Time:     {time}", text, count=1), encoding="utf-8")


def real_recipes(shapes: dict[str, dict[str, Any]]) -> list[str]:
    recipes: dict[str, Recipe] = {name: load_recipe(name) for name in shipped_recipes()}
    return [name for name, recipe in recipes.items() if recipe.target.model in shapes]


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
