"""Compare the online teacher with cached hidden states: seconds a training step, bytes a token, and error.

    python benchmarks/teachers.py                           # a draft model and EAGLE-3 on the embedded target
    python benchmarks/teachers.py --families medusa --steps 20
    python benchmarks/teachers.py --families eagle3 --target FOLDER --url http://127.0.0.1:8000 --folder /dev/shm/states

The last one adds a running vLLM, started with the layers that `draftsmith data server eagle3/embedded
target.model=FOLDER …` prints. Its states are there before a step begins, and how long that takes is printed.

Steps (teacher, drafter, objective, backward, optimizer) alternate between the teachers; medians are printed. `KL` is
the error of the stored dtype in the target's distribution, in nats a token; all logits of the vocabulary in bfloat16
would be 2 V bytes a token.
"""

import argparse
import statistics
import time

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from draftsmith.distill.hidden_state_cache import DTYPES, CachedTeacher, SignalCache
from draftsmith.distill.load_target import load_target
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.objective import Objective
from draftsmith.distill.server.states import ServedStates, ServedTeacher
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.train.launch import RunContext
from draftsmith.train.models import load_parts
from draftsmith.train.placement import placement_of
from draftsmith.train.progress import Console as TrainConsole
from draftsmith.train.recipe import load_recipe
from draftsmith.train.recipe_sections import TeacherServerSection
from draftsmith.train.step import AgreementStep, Last, batch_indices, collate, make_step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["draft_model", "eagle3"], metavar="FAMILY")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--url", help="address of a running vLLM that writes states into --folder")
    parser.add_argument("--folder")
    return parser.parse_args()


def measure(family: str, options: argparse.Namespace, table: Table) -> None:
    given = [f"target.model={options.target}", f"data.count={options.samples}", "data.response_tokens=96"]
    recipe = load_recipe(f"{family}/embedded", [*given, "target.dtype=float32", "train.mixed_precision=no"])
    accelerator = Accelerator()
    context = RunContext(recipe, accelerator, TrainConsole(False), placement_of(recipe.target, accelerator))
    target, drafter, data, _ = load_parts(context)
    online = OnlineTeacher(target.model, drafter.needs.layers)
    teachers: dict[str, OnlineTeacher | CachedTeacher] = {"online": online}
    stored = {"online": 0.0}
    for dtype in DTYPES:
        cache = SignalCache(target.model, data.rows, drafter.needs.layers, dtype)
        cache.build(cache.missing()[0], online, lambda: None)
        teachers[f"cached, {dtype}"], stored[f"cached, {dtype}"] = (
            CachedTeacher(online, cache.read),
            cache.bytes_a_token(),
        )
    served = None
    if options.url is not None:
        settings = TeacherServerSection(urls=options.url, folder=options.folder)
        served = ServedStates(settings, data.rows, target.model, drafter.needs.layers, print)
        print(
            "states: {:.2g} nats from the engine's log-probabilities, {:.2%} off".format(*served.verify(target.model))
        )
        teachers["server"], stored["server"] = ServedTeacher(served), 0.0
    waited = 0.0
    objective = Objective(**recipe.objective_options(recipe.draft_length(drafter.max_draft_length)))
    steps = {name: AgreementStep(drafter, objective, teacher) for name, teacher in teachers.items()}
    _, made, _ = make_step(recipe, target.model, drafter, online)
    seconds: dict[str, list[float]] = {name: [] for name in teachers}
    names = list(teachers)
    for step in range(options.steps + 1):
        indices = batch_indices(0, step, recipe.train.batch_size, len(data.rows))
        batch = collate(data.rows, indices, target.model.device)
        if served is not None:
            started = time.perf_counter()
            served.missing(indices)
            waited += time.perf_counter() - started
        for name in names[step % len(names) :] + names[: step % len(names)]:
            started = time.perf_counter()
            steps[name](batch, 0.0, Last())[0].backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            if step > 0:  # the first step allocates
                seconds[name].append(time.perf_counter() - started)
    if served is not None:
        print(f"{family}: waited {waited:.1f} s for the engine's states of {options.steps + 1} steps")
    base = statistics.median(seconds["online"])
    for name, teacher in teachers.items():
        median = statistics.median(seconds[name])
        cells = (f"{stored[name]:,.0f}" if stored[name] else "", f"{1000 * median:.0f}", f"{base / median:.2f}")
        table.add_row(family, name, *cells, "" if name == "online" else f"{lost(online, teacher, batch):.1e}")
    if served is not None:
        served.close()


@torch.inference_mode()
def lost(online: OnlineTeacher, teacher: CachedTeacher, batch: object) -> float:
    """Return KL(p of the target || p from the stored states), in nats per trained token."""
    exact, kept = (
        each.lm_head(each.signals(batch).hidden_BTH[batch.mask_BT]).float().log_softmax(-1)
        for each in (online, teacher)
    )
    return float(forward_kl(exact, kept).mean())


def main() -> None:
    options = arguments()
    target = load_target(options.target)
    vocab_size, width = target.model.get_output_embeddings().weight.shape
    table = Table(
        title=f"Teachers: vocabulary {vocab_size:,} ({2 * vocab_size:,} bytes a token as logits), width {width}"
    )
    for column in ("drafter", "teacher", "bytes a token", "ms a step", "online : this", "KL"):
        table.add_column(column, justify="left" if column in ("drafter", "teacher") else "right")
    for family in options.families:
        measure(family, options, table)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
