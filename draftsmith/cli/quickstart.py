"""The quickstart: train two drafters for the embedded target, choose how they draft, and measure their speedup."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from draftsmith.cli.options import suggest
from draftsmith.errors import DraftsmithError
from draftsmith.eval.evaluation import measure, show
from draftsmith.eval.forecast.command import run as run_forecast
from draftsmith.eval.journal import JOURNAL
from draftsmith.eval.results import EVALUATION, Evaluation
from draftsmith.eval.settings import ForecastSettings, Settings
from draftsmith.reading import assignment
from draftsmith.storage import hold_folder
from draftsmith.terminal import Terminal
from draftsmith.train.progress import NO_SUGGESTIONS
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import is_finished, metrics_of, read_metrics

TITLE = "Quickstart: two drafters for the embedded target"
RECIPES = {"draft_model": "quickstart/draft_model", "mtp": "quickstart/mtp"}
ESTIMATE = "4 to 14 minutes on two CPU cores, a second call about 2"
PROMPTS, NEW_TOKENS, REPEATS = 10, 64, 2
FORECAST_PROMPTS, LONGEST_DRAFT, TREE = 4, 6, "best-first:size=4,depth=3"


def quickstart(out: Path) -> None:
    """Train both drafters with `accelerate launch`, measure them and write everything to `out`.

    Samples, finished drafters and their forecast of an earlier call are used again; the measurement is repeated.
    """
    out = Path(os.path.expanduser(out))  # as `output` of the recipes
    with hold_folder("out", out):
        _quickstart(out)


def _quickstart(out: Path) -> None:
    console, started = Terminal(stderr=True), time.perf_counter()
    trained = {name: str(out / name / "drafter") for name in RECIPES}
    drafters = {**trained, "hybrid": f"hybrid:drafter={trained['mtp']}"}
    console.print(f"4 stages, {ESTIMATE}; everything is written to {out}", soft_wrap=True)
    for number, (name, recipe) in enumerate(RECIPES.items(), 1):
        with _stage(console, f"{number}/4 Drafter {name}: accelerate launch -m draftsmith.train {recipe}"):
            if is_finished(load_recipe(recipe, [output := assignment("output", str(out / name))])):
                console.print(f"  already finished in {out / name}", soft_wrap=True)
            else:
                _launch(recipe, output)
    with _stage(console, "3/4 Forecast: the fastest draft length or tree of each; the hybrid also copies earlier text"):
        policies = chosen(_forecast(drafters, trained, out)["rows"])
        console.print("  the policy with the highest mean speedup over the temperatures is measured:")
        for name, (policy, speedups) in policies.items():
            console.print(
                f"  {name}: {policy}, {', '.join(f'{speed:.2f}x at T={at:g}' for at, speed in speedups.items())}"
            )
    settings = Settings(
        target="embedded",
        drafters=drafters,
        prompts="embedded",
        count=PROMPTS,
        policies=tuple(f"{name}={policy}" for name, (policy, _) in policies.items()),
        max_new_tokens=NEW_TOKENS,
        repeats=REPEATS,
    )
    with _stage(console, "4/4 Measuring all against the target alone, on held-out prompts"):
        for file in (JOURNAL, EVALUATION):  # an earlier call may have measured other drafters or policies
            (out / file).unlink(missing_ok=True)
        evaluation = measure(settings, out, title=TITLE, runs=metrics_of(settings.drafters))
    _write_cards(evaluation, trained)
    show(evaluation, out)
    console.print(f"\nThe quickstart took {(time.perf_counter() - started) / 60:.1f} minutes.")
    for words in following(drafters["hybrid"]):
        suggest("draftsmith", *words, to_stderr=True)


def following(drafter: str) -> list[list[str]]:
    """Return the commands that the quickstart suggests."""
    pair = ["--target", "embedded", "--drafter", drafter]
    return [["generate", *pair, "def main("], ["check", *pair], ["recipes", RECIPES["mtp"]]]


def _forecast(drafters: dict[str, str], trained: dict[str, str], out: Path) -> dict[str, Any]:
    """Return the content of `forecast.json`, that of an earlier call if no drafter was trained since."""
    file = out / "forecast" / "forecast.json"
    newest = max((Path(path) / "model.safetensors").stat().st_mtime for path in trained.values())
    if not file.is_file() or file.stat().st_mtime < newest:
        settings = ForecastSettings(
            target="embedded",
            drafters=drafters,
            prompts="embedded",
            count=FORECAST_PROMPTS,
            max_draft_length=LONGEST_DRAFT,
            policies=(TREE,),
            max_new_tokens=NEW_TOKENS,
        )
        run_forecast(settings, out / "forecast")
    return json.loads(file.read_text(encoding="utf-8"))


def chosen(rows: list[dict[str, Any]]) -> dict[str, tuple[str, dict[float, float]]]:
    """Return for each drafter the policy with the highest geometric mean of speedups, and these by temperature."""
    speedups: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        speedups[row["drafter"]][row["policy"]][row["temperature"]] = row["speed"][0]["speedup"]
    return {
        name: max(policies.items(), key=lambda entry: geometric_mean(entry[1].values()))
        for name, policies in speedups.items()
    }


def _write_cards(evaluation: Evaluation, trained: dict[str, str]) -> None:
    from draftsmith.hub.model_card import write_card

    for name, path in trained.items():
        metrics = read_metrics(Path(path).parent)
        write_card(Path(path), evaluation.as_json(), name, licence="apache-2.0", metrics=metrics)


def _launch(recipe: str, override: str) -> None:
    """Train in one process of accelerate's launcher, as a user would."""
    where = [] if torch.cuda.is_available() else ["--cpu"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", *where]
    # By default accelerate gives each process one thread, as for several processes on one machine.
    command += ["--num_cpu_threads_per_process", str(torch.get_num_threads())]
    environment = {**os.environ, NO_SUGGESTIONS: "1"}
    result = subprocess.run([*command, "-m", "draftsmith.train", recipe, override], check=False, env=environment)
    if result.returncode:
        raise DraftsmithError(f"training {recipe} stopped with exit code {result.returncode}; its message is above")


@contextmanager
def _stage(console: Terminal, title: str) -> Iterator[None]:
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    started = time.perf_counter()
    yield
    console.print(f"  done in {time.perf_counter() - started:.0f} s")
