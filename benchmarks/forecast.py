"""Compare the forecast's tau and speedup with those of the decoder.

    python benchmarks/forecast.py acceptance                # tau: any machine, noisy or not
    python benchmarks/forecast.py speed                     # speedup: a quiet machine
    python benchmarks/forecast.py coverage                  # `speed`, and coverage of its intervals
    python benchmarks/forecast.py report --plots docs       # tables and plots of the stored cells

Without --drafter, drafters of the embedded target are trained for a few steps. They are stored in --out with every
finished cell, and a later call continues. A cell is a drafter, a temperature and a set of prompts: the forecast reads
the texts of one half of the prompts, the decoder generates those of the other half. The decoder's texts are forecast,
too: there only the random draws of the rounds differ. Policies are chains of --gammas, and trees where they are exact.

`speed` measures this machine's seconds once per cell, forecasts, and times the same policies interleaved with the
target alone. Regret is the speed that the policy with the highest forecast loses relative to the fastest measured one.
`coverage` finishes `speed` and counts the policies whose measured speedup is in the forecast's interval. A measured
speedup has its own noise, from few prompts and repeats, which no forecast covers. Therefore a second count uses the
interval of the difference, whose half-width is the root of the sum of squares of both half-widths. At T=0, where texts
are known, the timed texts themselves are forecast, too: there only the seconds differ.
"""

import argparse
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forecast_report import cells, coverage_table, report
from rich.console import Console

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import Policy, policy_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.eval.baseline import fastest_threads, threads
from draftsmith.eval.evaluation import evaluate
from draftsmith.eval.forecast.expected_rounds import (
    ExpectedRounds,
    accepted,
    needs_replay,
    of_rounds,
    replay,
    retrieved,
)
from draftsmith.eval.forecast.hardware import measure_hardware, pass_costs
from draftsmith.eval.forecast.profile import costs_of, forecast_row, profile_values
from draftsmith.eval.prompts import Prompt, load_prompts
from draftsmith.eval.settings import Settings
from draftsmith.eval.teacher_forced import (
    TOGETHER,
    TargetText,
    acceptance_measure,
    agreement,
    sample_texts,
    target_text,
)
from draftsmith.heads.base import Drafter
from draftsmith.metrics import tau
from draftsmith.storage import write_json
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import DRAFTER
from draftsmith.train.trainer import train

FAMILIES = ("draft_model", "medusa", "eagle", "mtp")
UNTRAINED = {"early-exit": "early-exit:layers=8", "prompt-lookup": "prompt-lookup"}
STEPS = 60
SEED = 1_000_003


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("acceptance", "speed", "coverage", "report"))
    parser.add_argument("--target", default="embedded")
    parser.add_argument(
        "--drafter", action="append", metavar="NAME=FOLDER", help="default: a few that are trained here"
    )
    parser.add_argument("--prompt-set", action="append", metavar="NAME=FILE", help="default: held-out code and prose")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--trees", nargs="*", default=["best-first:size=9,depth=3"])
    parser.add_argument(
        "--prompts", type=int, default=128, help="prompts per set; half of them are forecast, half decoded"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of the timing")
    parser.add_argument("--timed-prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/forecast-study"))
    parser.add_argument("--plots", type=Path, help="folder for report's plots")
    return parser.parse_args()


def drafter_folders(options: argparse.Namespace) -> dict[str, str]:
    """Return the drafters of --drafter, or train a few families for some steps each."""
    if options.drafter:
        return dict(entry.split("=", 1) for entry in options.drafter)
    folders = {}
    for family in FAMILIES:
        folder = options.out / "drafters" / family
        data = ["data.count=1024", "data.temperature=1.0"]
        steps = [f"train.steps={STEPS}", f"train.evaluate_every={STEPS}", f"train.checkpoint_every={STEPS}"]
        if not (folder / DRAFTER).is_dir():
            train(load_recipe(f"{family}/embedded", [f"output={folder}", *data, *steps, "evaluation.count=2"]))
        folders[family] = str(folder / DRAFTER)
    return folders | UNTRAINED


def prompt_sets(options: argparse.Namespace, target: LoadedTarget) -> dict[str, list[Prompt]]:
    """Return the prompts of --prompt-set, or held-out modules and the prose of Python's manual."""
    limit = 48
    if options.prompt_set:
        found = {}
        for entry in options.prompt_set:
            name, _, source = entry.partition("=")
            rows = load_prompts(source, target.tokenizer, count=options.prompts)
            found[name] = [Prompt(row.id, row.category, row.input_ids[:limit]) for row in rows]
        return found
    return {
        "code": load_prompts("embedded", target.tokenizer, count=options.prompts),
        "prose": _prose(target, options.prompts, limit),
    }


def _prose(target: LoadedTarget, count: int, length: int) -> list[Prompt]:
    """Return paragraphs of `pydoc`'s topics, which are part of every Python."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    ids = [target.tokenizer(text, verbose=False)["input_ids"][:length] for text in paragraphs if len(text) > 300]
    order = np.random.default_rng(0).permutation(len(ids))[:count]
    return [Prompt(f"prose-{i}", "prose", ids[i]) for i in order]


def policies_of(drafter: Drafter, options: argparse.Namespace) -> list[Policy | None]:
    if drafter.only_retrieves:
        return [None]
    reach = drafter.max_draft_length or max(options.gammas)
    chains = [f"chain:draft_length={gamma}" for gamma in options.gammas if gamma <= reach]
    return [policy_named(text) for text in [*chains, *options.trees]]


def predicted(
    target: LoadedTarget, drafter: Drafter, policies: list[Policy | None], texts: list[TargetText], sampling: Sampling
) -> dict[str, list[ExpectedRounds]]:
    """Return the expected rounds of each policy on each text."""
    tables, found = [], {}
    if not drafter.only_retrieves:
        measure = acceptance_measure(Processors(sampling))
        tables = agreement(target.model, drafter, texts, max(policy.longest for policy in policies), measure)
    copies = [retrieved(drafter, text) for text in texts]
    for policy in policies:
        if needs_replay(policy, sampling):
            rounds = replay(target.model, drafter, policy, texts, sampling, TOGETHER)
            found[str(policy)] = [of_rounds(*pair) for pair in zip(texts, rounds, strict=True)]
        else:
            found[str(policy)] = [
                accepted(policy, table, text, sampling, retrieved=copied, reach=drafter.max_draft_length)
                for table, text, copied in zip(tables or [{}] * len(texts), texts, copies, strict=True)
            ]
    return found


def tau_of(per_text: list[ExpectedRounds]) -> float:
    return tau([text.tokens for text in per_text], [text.rounds for text in per_text])


@cache
def target_alone(
    target: LoadedTarget, prompts: tuple[tuple[int, ...], ...], sampling: Sampling, max_new_tokens: int
) -> list[TargetText]:
    """Return the target's texts, which are the same for all drafters."""
    texts = sample_texts(target.model, list(map(list, prompts)), sampling, max_new_tokens=max_new_tokens)
    return [text for text in texts if text.anchors]


def acceptance_cell(
    target: LoadedTarget, drafter: Drafter, prompts: list[Prompt], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Forecast from the texts of every second prompt and decode the others with every policy."""
    sampling, policies = Sampling(temperature), policies_of(drafter, options)
    settings = {"max_new_tokens": options.max_new_tokens}
    ids = tuple(tuple(prompt.input_ids) for prompt in prompts[::2])
    texts = target_alone(target, ids, sampling, options.max_new_tokens)
    found = predicted(target, drafter, policies, texts, sampling)
    rows = []
    for policy in policies:
        decoder = SpeculativeDecoder(target.model, drafter, policy=policy)
        outs = []
        for start in range(1, len(prompts), 2 * TOGETHER):
            ids = [prompt.input_ids for prompt in prompts[start : start + 2 * TOGETHER : 2]]
            outs += decoder.generate_batch(ids, seeds=SEED + start, temperature=temperature, **settings)
        outs = [out for out in outs if out.rounds]
        written = [target_text(target.model, out.prompt_tokens, out.tokens, options.max_new_tokens) for out in outs]
        again = predicted(target, drafter, [policy], written, sampling)
        rows.append(
            {
                "policy": str(policy),
                "tau": tau([out.decode_tokens for out in outs], [len(out.rounds) for out in outs]),
                "tau_forecast": tau_of(found[str(policy)]),
                "tau_forecast_of_same_texts": tau_of(again[str(policy)]),
                "noise": _noise([out.decode_tokens / len(out.rounds) for out in outs]),
            }
        )
    return {"texts": len(texts), "rows": rows}


def _noise(taus: list[float]) -> float:
    """Return the relative standard error of tau over these texts, a lower bound for forecasts from other texts."""
    return float(np.std(taus) / len(taus) ** 0.5 / np.mean(taus))


def speed_cell(
    target: LoadedTarget, name: str, drafter: Drafter, prompts: list[Prompt], temperature: float,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Return forecast and timed speedup of every policy at batch size 1; the forecast reads other prompts."""
    sampling, policies = Sampling(temperature), policies_of(drafter, options)
    timed, read = prompts[: options.timed_prompts], prompts[options.timed_prompts :]
    with threads(fastest_threads(target.model, timed[0].input_ids)):
        ids = tuple(tuple(prompt.input_ids) for prompt in read)
        texts = target_alone(target, ids, sampling, options.max_new_tokens)
        found = predicted(target, drafter, policies, texts, sampling)
        length = max([policy.longest for policy in policies if policy is not None] or [1])
        trees = [policy for policy in policies if policy is not None and policy.fixed_length is None]
        measures = {"draft_length": length, "sampling": sampling, "policies": {name: trees}}
        hardware = measure_hardware(
            target.model, {name: drafter}, texts, pass_costs(target.model, {name: drafter}), **measures
        )
        settings = Settings(
            target=options.target,
            drafters={name: name},
            prompts="",
            temperatures=(temperature,),
            max_new_tokens=options.max_new_tokens,
            policies=tuple(str(policy) for policy in policies if policy is not None),
            repeats=options.repeats,
        )
        evaluated = evaluate(target.model, {name: drafter}, timed, settings, progress=False)
        same: dict[str, list[ExpectedRounds]] = {}
        if temperature == 0:
            ids = tuple(tuple(prompt.input_ids) for prompt in timed)
            texts = target_alone(target, ids, sampling, options.max_new_tokens)
            same = predicted(target, drafter, policies, texts, sampling)
    by_policy = {row["policy"]: row for row in evaluated.rows if row["category"] == "all"}
    if drafter.only_retrieves:
        by_policy = {"None": next(iter(by_policy.values()))}
    rows, costs = [], costs_of(hardware, name)
    for policy, per_text in found.items():
        profiles = {"interval": costs, "interval_of_texts": replace(costs, repeats=())}
        speeds = {
            key: forecast_row(per_text, name, profile, (1,), 0, policy)["speed"][0] for key, profile in profiles.items()
        }
        row = by_policy[policy]
        rows.append(
            {
                "policy": policy,
                "speedup": row["speedup"],
                "speedup_interval": row["speedup_interval"],
                "speedup_forecast": speeds["interval"]["speedup"],
                **{key: speed["speedup_interval"] for key, speed in speeds.items()},
                "interval_of_timings": of_timings(same[policy], name, costs, policy) if same else None,
                "tau": row["tau"],
            }
        )
    return {"rows": rows, "hardware": profile_values(hardware)}


def of_timings(per_text: list[ExpectedRounds], name: str, costs: Costs, policy: str) -> list[float]:
    """Return the 95 % interval of the speedup on these texts alone: one text, of which no part is resampled."""
    whole = [sum(getattr(text, key) for text in per_text) for key in ("tokens", "rounds")]
    work = sum((text.work for text in per_text), Counter())
    return forecast_row([ExpectedRounds(*whole, work)], name, costs, (1,), 0, policy)["speed"][0]["speedup_interval"]


def run(options: argparse.Namespace) -> None:
    """Compute every cell of a half that is missing, and write each when it is finished."""
    folders, target = drafter_folders(options), load_target(options.target)
    half = "acceptance" if options.half == "acceptance" else "speed"
    sets, done = prompt_sets(options, target), cells(options, half)
    for name, (which, prompts), temperature in product(folders, sets.items(), options.temperatures):
        key = f"{name}|{temperature:g}|{which}"
        if key in done:
            continue
        drafter = load_drafter(folders[name], target.model, target.tokenizer)
        if half == "acceptance":
            done[key] = acceptance_cell(target, drafter, prompts, temperature, options)
        else:
            done[key] = speed_cell(target, name, drafter, prompts, temperature, options)
        write_json(options.out / f"{half}.json", done)
        print(f"{half}: {key}", flush=True)


def main() -> None:
    options = arguments()
    if options.half == "report":
        report(options)
    else:
        torch.manual_seed(0)
        run(options)
    if options.half == "coverage":
        Console(width=120).print(coverage_table(cells(options, "speed")))


if __name__ == "__main__":
    main()
