"""Compare tau that is estimated from held-out answers, as with an engine as the teacher, with tau that is decoded.

    python benchmarks/estimated_tau.py --steps 150 --prompts 32

Trains MTP and EAGLE-3 on the embedded target (or `--target`), then estimates from the target's own greedy answers to
held-out prompts, and decodes the same prompts with the same draft length. A row a drafter: both, and their ratio.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.dataset import HeldOut
from draftsmith.train.launch import make_accelerator
from draftsmith.train.models import with_rate
from draftsmith.train.recipe import load_recipe
from draftsmith.train.trainer import TrainingRun
from draftsmith.train.validation import estimate_acceptance, evaluate_drafter


def compare(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Train a drafter, and return its estimated and its decoded tau at temperature 0."""
    given = [f"target.model={options.target}", f"output={folder / kind}", "data.temperature=0"]
    given += [f"data.validation={options.prompts}", f"train.steps={options.steps}", "train.draft_length=4"]
    given += [f"train.evaluate_every={options.steps}", f"train.checkpoint_every={options.steps}", "train.batch_size=8"]
    given += [f"evaluation.count={options.prompts}", f"evaluation.max_new_tokens={options.tokens}"]
    given += [f"data.count={options.count}", f"data.response_tokens={options.tokens}"]
    given += [f"data.prompts={options.prompts_file or 'embedded'}", "evaluation.prompts=embedded"]
    recipe = with_rate(load_recipe(f"{kind}/any_prompts", [*given, *options.overrides]))
    run = TrainingRun(recipe, make_accelerator(recipe, folder / kind), folder / kind)
    run.train()
    rows = run.data.rows.select(range(run.data.trained, len(run.data.rows)))
    held = [HeldOut(row["input_ids"][: row["spans"][0][0]]) for row in rows][: options.prompts]
    target = run.target.model
    estimated = estimate_acceptance(run.teacher, run.drafter, run.data, recipe.evaluation, run.draft_length, run.batch)
    decoded = evaluate_drafter(target, run.drafter, held, recipe.evaluation, run.draft_length)
    assert decoded is not None
    first = SpeculativeDecoder(target).generate(held[0].input_ids, max_new_tokens=8).tokens
    start = rows[0]["spans"][0][0]
    taus = {"estimated": round(estimated["tau"], 3), "decoded": round(decoded["tau"], 3)}
    same = first == rows[0]["input_ids"][start : start + len(first)]
    return {"drafter": kind, **taus, "ratio": round(taus["estimated"] / taus["decoded"], 3), "greedy answers": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--prompts-file", help="a file of prompts; by default the embedded text")
    parser.add_argument("--count", type=int, default=256, help="prompts")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("mtp", "eagle3"):
            print(json.dumps(compare(kind, options, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
