"""Guards, which report wrong or unfair results, and notes, which report limits of the others."""

from collections.abc import Sequence

import torch
from torch import nn

from draftsmith.eval.context_bins import fall
from draftsmith.eval.harness import CALIBRATION, Run
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.results import Guard, PlainSpeeds, Row
from draftsmith.eval.settings import BASELINE
from draftsmith.heads.recall import memories
from draftsmith.metrics import few_units

REPETITIVE = 0.3
"""Share of repeated 4-grams above which a report warns; source code has about 0.05."""
SLOWER_THAN_GENERATE = 0.95
"""Ratio of our tokens per second to transformers' below which, if every prompt is slower, a guard is reported."""
ROUNDING = 1e-4
"""Amount by which a mean of float32 sums may leave [0, 1]."""


def name_of(row: Row) -> str:
    batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
    return f"{row['drafter']} ({row['policy']}) at T={row['temperature']:g}{batch}"


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter; None for a model without any."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def guards(rows: Sequence[Row], plain: PlainSpeeds | None, dtypes: dict[str, torch.dtype | None]) -> list[Guard]:
    """Return the results that are wrong or unfair.

    Args:
        plain: the result of `compare_with_generate`.
        dtypes: dtype of "target" and of each drafter by name.
    """
    found: list[Guard] = []
    for row in rows:
        where = name_of(row) + ("" if row["category"] == OVERALL else f", {row['category']}")
        # A category of few prompts is noisier than that, and drafts may shorten the longest text of a batch by more.
        if row["category"] == OVERALL and row["batch_size"] == 1 and row["speedup"] > row["tau"]:
            text = f"speedup {row['speedup']:.2f} above tau {row['tau']:.2f}: only noise explains that; measure again"
            found.append({"guard": "speedup-above-tau", "message": f"{where}: {text} on a quiet machine."})
        if not -ROUNDING <= row["alpha"] <= 1 + ROUNDING:
            text = f"alpha={row['alpha']:.4f} is no share; the verification rule or its statistics are wrong."
            found.append({"guard": "alpha-range", "message": f"{where}: {text}"})
    if plain is not None and plain["ratio"] < SLOWER_THAN_GENERATE and plain["best_ratio"] < 1:
        speeds = f"{plain['baseline_tokens_per_second']:.0f} against {plain['generate_tokens_per_second']:.0f} tokens/s"
        text = (
            f"The target alone is slower here than with transformers' generate ({speeds}): all speedups are too high."
        )
        found.append({"guard": "slow-baseline", "message": text})
    for name, dtype in dtypes.items():
        if dtype is not None and dtype != dtypes["target"]:
            text = (
                f"{name} is in {_short(dtype)}, the target in {_short(dtypes['target'])}: speed and acceptance differ"
            )
            found.append({"guard": "dtype", "message": f"{text} from those in a common dtype."})
    return found


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def notes(run: Run, rows: Sequence[Row]) -> list[str]:
    """Return notes on limits to the precision or the meaning of the rows."""
    found = few_units([batch.prompts for batch in groups] for groups in run.batches.values())
    found += [f"Left out: {text}" for text in run.left_out]
    found += _turns_left_out(run) + _batches_not_full(run)
    if run.learners:
        found.append(
            f"Policies that learn ({', '.join(run.learners)}) were first calibrated on {CALIBRATION} of the prompts."
        )
    found += [
        f"{name} drafts from the texts of earlier prompts: its tau depends on their number and order."
        for name, drafter in run.drafters.items()
        if memories(drafter)
    ]
    machines = {(where["cpu"], where["accelerator"]) for where in run.journal.sittings}
    if len(run.journal.sittings) > 1:
        other = "" if len(machines) == 1 else ", ON DIFFERENT MACHINES: speeds mix these machines"
        found.append(f"Measured in {len(run.journal.sittings)} sittings{other}.")
    for row in rows:
        if row["category"] == OVERALL:
            found += _row_notes(row)
    return found + _repetition(rows) + _quality_notes(run)


def _row_notes(row: Row) -> list[str]:
    found, name = [], name_of(row)
    if not row["lossless"]:
        found.append(f"{name}: rule {row['rule']!r} is LOSSY: its texts do not have the target's distribution.")
    if row["speedup"] < 1:
        found.append(f"{name} is slower than the target alone ({row['speedup']:.2f}x).")
    spread = max(row["speedup_repeats"], default=0) - min(row["speedup_repeats"], default=0)
    if row["speedup"] and spread > 0.2 * row["speedup"]:
        found.append(f"{name}: repeats differ by {spread:.2f}x; other processes may have used the machine.")
    falls = fall(row.get("by_context", []))
    if falls is not None:
        found.append(f"{name}: {falls}")
    equal, total = row.get("greedy_identical", [0, 0])
    if equal < total:
        found.append(
            f"{name}: {total - equal} of {total} greedy texts differ from the target's own, first at "
            f"{row.get('first_divergence')}; a near tie of two logits or a bug; `draftsmith check` tells which."
        )
    return found


def _repetition(rows: Sequence[Row]) -> list[str]:
    """Return one note per temperature: the texts of all variants are similar."""
    most: dict[float, float] = {}
    for row in rows:
        if row["category"] == OVERALL:
            most[row["temperature"]] = max(row["repeated_4grams"], most.get(row["temperature"], 0.0))
    return [
        f"At T={temperature:g} {share:.0%} of the generated 4-grams are repeats. Repetition inflates acceptance: less "
        "repetitive texts have a lower speedup."
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
        f"{wanted - asked} of {wanted} questions had no room in the context of {run.context} tokens after the earlier "
        "turns, and were left out for all drafters."
    ]


def _batches_not_full(run: Run) -> list[str]:
    found = []
    for size, groups in run.batches.items():
        small = [len(batch.prompts) for batch in groups if len(batch.prompts) < size]
        if small:
            found.append(f"Batch size {size}: {len(small)} of {len(groups)} batches hold fewer prompts ({small[0]}).")
    return found


def _quality_notes(run: Run) -> list[str]:
    """Return a note for each drafter whose target was trained with it: p is not the original target's."""
    return [
        f"{name}: its target was trained with it and differs from the original: KL {quality['kl']:.4f} nats per token, "
        f"loss on held-out text {quality['nll_original']:.3f} -> {quality['nll_adapted']:.3f} nats, same most likely "
        f"token at {quality['top1_agreement']:.1%} of positions. Texts are lossless relative to this target."
        for name, drafter in run.drafters.items()
        if (quality := drafter.target_quality) is not None
    ]
