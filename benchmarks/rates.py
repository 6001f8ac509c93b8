"""Compare optimizers and learning rates by family of drafters and width of the target (heads/configs.py).

    python benchmarks/rates.py --targets w128 --families eagle3 --settings muon:6e-3 adamw:1e-3 --steps 150
    python benchmarks/rates.py --targets FOLDER --schedules cosine wsd
    python benchmarks/rates.py --targets FOLDER --families draft_model@OTHER    # starts from the model in OTHER
    python benchmarks/rates.py --targets embedded FOLDER --settings muon:x0.25 muon:x0.5 muon:x1 muon:x2 --batch 4 \
        --steps 100 --samples 128 --response 48 --new 32 --draft-vocab 8192 --dtype bfloat16    # x1 is the default rate
    python benchmarks/rates.py --show                                    # print the table of all measurements

All runs of a target share its samples: the target continues its own openings, which it generates from BOS at T=1. Each
run is `*/any_prompts` of the family, smaller where `SMALLER` says so, with --batch sequences a step. tau is exact on
the target's own held-out texts at T=0 and T=1 (the forecast's teacher-forced pass), for a chain of the recipe's draft
length. One JSON line per run is appended to --out; runs that are in it are skipped. Lines without a `recipe` are of
`*/embedded`. Folders of two published models: real_models.py; the losses of the first step alone: starts.py.
"""

import argparse
import json
import math
import os
import shutil
import time
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from embedded_target import EmbeddedRecipe, Stage, build
from rich.console import Console
from rich.table import Table

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.policies import Chain
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.errors import DraftsmithError
from draftsmith.eval.forecast.expected_rounds import accepted
from draftsmith.eval.teacher_forced import TargetText, acceptance_measure, agreement, sample_texts
from draftsmith.heads.base import Drafter
from draftsmith.storage import cache_dir
from draftsmith.train import trainer as loop
from draftsmith.train.launch import make_accelerator
from draftsmith.train.models import width_of
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.recipe_sections import TrainSection
from draftsmith.train.run_folder import claim_output, read_metrics

FAMILIES = ("draft_model", "medusa", "eagle", "hass", "eagle3", "mtp", "peagle", "dflash")
FAMILIES += ("dspark",)
FEATURES = ("eagle3", "peagle", "dflash", "dspark", "eagle", "hass", "mtp")
"""Families that read features of several layers."""
GRID = ("muon:2e-3", "muon:6e-3", "muon:2e-2", "adamw:3e-4", "adamw:1e-3", "adamw:3e-3", "adamw:1e-2")
TARGETS = {
    "w128": EmbeddedRecipe(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        stages=(Stage(2, 300, 8, 256), Stage(4, 200, 8, 256)),
    ),
    "w256": EmbeddedRecipe(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        stages=(Stage(2, 560, 8, 256), Stage(6, 160, 8, 256), Stage(12, 100, 8, 512)),
    ),
    "w512": EmbeddedRecipe(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        stages=(Stage(2, 100, 8, 128), Stage(3, 40, 8, 128)),
    ),
}
"""Trained on this machine on the embedded corpus; w128 has 0.93M parameters, w256 8M."""
OPENING, RESPONSE, SAMPLES, HELDOUT, NEW = 16, 112, 1280, 32, 64
"""Tokens of an opening and of the longest response, training samples, held-out openings and their new tokens. The last
four are options, for large targets."""
DTYPE = "float32"
"""The target's, an option."""
VOCABULARY = ("medusa", "eagle3", "peagle", "dflash", "dspark", "eagle", "hass", "mtp")
"""Families whose lm_head may have fewer rows than the target's, with --draft-vocab."""

BLOCKS = {
    "drafter.block_size": 6,
    "drafter.num_hidden_layers": 2,
    "drafter.anchors": 16,
    "train.draft_length": 5,
    "train.gradient_accumulation": 1,
}
SMALLER = {
    "eagle3": {"drafter.train_steps": 4},
    "peagle": {"drafter.num_tokens": 5, "train.draft_length": 5},
    "dflash": BLOCKS,
    "dspark": BLOCKS | {"drafter.markov_rank": 64, "drafter.confidence_head": True},
}
"""Keys of `*/any_prompts` that these runs change, by family."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--targets", nargs="+", default=list(TARGETS), help=f"{', '.join(TARGETS)}, embedded or folders"
    )
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--settings", nargs="+", default=list(GRID), metavar="OPTIMIZER:RATE")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target")
    parser.add_argument("--schedules", nargs="+", default=["cosine"], choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--draft-vocab", type=int, help="for targets with a larger vocabulary")
    for name, value in {"response": RESPONSE, "samples": SAMPLES, "heldout": HELDOUT, "new": NEW}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/rates.jsonl"))
    parser.add_argument("--show", action="store_true", help="print the table without running anything")
    return parser.parse_args()


def wsd(settings: TrainSection, step: int, _: int | None = None) -> float:
    """Return the rate of a warm-up, a constant phase, and a linear decay to a tenth over the last fifth."""
    left = (settings.steps - step) / settings.steps
    warmup = max(1, int(settings.steps * settings.warmup_fraction))
    return settings.learning_rate * min((step + 1) / warmup, 0.1 + 0.9 * min(1.0, left / 0.2))


def constant(settings: TrainSection, step: int, _: int | None = None) -> float:
    """Return the rate of a warm-up without decay."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.steps * settings.warmup_fraction))


SCHEDULES = {"cosine": TrainSection.rate, "wsd": wsd, "constant": constant}


@lru_cache(1)
def loaded(name: str) -> LoadedTarget:
    if name not in TARGETS:
        return load_target(name, dtype=DTYPE)
    folder = cache_dir() / "rates" / "targets" / name
    if not folder.is_dir():
        build(folder, TARGETS[name])
    return load_target(str(folder), dtype=DTYPE)


@lru_cache(1)
def openings(name: str) -> list[str]:
    """Return distinct beginnings of texts that the target generates from its BOS."""
    file = cache_dir() / "rates" / f"{Path(name).name}.json"
    if not file.is_file():
        target = loaded(name)
        decoder, bos = SpeculativeDecoder(target.model), target.tokenizer.bos_token_id
        texts: list[list[int]] = []
        for seed in range(0, 2 * (SAMPLES + HELDOUT), 128):
            options = {"max_new_tokens": OPENING, "temperature": 1.0, "seeds": seed}
            texts += [output.tokens for output in decoder.generate_batch([[bos]] * 128, **options)]
        written = [target.tokenizer.decode(text, skip_special_tokens=True) for text in texts]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(list(dict.fromkeys(text for text in written if text.strip()))), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


@lru_cache(2)
def heldout(name: str, temperature: float) -> list[TargetText]:
    target = loaded(name)
    prompts = [target.tokenizer(text)["input_ids"] for text in openings(name)[:HELDOUT]]
    return sample_texts(target.model, prompts, Sampling(temperature), max_new_tokens=NEW)


def tau(name: str, drafter: Drafter, draft_length: int, temperature: float) -> float:
    """Return tau of the chain, exact on the held-out texts."""
    sampling, texts = Sampling(temperature), heldout(name, temperature)
    tables = agreement(loaded(name).model, drafter, texts, draft_length, acceptance_measure(Processors(sampling)))
    rounds = [accepted(Chain(draft_length), *pair, sampling) for pair in zip(tables, texts, strict=True)]
    return sum(text.tokens for text in rounds) / sum(text.rounds for text in rounds)


def recipe_of(wanted: dict[str, Any]) -> Recipe:
    """Return the recipe of a run, without a rate where `wanted` has none."""
    name, steps = wanted["target"], wanted["steps"]
    target, family = loaded(name), wanted["family"].partition("@")[0]
    text = target.model.config.get_text_config(decoder=True)
    overrides = {
        "output": cache_dir() / "rates" / f"run-{os.getpid()}",
        "target.model": target.name,
        "target.dtype": DTYPE,
        "data.prompts": cache_dir() / "rates" / f"{Path(name).name}.jsonl",
        "data.count": SAMPLES,
        "data.prompt_tokens": 3 * OPENING,
        "data.response_tokens": RESPONSE,
        "data.temperature": 1.0,
        "teacher.kind": "cached",
        "train.optimizer": wanted["optimizer"],
        "train.steps": steps,
        "train.batch_size": wanted["batch"],
        "train.seed": wanted["seed"],
        "train.evaluate_every": 10 * steps,
        "train.checkpoint_every": 10 * steps,
        "evaluation.count": 1,
        "evaluation.max_new_tokens": 2,
        **SMALLER.get(family, {}),
    }
    if "rate" in wanted:
        overrides["train.learning_rate"] = wanted["rate"]
    if start := wanted["family"].partition("@")[2]:
        overrides |= {"drafter.model": start, "drafter.init": "random"}
    rows = wanted.get("draft_vocab")
    if rows is not None and family in VOCABULARY and text.vocab_size > rows:
        overrides["drafter.draft_vocab_size"] = rows
    depth = text.num_hidden_layers
    if family in FEATURES and depth < 4:  # too few for the default choice of layers
        overrides["drafter.layers"] = list(range(1, depth))
    folder = "dflash" if family == "dspark" else family
    return load_recipe(f"{folder}/any_prompts", [f"{key}={value}" for key, value in overrides.items()])


def rate_of(setting: str, wanted: dict[str, Any]) -> float:
    """Return the rate that a setting names, as a number or as `x` and a multiple of the default rate."""
    if not setting.startswith("x"):
        return float(setting)
    width = width_of(loaded(wanted["target"]).model.config)
    default = recipe_of(wanted).default_rate(width)
    assert default is not None, "Muon and AdamW have default rates"
    return float(f"{float(setting[1:]) * default:.2e}")


def run(wanted: dict[str, Any]) -> dict[str, Any]:
    """Train a drafter with the options in `wanted` and measure it."""
    name, started = wanted["target"], time.perf_counter()
    recipe, width = recipe_of(wanted), width_of(loaded(name).model.config)
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in openings(name)[HELDOUT:])
    Path(str(recipe.data.prompts)).write_text(prompts, encoding="utf-8")
    output = Path(recipe.output)
    shutil.rmtree(output, ignore_errors=True)
    TrainSection.rate = SCHEDULES[wanted["schedule"]]
    result: dict[str, Any] = {"tau": [math.nan, math.nan]}
    try:
        accelerator = make_accelerator(recipe, output)
        claim_output(recipe)
        trained = loop.TrainingRun(recipe, accelerator, output)
        trained.train()
        trained.record.close()
        trained.drafter.eval()
        result["tau"] = [
            round(tau(name, trained.drafter, trained.draft_length, temperature), 3) for temperature in (0.0, 1.0)
        ]
    except DraftsmithError as error:
        result["error"] = str(error)[:200]
    rows = [row for row in read_metrics(output) if "loss" in row]
    losses = [row["loss"] for row in rows]
    result["losses"] = [round(losses[min(place, len(losses) - 1)], 3) for place in (0, 9, 19, 39, -1) if losses]
    result["last_loss"] = round(sum(losses[-20:]) / max(1, len(losses[-20:])), 3)
    result["alpha"] = [round(sum(row["alpha"][0] for row in rows[-20:]) / max(1, len(rows[-20:])), 4)]
    result["width"] = width
    shutil.rmtree(output, ignore_errors=True)  # the weights of a large target's draft model take gigabytes
    return {**wanted, **result, "seconds": round(time.perf_counter() - started, 1)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print tau at T=0 / T=1 by family and target in rows, by optimizer and rate in columns."""
    settings = sorted({(row["optimizer"], row["rate"]) for row in rows}, key=lambda pair: (pair[0] != "muon", pair[1]))
    table = Table(title="tau at T=0 / T=1")
    for column in ("family", "target", "schedule", *(f"{kind} {rate:g}" for kind, rate in settings)):
        table.add_column(column)
    by_line: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    for row in rows:
        line = (row["family"], Path(row["target"]).name, f"{row['schedule']}, {row['steps']} x {row['batch']}")
        by_line.setdefault((*line, row["seed"]), {})[row["optimizer"], row["rate"]] = row["tau"]
    for (family, target, schedule, _), found in sorted(by_line.items()):
        best = max(found, key=lambda setting: sum(value for value in found[setting] if value == value))
        cells = []
        for setting in settings:
            text = " / ".join(f"{value:.2f}" for value in found[setting]) if setting in found else ""
            cells.append(f"[bold]{text}[/]" if setting == best else text)
        table.add_row(family, target, schedule, *cells)
    Console(width=220).print(table)


def main() -> None:
    global RESPONSE, SAMPLES, HELDOUT, NEW, DTYPE
    options = arguments()
    RESPONSE, SAMPLES, HELDOUT, NEW = options.response, options.samples, options.heldout, options.new
    DTYPE = options.dtype
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    keys = ("target", "family", "schedule", "optimizer", "rate", "steps", "batch", "seed")
    done = {tuple(row[key] for key in keys) for row in rows if "recipe" in row}  # folders by their last part
    for target, family, schedule, setting, seed in (
        []
        if options.show
        else product(options.targets, options.families, options.schedules, options.settings, options.seeds)
    ):
        optimizer, _, rate = setting.partition(":")
        wanted = {"target": target, "family": family, "schedule": schedule, "optimizer": optimizer}
        wanted |= {"steps": options.steps, "batch": options.batch, "seed": seed}
        if options.draft_vocab is not None:
            wanted["draft_vocab"] = options.draft_vocab
        wanted["rate"] = rate_of(rate, wanted)
        names = {"target": Path(target).name, "family": "@".join(Path(part).name for part in family.split("@"))}
        if tuple((wanted | names)[key] for key in keys) in done:
            continue
        row = {**run(wanted), **names, "setting": rate, "recipe": "any_prompts", "dtype": DTYPE}
        rows.append(row)
        print(json.dumps(row), flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
