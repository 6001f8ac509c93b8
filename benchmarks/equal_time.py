"""Train recipes for equal processor time, and compare their acceptance on texts that were kept out of training.

    python benchmarks/equal_time.py --seconds 240 --out runs/levers \
      --common target.model=MODEL data.prompts=FILE data.count=230 teacher.kind=cached data.validation=30 \
      --run "eagle3 eagle3/any_prompts" --run "eagle3-all eagle3/any_prompts data.train_on=all"

A run is a name, a recipe and its own overrides. The rate follows a cosine over the processor time of the steps, and the
last step ends it; samples and cached states are made before. Printed: steps, alpha by draft position on the validation
rows, and 1 + sum_k prod_{i<=k} alpha_i, which is tau if positions were accepted independently.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from draftsmith.train import trainer
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.run_folder import read_metrics

FOREVER = 1_000_000
"""Steps, of which a run takes as many as its time allows."""
WARMUP, LAST = 0.05, 0.1
"""Share of the time in which the rate rises, and of the rate at the end."""


class TimedRun(trainer.TrainingRun):
    """A run that ends with the step after which its processor time is used up."""

    seconds: float

    def __init__(self, recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
        super().__init__(recipe, accelerator, folder)
        self._began = time.process_time()
        trainer.learning_rate = self._rate

    def _rate(self, recipe: Recipe, step: int, end: int | None = None) -> float:
        done = min(1.0, (time.process_time() - self._began) / self.seconds)
        decayed = LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2
        return recipe.peak_rate * decayed * min(1.0, WARMUP + done / WARMUP)

    def step(self, step: int) -> dict[str, Any]:
        row = super().step(step)
        if time.process_time() - self._began >= self.seconds:
            self.end = step + 1
        return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="processor time of the steps of each run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--common", nargs="+", default=[], help="overrides of all recipes")
    parser.add_argument("--run", action="append", required=True, help="NAME RECIPE OVERRIDE…")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    table = Table(
        "run", "steps", "alpha by draft position", "tau", title=f"{options.seconds:g} s of processor time each"
    )
    TimedRun.seconds, trainer.TrainingRun = options.seconds, TimedRun
    rare = [f"train.{key}={FOREVER}" for key in ("steps", "evaluate_every", "checkpoint_every")]
    for text in options.run:
        name, recipe, *own = text.split()
        folder = options.out / name
        trainer.train(load_recipe(recipe, [*options.common, *rare, *own, f"output={folder}"]))
        last = next(row for row in reversed(read_metrics(folder)) if "validation" in row)
        alpha = last["validation"]["alpha"]
        tau = 1 + sum(math.prod(alpha[: k + 1]) for k in range(len(alpha)))
        table.add_row(name, str(last["step"]), " ".join(f"{value:.3f}" for value in alpha), f"{tau:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
