"""What a reader has to know before quoting a number: guards say that one is wrong, notes how far to trust the rest."""

from collections.abc import Sequence

import torch
from torch import nn

from draftsmith.eval.harness import CALIBRATION, Run
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import EvalRow, Guard, PlainSpeeds
from draftsmith.eval.settings import BASELINE

REPETITIVE = 0.3
"""Share of repeated 4-grams above which a report warns; source code itself has about 0.05."""
SLOWER_THAN_GENERATE = 0.95
"""Ours / transformers' tokens per second: below, and slower on every prompt, the difference is more than noise."""
ROUNDING = 1e-4
"""By which a mean of float32 sums may leave [0, 1]."""


def name_of(row: EvalRow) -> str:
    batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
    return f"{row['drafter']} ({row['policy']}) at T={row['temperature']:g}{batch}"


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Of the first floating-point parameter; None for a model without any."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def guards(rows: Sequence[EvalRow], plain: PlainSpeeds | None, dtypes: dict[str, torch.dtype | None]) -> list[Guard]:
    """Findings that mean that a number is wrong or unfair: `guard` names the kind, `message` the case.

    Args:
        plain: what `compare_with_generate` found.
        dtypes: of "target" and of each drafter by name.
    """
    found: list[Guard] = []
    for row in rows:
        where = name_of(row) + ("" if row["category"] == OVERALL else f", {row['category']}")
        if row["category"] == OVERALL and row["speedup"] > row["tau"]:  # few prompts are noisier than that
            text = f"speedup {row['speedup']:.2f} above tau {row['tau']:.2f}: impossible but for noise; measure again"
            found.append({"guard": "speedup-above-tau", "message": f"{where}: {text} on a quiet machine."})
        if not -ROUNDING <= row["alpha"] <= 1 + ROUNDING:
            text = f"alpha={row['alpha']:.4f} is no share; the verification rule or its record is broken."
            found.append({"guard": "alpha-range", "message": f"{where}: {text}"})
    if plain is not None and plain["ratio"] < SLOWER_THAN_GENERATE and plain["best_ratio"] < 1:
        speeds = f"{plain['baseline_tokens_per_second']:.0f} against {plain['generate_tokens_per_second']:.0f} tokens/s"
        text = (
            f"The target alone is slower here than with transformers' generate ({speeds}): every speedup is too high."
        )
        found.append({"guard": "slow-baseline", "message": text})
    for name, dtype in dtypes.items():
        if dtype is not None and dtype != dtypes["target"]:
            text = f"{name} is in {_short(dtype)}, the target in {_short(dtypes['target'])}: neither its speed nor its"
            found.append({"guard": "dtype", "message": f"{text} acceptance is that of the pair in one dtype."})
    return found


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def notes(run: Run, rows: Sequence[EvalRow]) -> list[str]:
    """How far to trust the rows."""
    found = []
    if len(run.prompts) < 20:
        found.append(
            f"Measured on {len(run.prompts)} prompts: differences of a few percent mean little, and intervals are "
            "somewhat too narrow."
        )
    found += [f"Left out: {text}" for text in run.left_out]
    found += _turns_left_out(run) + _batches_not_full(run)
    if run.learners:
        found.append(
            f"Policies that learn ({', '.join(run.learners)}) began with what {CALIBRATION} of the prompts taught them."
        )
    machines = {(where["cpu"], where["accelerator"]) for where in run.journal.sittings}
    if len(run.journal.sittings) > 1:
        other = "" if len(machines) == 1 else ", ON DIFFERENT MACHINES: its speeds are no one machine's"
        found.append(f"Measured in {len(run.journal.sittings)} sittings{other}.")
    for row in rows:
        if row["category"] == OVERALL:
            found += _row_notes(row)
    return found + _repetition(rows) + _quality_notes(run)


def _row_notes(row: EvalRow) -> list[str]:
    found, name = [], name_of(row)
    if not row["lossless"]:
        found.append(f"{name}: rule {row['rule']!r} is LOSSY: this is not the target's text, only something near it.")
    if row["speedup"] < 1:
        found.append(f"{name} is slower than the target alone ({row['speedup']:.2f}x).")
    spread = max(row["speedup_repeats"], default=0) - min(row["speedup_repeats"], default=0)
    if row["speedup"] and spread > 0.2 * row["speedup"]:
        found.append(f"{name}: repeats differ by {spread:.2f}x; the machine was not quiet.")
    equal, total = row.get("greedy_identical", [0, 0])
    if equal < total:
        found.append(
            f"{name}: {total - equal} of {total} greedy texts part from the target's own, first at "
            f"{row.get('first_divergence')}; a near tie in its logits does that, and so would a bug."
        )
    return found


def _repetition(rows: Sequence[EvalRow]) -> list[str]:
    """One note a temperature: all arms write much the same text."""
    most: dict[float, float] = {}
    for row in rows:
        if row["category"] == OVERALL:
            most[row["temperature"]] = max(row["repeated_4grams"], most.get(row["temperature"], 0.0))
    return [
        f"At T={temperature:g} {share:.0%} of the 4-grams stood in the same text before. The target goes in circles, "
        "which is easy to draft: a less repetitive text gains less."
        for temperature, share in most.items()
        if share > REPETITIVE
    ]


def _turns_left_out(run: Run) -> list[str]:
    settings = run.settings
    wanted = sum(prompt.turns for prompt in run.prompts) * settings.repeats * len(settings.temperatures)
    wanted *= len(settings.batch_sizes)
    asked = sum(len(cell.texts) for cell in run.journal.cells.values() if cell.arm == BASELINE)
    if asked == wanted:
        return []
    return [
        f"{wanted - asked} of {wanted} questions had no room in the context of {run.context} tokens behind the turns "
        "before them, and were left out in all arms."
    ]


def _batches_not_full(run: Run) -> list[str]:
    found = []
    for size, groups in run.batches.items():
        small = [len(batch.prompts) for batch in groups if len(batch.prompts) < size]
        if small:
            found.append(f"Batch size {size}: {len(small)} of {len(groups)} batches hold fewer prompts ({small[0]}).")
    return found


def _quality_notes(run: Run) -> list[str]:
    """A drafter that was trained with its target drafts for another p than the original's."""
    return [
        f"{name}: its target was trained with it and is not the original: KL {quality['kl']:.4f} nats a token, loss on "
        f"held-out text {quality['nll_original']:.3f} -> {quality['nll_adapted']:.3f} nats, same favourite token at "
        f"{quality['top1_agreement']:.1%} of positions. Texts are lossless relative to this target."
        for name, drafter in run.drafters.items()
        if (quality := drafter.target_quality) is not None
    ]
