"""What a recipe's section `publish` asks for: the best drafter on the Hub, at the end or whenever there is a new one.

Pushing costs a run nothing: a copy is uploaded from a thread, one at a time, and what fails on the way is one line. At
the end what failed is an error, behind everything that the run had to do, and the same command tries again.
"""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.hub.model_card import check_licence, check_repo
from draftsmith.hub.publication import STALE, Publication, assemble
from draftsmith.hub.push import Destination, PushError, prepare, upload
from draftsmith.reading import read_json
from draftsmith.storage import clear_leftovers, write_json
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.run_folder import CHECKPOINTS, DRAFTER, FINISHED, read_metrics

PUBLISHED = "published.json"


def is_first_process() -> bool:
    """Before there is an accelerator to ask."""
    return int(os.environ.get("RANK", "0")) == 0


def check_publish(recipe: Recipe) -> None:
    """Find out before any work whether the run may publish: names, token, the right to write; the first process asks.

    Raises:
        ConfigError: as of `prepare`.
        PushError: where the Hub cannot be reached, unless the run has begun before.
    """
    publish = recipe.publish
    if publish is None:
        return
    check_repo("publish.repo", publish.repo)
    check_licence(publish.licence)
    if publish.base_model is not None:
        check_repo("publish.base_model", publish.base_model)
    if not is_first_process():
        return
    try:
        prepare(_destination(recipe))
    except PushError as error:
        if not any((Path(recipe.output) / CHECKPOINTS).glob("*")):
            raise
        Console(True).say(f"warning: {error}")  # a run that goes on does not wait for the Hub


class Publisher:
    """On the main process; does nothing where the recipe has no such section."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self._recipe, self._console = recipe, console
        self._folder = Path(recipe.output)
        self._thread: threading.Thread | None = None
        self._problem: DraftsmithError | None = None
        self._tried = self._record().get("best_step", 0)  # at step 0 nothing was trained

    def keep_up(self, best_step: int) -> None:
        """To be called behind every evaluation: push the best drafter, if it is a new one and none is on its way."""
        publish = self._recipe.publish
        if publish is None or publish.when != "best" or (self._thread is not None and self._thread.is_alive()):
            return
        self._tell()
        if best_step == self._tried:
            return
        self._tried = best_step
        copy = self._folder / f".publication.tmp-{os.getpid()}"  # a killed run's is cleared away by the next start
        try:
            assemble(self._publication([]), copy)
        except Exception as error:  # whatever a card's libraries raise: training is worth more than a push
            self._problem = DraftsmithError(" ".join(str(error).split()) or type(error).__name__)
            return self._tell()
        self._thread = threading.Thread(target=self._push, args=(copy, best_step, False), daemon=True)
        self._thread.start()
        return None

    def finish(self) -> None:
        """Push the best drafter of a finished run with its curves, unless that was done.

        Raises:
            DraftsmithError: where it cannot be pushed; the run and its drafter are kept.
        """
        if self._recipe.publish is None:
            return
        if self._thread is not None:
            self._thread.join()
            self._tell()
        clear_leftovers(self._folder)
        best_step = read_json(self._folder / FINISHED)["best_step"]
        done = self._record()
        if done and done["final"] and done["best_step"] == best_step:
            return
        where, drafter = _destination(self._recipe), self._folder / DRAFTER
        if not drafter.is_dir():
            raise DraftsmithError(f"publish={where.repo}: no drafter of this run was worth keeping; nothing was pushed")
        copy = self._folder / f".publication.tmp-{os.getpid()}"
        try:
            prepare(where)  # again: the recipe may have changed since, or the repository
            assemble(self._publication(read_metrics(self._folder)), copy)
        except (DraftsmithError, OSError) as error:
            self._problem = DraftsmithError(str(error))
        else:
            self._push(copy, best_step, True)
        if self._problem is not None:
            raise DraftsmithError(
                f"{self._recipe.name}: the run is finished and its drafter is in {drafter}, but it was not published: "
                f"{self._problem} (or: draftsmith push {drafter} {where.repo})"
            )
        self._console.say(f"{self._recipe.name}: published at {where.page}")

    def _push(self, copy: Path, best_step: int, final: bool) -> None:
        """Upload the copy, note it, and delete it; never raises."""
        message = f"{self._recipe.name}: {'finished, ' if final else ''}best at step {best_step}"
        try:
            commit = upload(copy, _destination(self._recipe), message, stale=STALE, progress=False)
            write_json(self._folder / PUBLISHED, self._entry(best_step, final) | {"commit": commit})
        except (DraftsmithError, OSError) as error:
            self._problem = DraftsmithError(str(error))
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _tell(self) -> None:
        """A push that failed while the run goes on is one line, said by the thread that has the console."""
        if self._problem is not None:
            self._console.say(f"warning: the best drafter, of step {self._tried}, was not published ({self._problem})")
            self._problem = None

    def _publication(self, metrics: list[dict[str, Any]]) -> Publication:
        publish = self._recipe.publish
        values = {"licence": publish.licence, "base_model": publish.base_model, "metrics": metrics}
        return Publication(self._folder / DRAFTER, publish.repo, **values)

    def _entry(self, best_step: int, final: bool) -> dict[str, Any]:
        publish = self._recipe.publish
        return {"repo": publish.repo, "revision": publish.revision, "best_step": best_step, "final": final}

    def _record(self) -> dict[str, Any]:
        """What was pushed last, if it went to where it would go now."""
        file, publish = self._folder / PUBLISHED, self._recipe.publish
        if publish is None:
            return {}
        try:
            found = read_json(file)
            return found if (found["repo"], found["revision"]) == (publish.repo, publish.revision) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # nothing was pushed, or nobody can tell what


def _destination(recipe: Recipe) -> Destination:
    return Destination(recipe.publish.repo, recipe.publish.revision, recipe.publish.private)
