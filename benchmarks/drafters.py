"""Compare all families of drafters on one target, each trained with the same compute.

    python benchmarks/drafters.py                              # all recipes */embedded, 48 x 10^12 operations each
    python benchmarks/drafters.py --families eagle3 medusa     # some of them
    python benchmarks/drafters.py --train-only                 # no measurement: for a machine that is not quiet

A family's number of steps is the budget divided by the floating-point operations of its own step, which are counted
first; sampling the target's responses is shared and does not count, nor do evaluations. Runs are stored in --out and
resumed. Then all drafters decode the same held-out prompts greedily, as a chain and as a tree, interleaved with the
target alone. `c` is the cost of a drafter step, relative to one target forward pass. Acceptance by position is that of
the chain, given that the positions before were accepted.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from draftsmith import load_drafter
from draftsmith.decode.profiling import measure_costs
from draftsmith.distill.load_target import load_target
from draftsmith.eval.evaluation import evaluate
from draftsmith.eval.prompts import load_prompts
from draftsmith.eval.settings import Settings
from draftsmith.storage import write_json
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import DRAFTER, RECIPE, TARGET, read_metrics
from draftsmith.train.trainer import train

FAMILIES = ("draft_model", "medusa", "medusa2", "eagle", "hass", "eagle3", "mtp", "peagle")
FAMILIES += ("dflash", "dspark")
PROBE_STEPS = 4
BUDGET = 48.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, metavar="FAMILY")
    parser.add_argument("--tera", type=float, default=BUDGET, help="10^12 floating-point operations for each family")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads during training")
    parser.add_argument("--out", type=Path, default=Path("runs/drafters"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--tree",
        default="best-first:size=16,depth=5",
        help="the tree policy that is measured besides the chain",
    )
    parser.add_argument("--train-only", action="store_true")
    return parser.parse_args()


def step_flops(family: str) -> float:
    """Count the floating-point operations of a training step's matrix products, forward, backward and target."""

    def run(steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"output={folder}/run", f"train.steps={steps}", "train.evaluate_every=1000"]
            overrides += ["evaluation.count=1", "evaluation.max_new_tokens=2"]
            joint = load_recipe(f"{family}/embedded").cotrain is not None
            recipe = load_recipe(f"{family}/embedded", overrides + ["cotrain.warmup_fraction=0"] * joint)
            with FlopCounterMode(display=False) as counter:
                train(recipe)
            return counter.get_total_flops()

    return (run(1 + PROBE_STEPS) - run(1)) / PROBE_STEPS


def trained(family: str, out: Path, budget: float) -> Path:
    """Train a drafter of the family, or resume its run, and return the run's folder."""
    folder = out / family
    if (folder / RECIPE).is_file():
        steps = load_recipe(str(folder / RECIPE), [f"output={folder}"]).train.steps
    else:
        steps = max(10, round(budget * 1e12 / step_flops(family)))
    overrides = [f"output={folder}", f"train.steps={steps}"]
    overrides += [f"train.evaluate_every={max(1, steps // 3)}", f"train.checkpoint_every={max(1, steps // 3)}"]
    train(load_recipe(f"{family}/embedded", overrides))
    return folder


def measured(folder: Path, family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure chain and tree of one drafter against its target alone."""
    name = str(folder / TARGET) if (folder / TARGET).is_dir() else "embedded"
    target = load_target(name)
    drafter = load_drafter(folder / DRAFTER, target.model, target.tokenizer)
    prompts = load_prompts("embedded", target.tokenizer, count=options.prompts, context=None)
    chain = f"chain:draft_length={drafter.draft_length_hint}"
    settings = Settings(
        target=name,
        drafters={family: str(folder)},
        prompts="embedded",
        temperatures=(0.0,),
        max_new_tokens=options.max_new_tokens,
        policies=(chain, options.tree),
    )
    rows = evaluate(target.model, {family: drafter}, prompts, settings, progress=False).rows
    by_policy = {row["policy"]: row for row in rows if row["category"] == "all"}
    costs = measure_costs(target.model, drafter)
    losses = [row for row in read_metrics(folder) if "loss" in row]
    keys = ("alpha", "tau", "speedup", "acceptance_at", "greedy_identical")
    return {
        "family": family,
        "gamma": drafter.draft_length_hint,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "steps": len(losses),
        "train_seconds": sum(row["seconds"] for row in losses),
        "training_alpha": losses[-1]["alpha"],
        "c": costs.draft_seconds(1) / costs.verify_seconds(1),
        "round_cost": costs.round / costs.verify_seconds(1),
        "target_quality": drafter.target_quality,
        "chain": {key: by_policy[chain][key] for key in keys},
        "tree": {key: by_policy[options.tree][key] for key in keys},
    }


def show(results: list[dict[str, Any]], tree: str) -> None:
    table = Table(title=f"Drafters of the embedded target, T=0; tree: {tree}")
    columns = (
        "family",
        "params",
        "steps",
        "γ",
        "acceptance by position",
        "tau chain",
        "tau tree",
        "c",
        "× chain",
        "× tree",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("family", "acceptance by position") else "right")
    for row in sorted(results, key=lambda row: -row["chain"]["tau"]):
        chain, grown = row["chain"], row["tree"]
        table.add_row(
            row["family"],
            f"{row['parameters'] / 1e6:.2f}M",
            str(row["steps"]),
            str(row["gamma"]),
            " ".join(f"{value:.2f}" for value in chain["acceptance_at"]),
            f"{chain['tau']:.2f}",
            f"{grown['tau']:.2f}",
            f"{row['c']:.3f}",
            f"{chain['speedup']:.2f}",
            f"{grown['speedup']:.2f}",
        )
    Console(width=150).print(table)
    different = [
        row["family"] for row in results for plan in ("chain", "tree") if len(set(row[plan]["greedy_identical"])) > 1
    ]
    print("greedy texts that differ from the target's own:", ", ".join(different) or "none")


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    results = []
    for family in options.families:
        folder = trained(family, options.out, options.tera)
        if options.train_only:
            continue
        file = folder / "measured.json"
        if not file.is_file():
            write_json(file, measured(folder, family, options))
        results.append(json.loads(file.read_text(encoding="utf-8")))
    if results:
        write_json(options.out / "drafters.json", results)
        show(results, options.tree)


if __name__ == "__main__":
    main()
