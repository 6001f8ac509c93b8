"""How far the forecast can be trusted: predicted tau and speedup beside what the decoder does, and simpler guesses.

    python benchmarks/forecast.py acceptance                # tau: any machine, noisy or not
    python benchmarks/forecast.py speed                     # speedup: a quiet machine
    python benchmarks/forecast.py coverage                  # how many measured speedups the intervals hold, of `speed`
    python benchmarks/forecast.py report --plots docs       # tables from what is there, and plots

Drafters of the embedded target are trained shortly where --drafter names none, and kept in --out with every cell that
is finished, so that each half goes on where it was. A cell is a drafter, a temperature and a set of prompts: the
forecast reads the texts of one half of the prompts, the decoder writes those of the other half. What it wrote is
forecast too: there nothing but the draws of the rounds differs. Chains of --gammas, and trees where they are exact.

`speed` measures this machine's seconds once a cell, forecasts, and times the same policies interleaved with the target
alone. Regret is what the policy with the highest forecast loses beside the one that measured fastest. `coverage` does
what is left of `speed` and counts the policies whose measured speedup lies in the forecast's interval. A measured
speedup has noise of its own, from few prompts and repeats, which no forecast can hold: so beside the plain count a
second one takes the interval of the difference, whose half-width is the root of the squares of both half-widths. And
greedy texts are known, so that at T=0 the timed texts themselves are forecast: there nothing but the seconds differs.
"""

import argparse
import json
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.policies import Policy, policy_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.eval.diagnostics import difference_measure, summary
from draftsmith.eval.evaluation import evaluate
from draftsmith.eval.forecast.expected_rounds import ExpectedRounds, accepted, needs_replay, of_rounds, retrieved
from draftsmith.eval.forecast.forecast import depth, numbers
from draftsmith.eval.forecast.hardware import CostModel, measure_hardware
from draftsmith.eval.forecast.replay import replay
from draftsmith.eval.harness import fastest_threads, threads
from draftsmith.eval.plots import COLOURS, STYLE
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
from draftsmith.storage import write_json
from draftsmith.train.recipe import load_recipe
from draftsmith.train.run_folder import DRAFTER
from draftsmith.train.trainer import train

FAMILIES = ("draft_model", "medusa", "eagle", "hydra", "mtp")
UNTRAINED = {"early-exit": "early-exit:layers=8", "prompt-lookup": "prompt-lookup"}
STEPS = 60
SEED = 1_000_003
STATISTICS = ("forward_kl", "reverse_kl", "tv", "top1_agreement", "entropy_overlap", "ece", "cosine")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("acceptance", "speed", "coverage", "report"))
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", action="append", metavar="NAME=FOLDER", help="by default a few trained here")
    parser.add_argument("--prompt-set", action="append", metavar="NAME=FILE", help="by default held-out code and prose")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--trees", nargs="*", default=["tree:widths=3x2x1"])
    parser.add_argument("--prompts", type=int, default=128, help="of a set; each half is one of the two sides")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="of the timed half")
    parser.add_argument("--timed-prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/forecast-study"))
    parser.add_argument("--plots", type=Path, help="folder for report's plots")
    return parser.parse_args()


def drafter_folders(options: argparse.Namespace) -> dict[str, str]:
    """What was named, or a few families trained for some steps each."""
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
    """Held-out modules, and the prose of Python's own manual; or files."""
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
    """Paragraphs of `pydoc`'s topics, which every Python carries."""
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
    target: LoadedTarget, drafter: Drafter, policies: list[Policy | None], texts: list[TargetText], sampling: Sampling,
    *, statistics: bool = False,
) -> tuple[dict[str, list[ExpectedRounds]], dict[str, Any] | None]:  # fmt: skip
    """Expected rounds of each policy on each text and, where asked for, the simple statistics."""
    tables, found = [], {}
    if not drafter.only_retrieves:
        measures = [acceptance_measure(Processors(sampling))]
        measures += [difference_measure(drafter, sampling.temperature)] * statistics
        tables = agreement(target.model, drafter, texts, max(map(depth, policies)), measures)
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
    return found, summary(tables) if tables and statistics else None


def tau(per_text: list[ExpectedRounds]) -> float:
    return sum(text.tokens for text in per_text) / sum(text.rounds for text in per_text)


@cache
def target_alone(
    target: LoadedTarget, prompts: tuple[tuple[int, ...], ...], sampling: Sampling, max_new_tokens: int
) -> list[TargetText]:
    """The target's texts, which serve every drafter."""
    texts = sample_texts(target.model, list(map(list, prompts)), sampling, max_new_tokens=max_new_tokens)
    return [text for text in texts if text.anchors]


def acceptance_cell(
    target: LoadedTarget, drafter: Drafter, prompts: list[Prompt], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Forecast from the texts of every second prompt; decode the others with every policy."""
    sampling, policies = Sampling(temperature), policies_of(drafter, options)
    settings = {"max_new_tokens": options.max_new_tokens}
    ids = tuple(tuple(prompt.input_ids) for prompt in prompts[::2])
    texts = target_alone(target, ids, sampling, options.max_new_tokens)
    found, statistics = predicted(target, drafter, policies, texts, sampling, statistics=True)
    rows = []
    for policy in policies:
        decoder = SpeculativeDecoder(target.model, drafter, policy=policy)
        outs = []
        for start in range(1, len(prompts), 2 * TOGETHER):
            ids = [prompt.input_ids for prompt in prompts[start : start + 2 * TOGETHER : 2]]
            outs += decoder.generate_batch(ids, seeds=SEED + start, temperature=temperature, **settings)
        outs = [out for out in outs if out.rounds]
        written = [target_text(target.model, out.prompt_tokens, out.tokens, options.max_new_tokens) for out in outs]
        again, _ = predicted(target, drafter, [policy], written, sampling)
        rows.append(
            {
                "policy": str(policy),
                "tau": sum(out.decode_tokens for out in outs) / sum(len(out.rounds) for out in outs),
                "tau_forecast": tau(found[str(policy)]),
                "tau_forecast_of_same_texts": tau(again[str(policy)]),
                "noise": _noise([out.decode_tokens / len(out.rounds) for out in outs]),
            }
        )
    return {"texts": len(texts), "rows": rows, "statistics": statistics}


def _noise(taus: list[float]) -> float:
    """Relative standard error of a tau over these texts: what no forecast from other texts can undercut."""
    return float(np.std(taus) / len(taus) ** 0.5 / np.mean(taus))


def speed_cell(
    target: LoadedTarget, name: str, drafter: Drafter, prompts: list[Prompt], temperature: float,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Forecast and timed speedup of every policy, one text at a time; the forecast reads other prompts."""
    sampling, policies = Sampling(temperature), policies_of(drafter, options)
    timed, read = prompts[: options.timed_prompts], prompts[options.timed_prompts :]
    with threads(fastest_threads(target.model, timed[0].input_ids)):
        ids = tuple(tuple(prompt.input_ids) for prompt in read)
        texts = target_alone(target, ids, sampling, options.max_new_tokens)
        found, _ = predicted(target, drafter, policies, texts, sampling)
        length = max([depth(policy) for policy in policies if policy is not None] or [1])
        measures = {"draft_length": length, "sampling": sampling}
        hardware = measure_hardware(target.model, {name: drafter}, texts, **measures)
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
            same, _ = predicted(target, drafter, policies, texts, sampling)
    by_policy = {row["policy"]: row for row in evaluated.rows if row["category"] == "all"}
    if drafter.only_retrieves:
        by_policy = {"None": next(iter(by_policy.values()))}
    rows = []
    for policy, per_text in found.items():
        profiles = {"interval": hardware, "interval_of_texts": hardware.model_copy(update={"repeats": ()})}
        speeds = {key: numbers(per_text, name, profile, (1,), 0)["speed"][0] for key, profile in profiles.items()}
        row = by_policy[policy]
        rows.append(
            {
                "policy": policy,
                "speedup": row["speedup"],
                "speedup_interval": row["speedup_interval"],
                "speedup_forecast": speeds["interval"]["speedup"],
                **{key: speed["speedup_interval"] for key, speed in speeds.items()},
                "interval_of_timings": of_timings(same[policy], name, hardware) if same else None,
                "tau": row["tau"],
            }
        )
    return {"rows": rows, "hardware": hardware.model_dump(mode="json")}


def of_timings(per_text: list[ExpectedRounds], name: str, hardware: CostModel) -> list[float]:
    """Return the 95 % interval of the speedup on these texts alone: one text, of which no part is resampled."""
    whole = [sum(getattr(text, key) for text in per_text) for key in ("tokens", "rounds")]
    work = sum((text.work for text in per_text), Counter())
    return numbers([ExpectedRounds(*whole, work)], name, hardware, (1,), 0)["speed"][0]["speedup_interval"]


def cells(options: argparse.Namespace, half: str) -> dict[str, dict[str, Any]]:
    """All finished cells of a half by `drafter|temperature|set`; none is computed here."""
    file = options.out / f"{half}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def run(options: argparse.Namespace) -> None:
    """Every cell of a half that is not there yet; each is written when it is finished."""
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


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing the mean of theirs."""
    order = np.argsort(values, kind="stable")
    out = np.empty(len(values))
    out[order] = np.arange(len(values))
    for value in np.unique(values):
        out[values == value] = out[values == value].mean()
    return out


def spearman(x: Any, y: Any) -> float:
    return float(np.corrcoef(ranks(np.asarray(x)), ranks(np.asarray(y)))[0, 1])


def relative(rows: list[dict[str, Any]], guess: str, truth: str) -> np.ndarray:
    return np.array([abs(row[guess] / row[truth] - 1) for row in rows])


def left_out_error(x: np.ndarray, y: np.ndarray, groups: list[str]) -> float:
    """Median relative error of a parabola in x fitted to the other drafters."""
    errors = []
    for group in sorted(set(groups)):
        out = np.array([other == group for other in groups])
        if len(set(x[~out])) < 3:
            return float("nan")
        fit = np.poly1d(np.polyfit(x[~out], y[~out], 2))
        errors += list(np.abs(fit(x[out]) / y[out] - 1))
    return float(np.median(errors))


def guesses(done: dict[str, dict[str, Any]], gamma: int) -> list[dict[str, Any]]:
    """tau at one draft length beside the forecast and each simple statistic, its mean over the draft positions."""
    points = []
    for key, cell in done.items():
        row = next((r for r in cell["rows"] if r["policy"] == f"chain:draft_length={gamma}"), None)
        if row is None or cell["statistics"] is None:
            continue
        positions = cell["statistics"]["positions"][:gamma]
        drafter, temperature, which = key.split("|")
        point = {"drafter": drafter, "temperature": float(temperature), "set": which, "tau": row["tau"]}
        point["forecast"] = row["tau_forecast"]
        alphas = np.array([1 - entry["tv"] for entry in positions])
        point["product of alphas"] = float(1 + np.cumprod(alphas).sum())
        for name in STATISTICS:
            values = [entry[name] for entry in positions]
            point[name] = None if None in values else float(np.mean(values))
        points.append(point)
    return points


def report(options: argparse.Namespace) -> None:
    console = Console(width=120)
    done = cells(options, "acceptance")
    if done:
        rows = [row | {"cell": key} for key, cell in done.items() for row in cell["rows"]]
        _acceptance_table(console, rows)
        gamma = 2 if len(guesses(done, 2)) > len(guesses(done, 4)) else 4
        points = guesses(done, gamma)
        table = statistics_table(points, gamma)
        console.print(table)
        if options.plots:
            plot_forecast(rows, options.plots / "forecast.png")
            plot_statistics(points, options.plots / "forecast-statistics.png", gamma)
    timed = cells(options, "speed")
    if timed:
        _speed_table(console, timed)


def _acceptance_table(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Predicted tau beside the decoder's, relative error")
    for column in ("cells", "count", "held-out median", "90 %", "noise of the truth", "same texts median", "max"):
        table.add_column(column, justify="right")
    kinds = {"all": rows} | {f"T={t}": [r for r in rows if r["cell"].split("|")[1] == t] for t in ("0", "0.7", "1")}
    drafters = sorted({row["cell"].split("|")[0] for row in rows})
    kinds |= {name: [row for row in rows if row["cell"].startswith(f"{name}|")] for name in drafters}
    for name, some in kinds.items():
        if not some:
            continue
        held, same = relative(some, "tau_forecast", "tau"), relative(some, "tau_forecast_of_same_texts", "tau")
        noise = float(np.median([2**0.5 * row["noise"] for row in some]))
        shown = (np.median(held), np.quantile(held, 0.9), noise, np.median(same), same.max())
        table.add_row(name, str(len(some)), *(f"{100 * value:.2f} %" for value in shown))
    console.print(table)
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault("|".join(row["cell"].split("|")[1:]), []).append(row)
    agree = [spearman([r["tau_forecast"] for r in some], [r["tau"] for r in some]) for some in by_cell.values()]
    console.print(f"Spearman of tau over drafters and policies, by temperature and set: {np.round(agree, 3).tolist()}")


def statistics_table(points: list[dict[str, Any]], gamma: int) -> Table:
    """How well one number tells drafters apart, and how far a curve through it is off for a drafter not fitted."""
    table = Table(title=f"What predicts tau at gamma={gamma}: {len(points)} pairs of drafter and setting")
    for column in ("statistic", "pairs", "|Spearman|", "curve, drafter left out", "as it is"):
        table.add_column(column, justify="left" if column == "statistic" else "right")
    for name in ("forecast", "product of alphas", *STATISTICS):
        some = [point for point in points if point[name] is not None]
        if len(some) < 4:
            continue
        x, y = (np.array([point[key] for point in some]) for key in (name, "tau"))
        fitted = left_out_error(x, y, [point["drafter"] for point in some])
        itself = f"{100 * np.median(np.abs(x / y - 1)):.1f} %" if name in ("forecast", "product of alphas") else ""
        table.add_row(name, str(len(some)), f"{abs(spearman(x, y)):.3f}", f"{100 * fitted:.1f} %", itself)
    return table


def _speed_table(console: Console, timed: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Predicted speedup beside the measured one")
    for column in ("setting", "policies", "median error", "Spearman", "best by forecast", "measured best", "regret"):
        table.add_column(column, justify="right")
    errors, agree, regrets = [], [], []
    settings = sorted({key.split("|", 1)[1] for key in timed})
    for setting in settings:
        some = [
            {**row, "arm": f"{key.split('|')[0]} {row['policy']}"}
            for key, cell in timed.items()
            if key.split("|", 1)[1] == setting
            for row in cell["rows"]
        ]
        error = relative(some, "speedup_forecast", "speedup")
        chosen = max(some, key=lambda row: row["speedup_forecast"])
        best = max(some, key=lambda row: row["speedup"])
        # The target alone is a policy too: 1x is chosen where nothing is forecast to pay.
        got = chosen["speedup"] if chosen["speedup_forecast"] > 1 else 1.0
        regret = 1 - got / max(best["speedup"], 1.0)
        rank = spearman([row["speedup_forecast"] for row in some], [row["speedup"] for row in some])
        errors, agree, regrets = [*errors, *error], [*agree, rank], [*regrets, regret]
        cells_ = (f"{100 * np.median(error):.1f} %", f"{rank:.3f}", chosen["arm"], best["arm"], f"{100 * regret:.1f} %")
        table.add_row(setting, str(len(some)), *cells_)
    console.print(table)
    console.print(
        f"speedup: median error {100 * np.median(errors):.1f} %; Spearman median {np.median(agree):.3f}; "
        f"regret mean {100 * np.mean(regrets):.1f} %, worst {100 * max(regrets):.1f} %"
    )


def held(row: dict[str, Any], interval: str, *, with_noise: bool) -> bool:
    """Whether the measured speedup is where the forecast says, up to the noise of both where asked for."""
    low, high = row[interval]
    if not with_noise:
        return low <= row["speedup"] <= high
    measured_low, measured_high = row["speedup_interval"]
    above = row["speedup"] > row["speedup_forecast"]
    own = high / row["speedup_forecast"] if above else row["speedup_forecast"] / low
    noise = row["speedup"] / measured_low if above else measured_high / row["speedup"]
    apart = abs(np.log(row["speedup"] / row["speedup_forecast"]))
    return bool(apart <= np.hypot(np.log(own), np.log(noise)))


def coverage_table(timed: dict[str, dict[str, Any]]) -> Table:
    """Share of policies whose measured speedup each interval holds, and how wide the intervals are."""
    rows = [{**row, "cell": key} for key, cell in timed.items() for row in cell["rows"] if "interval" in row]
    table = Table(title="Measured speedups that the forecast's 95 % intervals hold")
    for column in ("cells", "policies", "interval over", "held", "held, with measured noise", "half-width", "noise"):
        table.add_column(column, justify="right")
    kinds = {"all": rows} | {f"T={t}": [r for r in rows if r["cell"].split("|")[1] == t] for t in ("0", "0.7", "1")}
    over = {"interval_of_texts": "texts", "interval": "texts and timings", "interval_of_timings": "timings, same texts"}
    for name, (interval, parts) in product(kinds, over.items()):
        some = [row for row in kinds[name] if row["speedup_interval"] is not None and row.get(interval) is not None]
        if not some:
            continue
        counts = [f"{np.mean([held(row, interval, with_noise=noise) for row in some]):.1%}" for noise in (0, 1)]
        if interval == "interval_of_timings":
            counts[1] = ""  # the noise of texts is not in the difference
        widths = [np.median([np.log(row[key][1] / row[key][0]) / 2 for row in some]) for key in
                  (interval, "speedup_interval")]  # fmt: skip
        table.add_row(name, str(len(some)), parts, *counts, *(f"{width:.1%}" for width in widths))
    return table


def plot_forecast(rows: list[dict[str, Any]], path: Path) -> None:
    """Predicted against measured tau, one point a cell and policy."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5.2, 5))
        for number, name in enumerate(sorted({row["cell"].split("|")[0] for row in rows})):
            some = [row for row in rows if row["cell"].startswith(f"{name}|")]
            x, y = ([row[key] for row in some] for key in ("tau_forecast", "tau"))
            axis.scatter(x, y, s=14, color=COLOURS[number % len(COLOURS)], label=name, marker="os^Dv<>P"[number % 8])
        top = 1.05 * max(row["tau"] for row in rows)
        axis.plot([1, top], [1, top], color="black", linewidth=0.8)
        axis.set_xlabel("forecast tau, from other texts")
        axis.set_ylabel("tau of the decoder")
        axis.legend(fontsize=8)
        figure.savefig(path, dpi=90, bbox_inches="tight")
        plt.close(figure)


def plot_statistics(points: list[dict[str, Any]], path: Path, gamma: int) -> None:
    """tau against the forecast and against each simple statistic."""
    names = ("forecast", "product of alphas", *STATISTICS)
    drafters = sorted({point["drafter"] for point in points})
    with plt.rc_context(STYLE | {"font.size": 8}):
        figure, axes = plt.subplots(3, 3, figsize=(9, 7.5), sharey=True)
        for axis, name in zip(axes.flat, names, strict=False):
            for number, drafter in enumerate(drafters):
                some = [p for p in points if p["drafter"] == drafter and p[name] is not None]
                x, y = ([point[key] for point in some] for key in (name, "tau"))
                axis.scatter(x, y, s=12, color=COLOURS[number % len(COLOURS)], label=drafter)
            axis.set_xlabel(name)
        axes[0, 0].legend(fontsize=7)
        for axis in axes[:, 0]:
            axis.set_ylabel(f"tau, gamma={gamma}")
        figure.tight_layout()
        figure.savefig(path, dpi=80, bbox_inches="tight")
        plt.close(figure)


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
