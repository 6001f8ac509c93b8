"""Measure what steps of online learning teach: tau on new texts of the target after some numbers of steps.

    python benchmarks/online_steps.py --drafter DRAFTER [--unrolled 1 2 3] [--rates 1 3] [--rows 4 8]

Greedy texts of the target are learned from, one step every `--every` tokens. The first texts are kept apart: tau is the
expected one of a round after each of their tokens. Steps are those of `draftsmith.train.online` for a drafter that
attends to the text, without comparisons and without a budget; their time is processor time of one thread.
"""

import argparse
import time
from itertools import product
from random import Random
from typing import cast

import torch

from draftsmith import load_drafter
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.load_target import EMBEDDED, LoadedTarget, load_target
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher, TargetHead
from draftsmith.eval.teacher_forced import TargetText, sample_texts, states_of
from draftsmith.heads.base import FINAL, TrainableDrafter
from draftsmith.heads.lm_head import logits_head
from draftsmith.train.learning_rates import TRAINED, scaled_rate, width_of
from draftsmith.train.online import candidate
from draftsmith.train.online.buffer import CONTEXT, ROW_TOKENS, Row, rows_of
from draftsmith.train.online.judge import scores
from draftsmith.train.online.steps import Steps

APART, PROMPT_TOKENS, FIRST, DRAFT_LENGTH = 24, 32, 64, 4
"""Texts for tau; tokens of a prompt; rows in memory before the first step; draft positions."""
GREEDY = Sampling(0.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="a drafter's folder")
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--unrolled", type=int, nargs="+", default=[candidate.UNROLLED])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="relative to the default")
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--every", type=int, default=256, help="decoded tokens per step")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    return parser.parse_args()


def stored(drafter: TrainableDrafter, target: LoadedTarget, texts: list[TargetText]) -> list[list[Row]]:
    """Return the rows of each text with the target's states."""
    teacher, final = OnlineTeacher(target.model, drafter.needs.layers), drafter.needs.layers == (FINAL,)
    found = []
    for number, text in enumerate(texts):
        hidden_TH, features_TF = states_of(teacher, text)

        def states(
            start: int, end: int, hidden_TH: torch.Tensor = hidden_TH, features_TF: torch.Tensor | None = features_TF
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return hidden_TH[start:end], None if features_TF is None else features_TF[start:end]

        found.append(list(rows_of(text, states, GREEDY, CONTEXT, final, number)))
    return found


def measure(options: argparse.Namespace, target: LoadedTarget, texts: list[list[Row]], rate: float, count: int) -> str:
    """Return the time of a step, and tau after 0, 16, 32, 64, ... steps."""
    drafter = cast(TrainableDrafter, load_drafter(options.drafter, target.model))
    learned, lm_head = candidate.Candidate(drafter, target.model), cast(TargetHead, logits_head(target.model))
    objective = Objective(draft_length=DRAFT_LENGTH, chunk_tokens=1024)
    steps = Steps(
        learned, lm_head, objective, "muon", rate * scaled_rate(TRAINED, "muon", width_of(target.model.config))
    )
    apart, fed = [row for rows in texts[:APART] for row in rows], iter(texts[APART:])
    random, pool, taus, seconds = Random(0), list[Row](), list[str](), 0.0
    for number in range(options.steps + 1):
        if number in (0, options.steps) or (number >= 16 and number & (number - 1) == 0):
            committed, rounds = scores(learned.drafter.eval(), apart, lm_head, DRAFT_LENGTH).sum(0)
            taus.append(f"{number}: {committed / rounds:.2f}")
        while len(pool) * ROW_TOKENS < FIRST * ROW_TOKENS + number * options.every:
            pool += next(fed)
        chosen, started = random.sample(pool, count), time.process_time()
        steps(chosen)
        seconds += time.process_time() - started
    return f"{1e3 * seconds / (options.steps + 1):.0f} ms a step; tau {', '.join(taus)}"


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    target = load_target(options.target)
    drafter = cast(TrainableDrafter, load_drafter(options.drafter, target.model))
    count = APART + (FIRST * ROW_TOKENS + options.steps * options.every) // options.max_new_tokens + 4
    prompts = [row.input_ids for row in embedded_prompts(target.tokenizer, "heldout", count, PROMPT_TOKENS, seed=3)]
    rows = stored(drafter, target, sample_texts(target.model, prompts, GREEDY, max_new_tokens=options.max_new_tokens))
    for unrolled, rate, together in product(options.unrolled, options.rates, options.rows):
        candidate.UNROLLED = unrolled
        found = measure(options, target, rows, rate, together)
        print(f"unrolled {unrolled}, rate {rate:g}, {together} rows: {found}", flush=True)


if __name__ == "__main__":
    main()
