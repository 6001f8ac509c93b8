"""A run's numbers by source of its texts: what was trained, and how many of its drafts are accepted."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from draftsmith.eval.learning_curve import LearningCurve
from draftsmith.train.training_data import TrainingData


def by_source(data: TrainingData, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return samples, trained tokens, tau of held-out prompts and alpha in validation by source, as far as known.

    `row`: that of an evaluation in `metrics.jsonl`.
    """
    numbers: dict[str, dict[str, Any]] = {
        label: {"samples": samples, "trained_tokens": tokens} for label, (samples, tokens) in data.counts.items()
    }
    for label in dict.fromkeys(data.heldout_sources):
        held = [number for number, own in enumerate(data.heldout_sources) if own == label]
        tokens_P, rounds_P = (np.array(row["evaluation"][name], dtype=float)[held] for name in ("tokens", "rounds"))
        numbers.setdefault(label, {})["prompts"] = len(held)
        if rounds_P.any():
            measured = LearningCurve(tokens_P[None], rounds_P[None]).last()
            numbers[label] |= {"tau": measured.value, "interval": measured.interval}
    for label, alpha_K in row.get("validation", {}).get("alpha_by_source", {}).items():
        numbers[label]["validation_alpha"] = alpha_K
    return numbers


def table_by_source(numbers: Mapping[str, Mapping[str, Any]], step: int) -> Table:
    """Return the numbers of `by_source` as a table; `step`: that of the evaluation."""
    table = Table(title=f"By source, step {step}: trained; tau of held-out prompts; alpha in validation")
    table.add_column("source", overflow="fold")
    for column in ("samples", "tokens", "prompts", "tau", "alpha"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, own in numbers.items():
        counts = (f"{own[name]:,}" if name in own else "" for name in ("samples", "trained_tokens", "prompts"))
        table.add_row(
            label, *counts, _tau(own), f"{own['validation_alpha'][0]:.3f}" if "validation_alpha" in own else ""
        )
    return table


def _tau(own: Mapping[str, Any]) -> str:
    if "tau" not in own:
        return ""
    low, high = own["interval"]
    return f"{own['tau']:.2f}" + (f" [{low:.2f}, {high:.2f}]" if own["prompts"] > 1 else "")
