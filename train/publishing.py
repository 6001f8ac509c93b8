"""Push the best drafter of a finished run to the Hub, as the recipe's section `publish` says."""

import os
import shutil
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.hub.model_card import check_licence, check_repo
from draftsmith.hub.push import Destination, Publication, PushError, assemble, prepare, upload
from draftsmith.reading import read_json
from draftsmith.storage import clear_leftovers, write_json
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import PublishSection
from draftsmith.train.run_folder import CHECKPOINTS, DRAFTER, FINISHED, read_metrics

PUBLISHED = "published.json"


def check_publish(output: Path, publish: PublishSection, *, first_process: bool) -> None:
    """Check names, token and permission to write before any work; only the first process contacts the Hub.

    Raises:
        ConfigError: as of `prepare`.
        PushError: where the Hub cannot be reached, unless the run in `output` has checkpoints.
    """
    check_repo("publish.repo", publish.repo)
    check_licence(publish.licence)
    if publish.base_model is not None:
        check_repo("publish.base_model", publish.base_model)
    if not first_process:
        return
    try:
        prepare(_destination(publish))
    except PushError as error:
        if not any((output / CHECKPOINTS).glob("*")):
            raise
        Console(True).say(f"warning: {error}")  # a resumed run does not wait for the Hub


def publish_best(recipe: Recipe, publish: PublishSection, console: Console) -> None:
    """Push the best drafter of a finished run with its curves, unless it has been pushed to the same place.

    Raises:
        DraftsmithError: where it cannot be pushed; the run and its drafter are kept, and the same command tries again.
    """
    folder, where = Path(recipe.output), _destination(publish)
    clear_leftovers(folder)
    step, drafter = read_json(folder / FINISHED)["best_step"], folder / DRAFTER
    entry = {"repo": publish.repo, "revision": publish.revision, "best_step": step, "final": True}
    if entry.items() <= _record(folder).items():
        return
    if not drafter.is_dir():
        raise DraftsmithError(f"publish={where.repo}: this run has saved no drafter; nothing was pushed")
    options = {"licence": publish.licence, "base_model": publish.base_model, "metrics": read_metrics(folder)}
    copy = folder / f".publication.tmp-{os.getpid()}"
    try:
        prepare(where)  # again: recipe or repository may have changed since
        assemble(Publication(drafter, publish.repo, **options), copy)
        message = f"{recipe.name}: finished, best at step {step}"
        commit = upload(copy, where, message)
        write_json(folder / PUBLISHED, {**entry, "commit": commit})
    except (DraftsmithError, OSError) as error:
        raise DraftsmithError(
            f"{recipe.name}: the run is finished and its drafter is in {drafter}, but it was not published: {error} "
            f"(or: draftsmith push {drafter} {where.repo})"
        ) from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    console.say(f"{recipe.name}: published at {where.page}")


def _record(folder: Path) -> dict[str, Any]:
    """Return the record of the last push; {} for none, or a damaged one."""
    try:
        return dict(read_json(folder / PUBLISHED))
    except (OSError, ValueError, TypeError):
        return {}


def _destination(publish: PublishSection) -> Destination:
    return Destination(publish.repo, publish.revision, publish.private)
