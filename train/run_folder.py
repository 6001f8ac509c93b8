"""A run's folder: locked for one recipe, with a metrics file that has each step once."""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from draftsmith.distill.data_section import SELF
from draftsmith.errors import ConfigError, reason_of
from draftsmith.names import EMBEDDED
from draftsmith.provenance import first_difference
from draftsmith.reading import dump_yaml, parse_json, parse_yaml, read_json, read_text
from draftsmith.storage import LOCK, JsonLines, clear_leftovers, hold_folder, is_leftover, write_json, write_text
from draftsmith.train.checkpoints import checkpoint_folder, newest_first, read_state, step_of
from draftsmith.train.recipe import Recipe, parse_stored

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
    """Raise ConfigError when the run's folder holds anything but an earlier start of the same recipe.

    Steps, schedule and intervals may differ where every step so far had the rate that it has under the new recipe: the
    weights are then those of a run that began with it.
    """
    folder = Path(recipe.output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output={folder} is a file; expected a folder")
    if not folder.exists() or _unused(folder):
        return  # new, or of a start that ended before its first step
    if not (folder / RECIPE).is_file():
        raise ConfigError(f"output={folder} holds files but no {RECIPE}; expected an empty folder or an earlier run")
    try:
        values = parse_yaml(read_text(folder / RECIPE))
    except (OSError, ValueError) as error:
        raise _unknown(str(folder / RECIPE), error) from error
    before, subject = _stored(values, str(folder / RECIPE)), f"output={folder} holds"
    train = before.train.model_copy(update=recipe.train.model_dump(include=MAY_CHANGE))
    _require_same(recipe, before.model_copy(update={"train": train}), subject)
    if comparable(before) != comparable(recipe) and not _continues(before, recipe):
        _require_same(recipe, before, subject, _instead(before, recipe))
    read_metrics(folder)  # raises before anything is loaded


MAY_CHANGE = {"steps", "schedule", "decay_fraction", "warmup_fraction", "target_tau", "patience"}
MAY_CHANGE |= {"evaluate_every", "checkpoint_every", "keep_checkpoints"}
"""Keys of `train` that may differ from those of a run that is continued."""


def _continues(before: Recipe, recipe: Recipe) -> bool:
    """Return whether the run's newest checkpoint is one of a run of `recipe`, too; they differ by MAY_CHANGE alone."""
    saved = _saved(recipe)
    if not saved or recipe.cotrain is not None:  # the adapters' warm-up is a share of all steps, too
        return False
    ends = [value for of in (before, recipe) for value in (of.train.target_tau, of.train.patience)]
    return saved[0] < recipe.train.steps and saved[0] <= _same_rates(before, recipe) and not any(ends)


def _instead(before: Recipe, recipe: Recipe) -> str:
    """Return what to do about a change that the run's newest checkpoint does not allow."""
    same, train = _same_rates(before, recipe), recipe.train
    usable = [step for step in _saved(recipe) if step < train.steps and (train.schedule != "wsd" or step <= same)]
    if not usable:
        return "another output folder"
    place = checkpoint_folder(Path(recipe.output) / CHECKPOINTS, usable[0])
    why = f"; with train.schedule={train.schedule!r} its steps had other rates than those of this recipe"
    return f"another output folder with continue_from={place}{why if usable[0] > same else ''}"


def _saved(recipe: Recipe) -> list[int]:
    """Return the steps of the run's checkpoints, newest first."""
    return [step_of(entry) for entry in newest_first(Path(recipe.output) / CHECKPOINTS)]


def _same_rates(before: Recipe, recipe: Recipe) -> int:
    """Return the number of first steps, up to the newest checkpoint, that have the same learning rate in both runs."""
    last = max(_saved(recipe), default=0)
    differing = (step for step in range(last) if before.train.rate(step) != recipe.train.rate(step))
    return next(differing, last)


def check_continuation(recipe: Recipe) -> None:
    """Raise ConfigError unless `continue_from`, where given, is a checkpoint whose run this recipe can continue.

    A run that has a checkpoint of its own no longer needs it.
    """
    if recipe.continue_from is None or any((Path(recipe.output) / CHECKPOINTS).glob("step-*")):
        return
    folder = Path(recipe.continue_from).expanduser()
    key = f"continue_from={recipe.continue_from}"
    try:
        state = read_state(folder)
        changed = {**state["recipe"]["train"], **recipe.train.model_dump(mode="json", include=MAY_CHANGE)}
        own = {"name": recipe.name, "tracker": recipe.tracker, "continue_from": recipe.continue_from, "train": changed}
        step, stored = int(state["step"]), {**state["recipe"], **own}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{key}; expected a checkpoint such as runs/NAME/checkpoints/step-001000") from error
    _require_same(recipe, _stored(stored, str(folder)), f"{key} is of", "the same value")
    if not recipe.train.warmup_steps <= step < recipe.train.steps:
        raise ConfigError(
            f"{key} with train.steps={recipe.train.steps}; expected more steps than its {step}, and a warm-up "
            f"(train.warmup_fraction={recipe.train.warmup_fraction:g}) that ends before them"
        )
    end, begin = recipe.train.steps, recipe.train.steps - recipe.train.decay_steps
    decay = recipe.train.model_dump(mode="json", include={"schedule", "steps", "decay_fraction"})
    if decay["schedule"] == "wsd" and begin < step and not decay.items() <= state["recipe"]["train"].items():
        raise ConfigError(
            f"{key} with train.decay_fraction={recipe.train.decay_fraction:g} of train.steps={end}, a decay that "
            f"begins after step {begin}; expected one that begins after step {step} or later"
        )


@contextmanager
def claimed_output(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Lock and claim the run's folder on the main process; if that is refused, all processes raise the error."""
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
    """Write the resolved recipe into the folder, and delete the temporary files of a killed start.

    Where the folder holds a run of fewer steps, that run is no longer finished.
    """
    folder, finished = Path(recipe.output), is_finished(recipe)
    try:
        clear_leftovers(folder)
        clear_leftovers(folder / CHECKPOINTS)
        if not finished:
            (folder / FINISHED).unlink(missing_ok=True)
            write_text(folder / RECIPE, dump_yaml(stored_values(recipe)))
    except OSError as error:
        raise ConfigError(f"output={folder} cannot be written ({error}); expected a folder with room") from error


def _unused(folder: Path) -> bool:
    """Return whether the folder holds at most a recipe, a lock and temporary files."""
    return all(file.name in (RECIPE, LOCK) or is_leftover(file.name) for file in folder.iterdir())


def _stored(values: Any, place: str) -> Recipe:
    """Return the recipe of an earlier run; keys that newer versions added have their defaults."""
    try:
        return parse_stored({**values, "output": "earlier"}, place)
    except (ConfigError, TypeError) as error:
        raise _unknown(place, error) from error


def _require_same(recipe: Recipe, before: Recipe, subject: str, expected: str = "another output folder") -> None:
    """Raise ConfigError with the first difference."""
    difference = first_difference(comparable(before), comparable(recipe))
    if difference is not None:
        raise ConfigError(f"{subject} another run: {difference}; expected {expected}")


def _unknown(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"{place} is not a recipe that this version knows ({error}); expected another output")


SERVED = {"concurrency", "timeout_seconds", "failures", "in_flight", "ahead", "patience_minutes", "compare"}
SERVED |= {"url", "urls", "folder", "store", "store_gib", "answers_gib"}
"""Keys of servers that change no answer and no state: where they are, and how they are asked."""


def comparable(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values, without the keys that may differ between two starts of one run."""
    values = stored_values(recipe)
    for section in (values["data"], values["teacher"]):
        section["server"] = {key: it for key, it in (section["server"] or {}).items() if key not in SERVED}
    return values


def stored_values(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values, as it is kept with a run: without keys that change no number."""
    placed = {"sharded", "offload"}
    recomputed = {"activation_checkpointing", "sequence_parallel"}
    excluded = {"output": True, "target": placed, "train": recomputed, "data": {"exclude_rows"}}
    return recipe.model_dump(mode="json", exclude=excluded)


def restart_metrics(folder: Path, resume_step: int | None, evaluated: bool = True) -> None:
    """Begin `metrics.jsonl`, one object a line, with the rows up to the checkpoint that the run resumes from.

    Args:
        resume_step: step of the checkpoint; None for a new run.
        evaluated: False where the resumed run begins with the evaluation of this step. An earlier start may have done
            it too, and may have been killed before its next checkpoint.
    """
    kept = [] if resume_step is None else [row for row in read_metrics(folder) if row["step"] <= resume_step]
    if not evaluated:
        kept = [row for row in kept if row["step"] != resume_step or not row.keys() & {"evaluation", "ending"}]
    write_text(folder / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


def append_metrics(folder: Path, row: dict[str, Any]) -> None:
    """Add a row to the run's metrics."""
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def flush_metrics(folder: Path) -> None:
    """Flush the rows to disk, so that those before a checkpoint survive a power failure, as the checkpoint does."""
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        os.fsync(file.fileno())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics, without a last line that is incomplete because the run was killed.

    Raises:
        ConfigError: for a complete line that is no row.
    """
    path, rows = folder / METRICS, []
    try:
        for _, line in JsonLines(path, "").lines():
            row = parse_json(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no step")
            rows.append(row)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); expected the metrics of a run") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}:{len(rows) + 1} is not a row of a run's metrics ({reason_of(error)}); expected another folder, "
            "or the file without this line"
        ) from error
    return rows


def metrics_of(drafters: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of the runs that the named drafters belong to, without drafters that belong to none."""
    from draftsmith.heads.configs import is_named

    metrics = {name: read_metrics(Path(path).parent) for name, path in drafters.items() if not is_named(path)}
    return {name: rows for name, rows in metrics.items() if rows}


def is_finished(recipe: Recipe) -> bool:
    """Return whether an earlier start has finished the run, with as many steps.

    Not where the drafter is gone and a checkpoint is left, from which it is measured and saved again.
    """
    folder = Path(recipe.output)
    try:
        steps = parse_yaml(read_text(folder / RECIPE))["train"]["steps"]
        summary = read_json(folder / FINISHED)
        lost = not (folder / DRAFTER).is_dir() and (recipe.cotrain is None or summary["best_tau"] > 0)
        return steps == recipe.train.steps and "best_step" in summary and not (lost and _saved(recipe))
    except (OSError, ValueError, TypeError, KeyError):
        return False  # a damaged file is written again


def finish(folder: Path, summary: dict[str, Any]) -> None:
    """Write the summary of a finished run."""
    write_json(folder / FINISHED, summary)


def eval_command(recipe: Recipe) -> str:
    """Return the command that measures the recipe's drafter, where needed with a place for held-out prompts."""
    target, folder, prompts = recipe.target, Path(recipe.output), recipe.evaluation.prompts
    if recipe.teacher.kind == "server":  # the target fits an engine alone
        to = ["--target", target.model, "--format", "vllm", "--out", str(folder / "vllm")]
        return shlex.join(["draftsmith", "export", str(folder / DRAFTER), *to])
    prompts = prompts if isinstance(prompts, str) and prompts != SELF else "HELDOUT"
    given = {
        "--prompts": None if (target.model == EMBEDDED and prompts == "HELDOUT") or prompts == EMBEDDED else prompts,
        "--dtype": None if target.dtype == "float32" else target.dtype,
        "--attn-implementation": target.attn_implementation,
        "--chat-template": recipe.data.chat_template,
        "--out": str(folder / "eval"),
    }
    words = ["draftsmith", "eval", "--target", target.model, "--drafter", str(folder / DRAFTER)]
    words += [word for option, value in given.items() if value is not None for word in (option, value)]
    for name, value in recipe.data.template_options.items():
        words += ["--template-option", f"{name}={json.dumps(value)}"]
    return shlex.join([*words, *["--trust-remote-code"] * target.trust_remote_code])
