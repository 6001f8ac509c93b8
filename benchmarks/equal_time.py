"""Train recipes for equal processor time, and compare their acceptance on texts that were kept out of training.

    python benchmarks/equal_time.py --seconds 240 --out runs/levers \
      --common target.model=MODEL data.prompts=FILE data.count=230 teacher.kind=cached data.validation=30 \
      --run "eagle3 eagle3/any_prompts" --run "eagle3-all eagle3/any_prompts data.train_on=all"

A run is a name, a recipe and its own overrides. The rate follows a cosine over the processor time of the steps, and the
last step ends it; samples, cached states and the start of the weights are made before. Printed: steps, alpha by draft
position on the validation rows, and 1 + sum_k prod_{i<=k} alpha_i, which is tau if positions were accepted
independently; with its ratio to the first run's and a 95 % interval that resamples the validation texts. A run whose
folder has by_text.json is not trained again.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from draftsmith.train import trainer
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.recipe_sections import TrainSection
from draftsmith.train.run_folder import read_metrics
from draftsmith.train.validation import validation_rows

# Shapes: N texts, K draft positions, S resamples.

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
        TrainSection.rate = lambda settings, step, end=None: self._rate(settings)

    def _rate(self, settings: TrainSection) -> float:
        done = min(1.0, (time.process_time() - self._began) / self.seconds)
        decayed = LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2
        assert settings.learning_rate is not None
        return settings.learning_rate * decayed * min(1.0, WARMUP + done / WARMUP)

    def step(self, step: int) -> dict[str, Any]:
        row = super().step(step)
        if time.process_time() - self._began >= self.seconds:
            self.end = step + 1
        return row

    def train(self) -> None:
        """Train, and write the summed alpha and the tokens of each validation text by draft position."""
        super().train()
        self.drafter.eval()
        texts = []
        for row in validation_rows(self.data, self.recipe.data.exclude_rows):
            torch.manual_seed(row)  # block drafters draw the positions that they are trained at
            with torch.no_grad():
                sums = self.engine.module(self.batch([row]), 1.0, self.last)
            texts.append({"alpha": sums.alpha_K.tolist(), "count": sums.count_K.tolist()})
        (self.folder / "by_text.json").write_text(json.dumps(texts), encoding="utf-8")


def taus(texts: list[dict[str, list[float]]], drawn_SN: NDArray) -> NDArray:
    """Return 1 + sum_k prod_{i<=k} alpha_i of resampled texts, [S]."""
    alpha_NK, count_NK = (np.array([text[key] for text in texts]) for key in ("alpha", "count"))
    alpha_SK = alpha_NK[drawn_SN].sum(1) / count_NK[drawn_SN].sum(1)
    return 1 + alpha_SK.cumprod(1).sum(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="processor time of the steps of each run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--common", nargs="+", default=[], help="overrides of all recipes")
    parser.add_argument("--run", action="append", required=True, help="NAME RECIPE OVERRIDE…")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    title = f"{options.seconds:g} s of processor time each"
    table = Table("run", "steps", "alpha by draft position", "tau", "tau / the first run's", title=title)
    TimedRun.seconds, trainer.TrainingRun = options.seconds, TimedRun
    rare = [f"train.{key}={FOREVER}" for key in ("steps", "evaluate_every", "checkpoint_every")]
    drawn_SN, base_S = None, None
    for text in options.run:
        name, recipe, *own = text.split()
        folder = options.out / name
        if not (folder / "by_text.json").exists():
            trainer.train(load_recipe(recipe, [*options.common, *rare, *own, f"output={folder}"]))
        last = next(row for row in reversed(read_metrics(folder)) if "validation" in row)
        texts = json.loads((folder / "by_text.json").read_text(encoding="utf-8"))
        if drawn_SN is None or base_S is None:
            every = range(len(texts))
            drawn_SN = np.vstack([every, np.random.default_rng(0).integers(0, len(texts), (2000, len(texts)))])
            base_S = taus(texts, drawn_SN)
        tau_S = taus(texts, drawn_SN)
        low, high = np.quantile(tau_S[1:] / base_S[1:], [0.025, 0.975])
        cells = [" ".join(f"{value:.3f}" for value in last["validation"]["alpha"]), f"{tau_S[0]:.2f}"]
        table.add_row(name, str(last["step"]), *cells, f"{tau_S[0] / base_S[0]:.3f} [{low:.3f}, {high:.3f}]")
    Console().print(table)


if __name__ == "__main__":
    main()
