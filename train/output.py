"""A run's folder: claimed for one recipe, with a metrics file that never holds a step twice."""

import json
from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import ConfigError
from draftsmith.storage import write_json, write_text
from draftsmith.train.recipe import Recipe, parse_recipe

RECIPE, METRICS, FINISHED, DRAFTER, TARGET, CHECKPOINTS, FAILED = (
    "recipe.yaml",
    "metrics.jsonl",
    "finished.json",
    "drafter",
    "target",
    "checkpoints",
    "failed_batch.json",
)


def check_output(recipe: Recipe) -> None:
    """ConfigError when the run's folder holds something else than an earlier start of this very recipe."""
    folder = Path(recipe.output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output={folder} is a file; expected a folder")
    if not folder.exists() or not {file.name for file in folder.iterdir()} - {RECIPE}:
        return  # nothing, or a start that was refused before it had done anything
    if not (folder / RECIPE).is_file():
        raise ConfigError(f"output={folder} holds files but no {RECIPE}; expected an empty folder or an earlier run")
    difference = _first_difference(_earlier(folder / RECIPE), _comparable(recipe))
    if difference is not None:
        key, before, now = difference
        raise ConfigError(
            f"output={folder} holds another run: {key}={before!r} there, {now!r} here; expected another output folder"
        )


def claim_output(recipe: Recipe) -> Path:
    """Make the folder and write the resolved recipe into it."""
    folder = Path(recipe.output)
    folder.mkdir(parents=True, exist_ok=True)
    if {file.name for file in folder.iterdir()} <= {RECIPE}:
        write_text(folder / RECIPE, yaml.safe_dump(_comparable(recipe), sort_keys=False))
    return folder


def _earlier(file: Path) -> Any:
    """The folder's recipe; keys that have come since then get their defaults."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        return _comparable(parse_recipe({**values, "output": "earlier"}, str(file)))
    except (ConfigError, TypeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not a recipe that this version knows ({error}); expected another output"
        ) from error


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, without what may differ between two starts of one run."""
    return recipe.model_dump(mode="json", exclude={"output"})


def _first_difference(before: Any, now: Any, key: str = "") -> tuple[str, Any, Any] | None:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return None if before == now else (key or "recipe", before, now)
    for name in [*now, *(name for name in before if name not in now)]:
        found = _first_difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
        if found:
            return found
    return None


class Metrics:
    """`metrics.jsonl`: one object a line; starting again at a step drops what an interrupted run wrote behind it."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """`resume_step` is the checkpoint's that the run goes on from; None begins from nothing."""
        self._path = folder / METRICS
        kept = [] if resume_step is None else [row for row in read_metrics(folder) if row["step"] <= resume_step]
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics; a last line torn by a kill is left out."""
    path = folder / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def finish(folder: Path, summary: dict[str, Any]) -> None:
    write_json(folder / FINISHED, summary)
