"""The quickstart: train two drafters for the embedded target, and measure their speedup."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from draftsmith.errors import DraftsmithError
from draftsmith.eval.evaluation import Evaluation
from draftsmith.eval.journal import JOURNAL
from draftsmith.eval.run import measure, show
from draftsmith.eval.settings import Settings
from draftsmith.locks import hold_folder
from draftsmith.safe_text import Terminal

RECIPES = {"draft_model": "quickstart/draft_model", "medusa": "quickstart/medusa"}
PROMPTS, NEW_TOKENS, REPEATS = 20, 80, 3


def quickstart(out: Path) -> None:
    """Build the target, train both drafters with `accelerate launch`, measure them and write everything to `out`.

    The target, its samples and finished drafters of an earlier call are used again; the measurement is repeated.
    """
    with hold_folder("out", out):
        _quickstart(out)


def _quickstart(out: Path) -> None:
    from draftsmith.train.run_folder import metrics_of

    console = Terminal(stderr=True)
    settings = Settings(
        target="embedded",
        drafters={name: str(out / name / "drafter") for name in RECIPES},
        prompts="embedded",
        count=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        repeats=REPEATS,
    )
    started = time.perf_counter()
    with _stage(console, "1/4 The target: a tokenizer and a small Llama, from the standard library's source"):
        from draftsmith.distill.embedded import embedded_target

        embedded_target()
    for number, (name, recipe) in enumerate(RECIPES.items(), 2):
        with _stage(console, f"{number}/4 Drafter {name}: accelerate launch -m draftsmith.train {recipe}"):
            _launch(recipe, out / name)
    with _stage(console, "4/4 Measuring both against the target alone, on held-out prompts"):
        (out / JOURNAL).unlink(missing_ok=True)  # an earlier call may have measured other drafters
        title = "Quickstart: two drafters for the embedded target"
        evaluation = measure(settings, out, title=title, runs=metrics_of(settings.drafters))
    _write_cards(evaluation, settings)
    show(evaluation, out)
    seconds = time.perf_counter() - started
    console.print(f"\nThe quickstart took {seconds / 60:.1f} minutes. Next:")
    for line in (
        f"draftsmith generate --target embedded --drafter {out}/draft_model/drafter 'import os\\n\\ndef main('",
        f"draftsmith eval --target embedded --drafter {out}/draft_model/drafter --gamma 2 --out runs/gamma2",
        "draftsmith recipes quickstart/medusa",
    ):
        console.print(f"  {line}", soft_wrap=True)


def _write_cards(evaluation: Evaluation, settings: Settings) -> None:
    from draftsmith.hub.model_card import CardRequest, write_card
    from draftsmith.train.run_folder import read_metrics

    for name, path in settings.drafters.items():
        written = (evaluation.as_json(), name, CardRequest(licence="apache-2.0"), read_metrics(Path(path).parent))
        write_card(Path(path), *written)


def _launch(recipe: str, output: Path) -> None:
    """Train in one process of accelerate's launcher, as a user would."""
    where = [] if torch.cuda.is_available() else ["--cpu"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", *where]
    # By default accelerate gives each process one thread, as for several processes on one machine.
    command += ["--num_cpu_threads_per_process", str(torch.get_num_threads())]
    result = subprocess.run([*command, "-m", "draftsmith.train", recipe, f"output={output}"], check=False)
    if result.returncode:
        raise DraftsmithError(f"training {recipe} stopped with exit code {result.returncode}; its message is above")


@contextmanager
def _stage(console: Terminal, title: str) -> Iterator[None]:
    console.print(f"\n{title}", style="bold")
    started = time.perf_counter()
    yield
    console.print(f"  done in {time.perf_counter() - started:.0f} s")
