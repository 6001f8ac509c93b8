"""What a training run leaves in its folder, and the folder of one that was killed."""

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.train.run_folder import read_metrics

CLOCK = ("seconds", "seconds_by_part", "tokens_per_second", "memory_bytes")
"""Keys of the metrics that differ between equal runs."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without what depends on the clock."""
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(folder)]


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def taus_of(folder: Path) -> list[float]:
    return [row["evaluation"]["tau"] for row in read_metrics(folder) if "evaluation" in row]


def finished(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "finished.json").read_text())


def as_if_killed(folder: Path, step: int) -> None:
    """Remove what a run did after the checkpoint of `step`; what it has measured since is in the metrics."""
    (folder / "finished.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.partition("-")[2]) > step:
            shutil.rmtree(checkpoint)
