"""Compare objectives and training data: one draft model trained in several ways.

    python benchmarks/distillation.py                       # every way, three seeds each, about an hour on 2 cores
    python benchmarks/distillation.py --ways ce_corpus kl   # some of them
    python benchmarks/distillation.py --train-only          # no measurement: for a machine that is not quiet

The draft model is the quickstart's: one layer, pruned from the embedded target, with the same number of steps for each
way. Runs are stored in --out and resumed. All drafters then decode the same held-out prompts at T=0 and T=1,
interleaved with the target alone. Intervals are 95 %, by a bootstrap over seeds and prompts; differences are between
the same seeds and prompts.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftsmith import SpeculativeDecoder, load_drafter, metrics
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads import HEADS, Drafter
from draftsmith.provenance import environment
from draftsmith.storage import write_json
from draftsmith.train.recipe import load_recipe
from draftsmith.train.trainer import train

RECIPE = "quickstart/draft_model"
WAYS: dict[str, list[str]] = {
    "ce_corpus": ["data.response=text", "objective.kind=label"],
    "kl_corpus": ["data.response=text", "objective.kind=kl"],
    "ce_samples": ["objective.kind=label"],
    "kl": ["objective.kind=kl"],
    "tv": ["objective.kind=tv"],
    "lk_lambda": ["objective.kind=lk_lambda"],
    "lk_alpha": ["objective.kind=lk_alpha"],
    "accepted_length": ["objective.mix={kl: 0.25, accepted_length: 1.0}"],
    "kl_greedy": ["objective.kind=kl", "data.temperature=0"],
}
"""Overrides of the recipe by way. `label` is cross-entropy with the text's next token."""
TITLES = {
    "before": "before distillation",
    "ce_corpus": "CE, corpus",
    "kl_corpus": "KL, corpus",
    "ce_samples": "CE, target samples",
    "kl": "KL, target samples",
    "tv": "TV, target samples",
    "lk_lambda": "LK-lambda, target samples",
    "lk_alpha": "LK-alpha, target samples",
    "accepted_length": "accepted length + KL/4, target samples",
    "kl_greedy": "KL, greedy samples",
}
TEMPERATURES = (0.0, 1.0)
DRAWS = 4000
Key = tuple[str, int, float]
"""(way, seed, temperature)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--show-only", action="store_true", help="print the stored measurement")
    return parser.parse_args()


def trained(way: str, seed: int, options: argparse.Namespace) -> Path:
    """Train the drafter of one run, or resume it, and return its folder."""
    overrides = [f"output={options.out}/{way}-{seed}", f"train.seed={seed}", f"train.steps={options.steps}"]
    overrides += [f"train.evaluate_every={options.steps}", f"train.checkpoint_every={options.steps // 4}"]
    return train(load_recipe(RECIPE, [*overrides, *WAYS[way]]))


def untrained(target: LoadedTarget) -> Drafter:
    recipe = load_recipe(RECIPE)
    return HEADS[recipe.drafter.type].from_target(target.model, **recipe.drafter_options()).eval()


def measured(drafters: dict[tuple[str, int], Drafter], target: LoadedTarget, options: argparse.Namespace) -> dict:
    """Return for each key and prompt: tokens, rounds, seconds, and sum and number of alphas, over all repeats."""
    prompts = load_prompts("embedded", target.tokenizer, count=options.prompts)
    length = load_recipe(RECIPE).train.draft_length
    arms: dict[Any, SpeculativeDecoder] = {("alone", 0): SpeculativeDecoder(target.model)}
    arms |= {key: SpeculativeDecoder(target.model, drafter, draft_length=length) for key, drafter in drafters.items()}
    for decoder in arms.values():
        decoder.generate(prompts[0].input_ids, max_new_tokens=16)
    sums = {(*arm, t): [[0.0] * 5 for _ in prompts] for arm in arms for t in TEMPERATURES}
    texts: dict[tuple[float, int], list[int]] = {}
    order = list(arms)
    places = [(r, t, n) for r in range(options.repeats) for t in TEMPERATURES for n in range(len(prompts))]
    for repeat, temperature, number in track(places, "measuring", console=Console(stderr=True)):
        random.Random(f"{repeat}:{temperature}:{number}").shuffle(order)
        for arm in order:
            settings = {"max_new_tokens": options.max_new_tokens, "temperature": temperature}
            output = arms[arm].generate(prompts[number].input_ids, seed=10_007 * repeat + number, **settings)
            if temperature == 0 and texts.setdefault((temperature, number), output.tokens) != output.tokens:
                raise AssertionError(f"{arm}: the greedy text of prompt {number} differs from the target's")
            drafted = sum(output.overlaps), len(output.overlaps)
            found = (output.decode_tokens, len(output.rounds), output.decode_seconds, *drafted)
            row = sums[(*arm, temperature)][number]
            row[:] = [a + b for a, b in zip(row, found, strict=True)]
    return sums


def tau(rows: list[list[float]], _: list[list[float]]) -> float:
    return metrics.tau([row[0] for row in rows], [row[1] for row in rows])


def alpha(rows: list[list[float]], _: list[list[float]]) -> float:
    return metrics.alpha([row[3] for row in rows], [row[4] for row in rows])


def speedup(rows: list[list[float]], alone: list[list[float]]) -> float:
    ours, theirs = (sum(row[0] for row in part) / sum(row[2] for row in part) for part in (rows, alone))
    return ours / theirs


Number = Callable[[list[list[float]], list[list[float]]], float]


def draws(
    sums: dict[Key, list[list[float]]], way: str, seeds: list[int], temperature: float, number: Number
) -> list[float]:
    """Return the number on all data, then on `DRAWS` bootstrap samples, which are the same for all ways."""
    alone, chance = sums[("alone", 0, temperature)], random.Random(0)
    values = [statistics.mean(number(_rows(sums, way, seed, temperature), alone) for seed in seeds)]
    for _ in range(DRAWS):
        places = chance.choices(range(len(alone)), k=len(alone))
        base = [alone[place] for place in places]
        picked = [_rows(sums, way, seed, temperature) for seed in chance.choices(seeds, k=len(seeds))]
        values.append(statistics.mean(number([rows[place] for place in places], base) for rows in picked))
    return values


def _rows(sums: dict[Key, list[list[float]]], way: str, seed: int, temperature: float) -> list[list[float]]:
    """Return the sums of one drafter; the untrained one is the same for every seed."""
    return sums[(way, 0 if way == "before" else seed, temperature)]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return (value, 2.5 % quantile, 97.5 % quantile)."""
    ordered = sorted(values[1:])
    return values[0], ordered[round(0.025 * len(ordered))], ordered[round(0.975 * len(ordered)) - 1]


def show(sums: dict[Key, list[list[float]]], ways: list[str], seeds: list[int]) -> dict[str, Any]:
    """Print a table for each temperature and return the numbers."""
    results: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        table = Table(title=f"T={temperature:g}: one-layer draft model, mean of {len(seeds)} seeds, 95 % intervals")
        for column in ("way", "alpha", "tau", "speedup", "tau - CE, corpus", "tau - KL, samples"):
            table.add_column(column, justify="left" if column == "way" else "right")
        bases = {way: draws(sums, way, seeds, temperature, tau) for way in ("ce_corpus", "kl") if way in ways}
        for way in ["before", *ways]:
            found = {f.__name__: draws(sums, way, seeds, temperature, f) for f in (alpha, tau, speedup)}
            cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*interval(found["alpha"]))]
            cells += ["{:.2f} [{:.2f}, {:.2f}]".format(*interval(found[name])) for name in ("tau", "speedup")]
            gains = {
                base: interval([a - b for a, b in zip(found["tau"], values, strict=True)])
                for base, values in bases.items()
            }
            cells += ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*gains[b]) if b in gains else "" for b in ("ce_corpus", "kl")]
            table.add_row(TITLES[way], *cells)
            entry = {name: interval(values) for name, values in found.items()}
            entry["tau_of_seeds"] = [tau(_rows(sums, way, seed, temperature), []) for seed in seeds]
            results.setdefault(f"T={temperature:g}", {})[way] = {**entry, "gains": gains}
        Console(width=140).print(table)
    return results


def main() -> None:
    options, console = arguments(), Console(stderr=True, highlight=False)
    seeds, folders, started = list(range(options.seeds)), {}, time.perf_counter()
    file = options.out / "measured.json"
    if options.show_only:
        stored = json.loads(file.read_text(encoding="utf-8"))["sums"]
        show({(way, seed, temperature): rows for way, seed, temperature, rows in stored}, options.ways, seeds)
        return
    for seed in seeds:
        for way in options.ways:
            folders[(way, seed)] = trained(way, seed, options)
    console.print(f"trained in {(time.perf_counter() - started) / 60:.0f} minutes")
    if options.train_only:
        return
    target = load_target("embedded")
    drafters: dict[tuple[str, int], Drafter] = {("before", 0): untrained(target)}
    drafters |= {key: load_drafter(folder, target.model, target.tokenizer) for key, folder in folders.items()}
    with torch.inference_mode():
        sums = measured(drafters, target, options)
    stored = [[*key, rows] for key, rows in sums.items()]
    write_json(file, {"environment": environment(), "sums": stored})
    write_json(options.out / "results.json", show(sums, options.ways, seeds))
    console.print(json.dumps(environment()))


if __name__ == "__main__":
    main()
