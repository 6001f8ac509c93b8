"""A run's folder: claimed for one recipe, with a metrics file that never holds a step twice."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import BaseModel, FiniteFloat, ValidationError, model_validator

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads.checkpoint import is_named
from draftsmith.locks import LOCK, hold_folder
from draftsmith.reading import parse_json, parse_yaml, read_json, read_text
from draftsmith.storage import clear_leftovers, is_leftover, write_json, write_text
from draftsmith.train.checkpoint import checkpoint_folder, stored_recipes
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
    if not folder.exists() or _unused(folder):
        return  # nothing, or a start that was refused or killed before it had done anything
    if not (folder / RECIPE).is_file():
        raise ConfigError(f"output={folder} holds files but no {RECIPE}; expected an empty folder or an earlier run")
    try:
        stored = parse_yaml(read_text(folder / RECIPE))
    except (OSError, ValueError) as error:
        raise _unknown(str(folder / RECIPE), error) from error
    _require_same(recipe, stored, str(folder / RECIPE), f"output={folder} holds")
    for place, of_checkpoint in stored_recipes(folder / CHECKPOINTS).items():  # some may have been copied here
        _require_same(recipe, of_checkpoint, place, f"checkpoint {place} is of")
    read_metrics(folder)  # refused before anything is loaded


@contextmanager
def claimed_output(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run's folder on the main process; what that one is refused, all processes are."""
    with ExitStack() as held:
        problem: list[str | None] = [None]
        if accelerator.is_main_process:
            try:
                held.enter_context(hold_folder("output", Path(recipe.output)))
                check_output(recipe)  # again: another run may have begun and ended since
                claim_output(recipe)
            except ConfigError as error:
                problem = [str(error)]
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise ConfigError(problem[0])
        yield


def claim_output(recipe: Recipe) -> None:
    """Write the resolved recipe into the folder, and clear away what a killed start has left half written."""
    folder = Path(recipe.output)
    try:
        clear_leftovers(folder)
        clear_leftovers(folder / CHECKPOINTS)
        if not folder.exists() or _unused(folder):
            write_text(folder / RECIPE, yaml.safe_dump(comparable(recipe), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"output={folder} cannot be written ({error}); expected a folder with room") from error


def _unused(folder: Path) -> bool:
    return all(file.name in (RECIPE, LOCK) or is_leftover(file.name) for file in folder.iterdir())


def _require_same(recipe: Recipe, stored: Any, place: str, subject: str) -> None:
    """ConfigError with the first difference; keys that have come since then get their defaults."""
    try:
        before = comparable(parse_recipe({**stored, "output": "earlier"}, place))
    except (ConfigError, TypeError) as error:
        raise _unknown(place, error) from error
    difference = _first_difference(before, comparable(recipe))
    if difference is not None:
        key, there, here = difference
        raise ConfigError(
            f"{subject} another run: {key}={there!r} there, {here!r} here; expected another output folder"
        )


def _unknown(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"{place} is not a recipe that this version knows ({error}); expected another output")


def comparable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, without what may differ between two starts of one run."""
    # Where things lie and how long is waited for them, not what they are.
    placed, recomputed = {"sharded", "offload"}, {"activation_checkpointing", "timeout_minutes"}
    return recipe.model_dump(
        mode="json", exclude={"output": True, "publish": True, "target": placed, "train": recomputed}
    )


def _first_difference(before: Any, now: Any, key: str = "") -> tuple[str, Any, Any] | None:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return None if before == now else (key or "recipe", before, now)
    for name in [*now, *(name for name in before if name not in now)]:
        found = _first_difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
        if found:
            return found
    return None


class _Evaluation(BaseModel):
    tau: FiniteFloat


class _Row(BaseModel):
    """What is read of a row, where it has it."""

    step: int
    loss: FiniteFloat = 0.0
    alpha: list[FiniteFloat] = []
    evaluation: _Evaluation = _Evaluation(tau=0.0)

    @model_validator(mode="after")
    def _require_whole(self) -> Self:
        if ("loss" in self.model_fields_set) != ("alpha" in self.model_fields_set):
            raise ValueError("loss and alpha together")
        return self


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

    def sync(self) -> None:
        """To be called before a checkpoint is written: the rows up to it survive a power cut as it does."""
        with self._path.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics; a last line torn by a kill is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); expected the metrics of a run") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            break
        try:
            _Row.model_validate(row)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"])) or "it"
            raise ConfigError(f"{path}:{number}: {key} is none of a run's metrics; expected another folder") from error
        rows.append(row)
    return rows


def metrics_of(drafters: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of the run that each of the named drafters lies in, without drafters that lie in none."""
    found = {name: read_metrics(Path(path).parent) for name, path in drafters.items() if not is_named(path)}
    return {name: rows for name, rows in found.items() if rows}


def is_lost(recipe: Recipe) -> bool:
    """Whether the best drafter, or the adapter that it needs, is not where the run has kept it."""
    drafter, target = Path(recipe.output) / DRAFTER, Path(recipe.output) / TARGET
    whole = (drafter / "config.json").is_file() and any(drafter.glob("*.safetensors"))
    return not whole or (recipe.cotrain is not None and not (target / "adapter_config.json").is_file())


def is_finished(recipe: Recipe) -> bool:
    """Whether an earlier start has finished the run; not where its drafter is lost and has to be written again.

    Raises:
        DraftsmithError: where it is lost, and so is the checkpoint that it could be written from.
    """
    folder = Path(recipe.output)
    try:
        told = read_json(folder / FINISHED)
        step, tau = int(told["best_step"]), float(told["best_tau"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False  # what is damaged is written again, too
    lost = tau > 0 and is_lost(recipe)
    if lost and not checkpoint_folder(folder / CHECKPOINTS, step).is_dir():
        raise lost_for_good(folder, step)
    return not lost


def lost_for_good(folder: Path, step: int) -> DraftsmithError:
    return DraftsmithError(
        f"{folder / DRAFTER} was deleted: it held the best drafter, of step {step}, and no checkpoint of that step is "
        f"kept in {folder / CHECKPOINTS}; expected another output, to train it again"
    )


def finish(folder: Path, summary: dict[str, Any]) -> None:
    write_json(folder / FINISHED, summary)
