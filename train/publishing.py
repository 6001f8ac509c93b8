"""Push the best drafter to the Hub as the recipe's section `publish` says: at the end, or after each new best.

Pushing does not delay training: a copy is uploaded in a thread, one at a time, and a failure is one printed line. A
failure at the end of the run is an error, raised after everything else is done; the same command tries again.
"""

import os
import shutil
import threading
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


class Publisher:
    """Pushes a run's drafters, on the main process."""

    def __init__(self, recipe: Recipe, publish: PublishSection, console: Console) -> None:
        self._recipe, self._publish, self._console = recipe, publish, console
        self._folder = Path(recipe.output)
        self._thread: threading.Thread | None = None
        self._problem: DraftsmithError | None = None
        self._tried = self._record().get("best_step", 0)  # at step 0 nothing was trained

    def keep_up(self, best_step: int) -> None:
        """Push the best drafter if it is new and no push is running; called after every evaluation."""
        if self._publish.when != "best" or (self._thread is not None and self._thread.is_alive()):
            return
        self._report()
        if best_step == self._tried:
            return
        self._tried = best_step
        copy = self._folder / f".publication.tmp-{os.getpid()}"  # the next start deletes a killed run's
        try:
            assemble(self._publication([]), copy)
        except Exception as error:  # whatever the model card's libraries raise: a push must not stop training
            self._problem = DraftsmithError(" ".join(str(error).split()) or type(error).__name__)
            self._report()
            return
        self._thread = threading.Thread(target=self._push, args=(copy, best_step, False), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Push the best drafter of a finished run with its curves, unless it has been pushed.

        Raises:
            DraftsmithError: where it cannot be pushed; the run and its drafter are kept.
        """
        if self._thread is not None:
            self._thread.join()
            self._report()
        clear_leftovers(self._folder)
        best_step = read_json(self._folder / FINISHED)["best_step"]
        done = self._record()
        if done and done["final"] and done["best_step"] == best_step:
            return
        where, drafter = _destination(self._publish), self._folder / DRAFTER
        if not drafter.is_dir():
            raise DraftsmithError(f"publish={where.repo}: this run has saved no drafter; nothing was pushed")
        copy = self._folder / f".publication.tmp-{os.getpid()}"
        try:
            prepare(where)  # again: recipe or repository may have changed since
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
        """Upload the copy, record the push and delete the copy; failures go to `_problem`."""
        message = f"{self._recipe.name}: {'finished, ' if final else ''}best at step {best_step}"
        try:
            commit = upload(copy, _destination(self._publish), message, progress=False)
            write_json(self._folder / PUBLISHED, self._entry(best_step, final) | {"commit": commit})
        except (DraftsmithError, OSError) as error:
            self._problem = DraftsmithError(str(error))
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _report(self) -> None:
        """Print a failed push in one line, from the thread that owns the console."""
        if self._problem is not None:
            self._console.say(f"warning: the best drafter, of step {self._tried}, was not published ({self._problem})")
            self._problem = None

    def _publication(self, metrics: list[dict[str, Any]]) -> Publication:
        publish = self._publish
        return Publication(
            self._folder / DRAFTER,
            publish.repo,
            licence=publish.licence,
            base_model=publish.base_model,
            metrics=metrics,
        )

    def _entry(self, best_step: int, final: bool) -> dict[str, Any]:
        return {
            "repo": self._publish.repo,
            "revision": self._publish.revision,
            "best_step": best_step,
            "final": final,
        }

    def _record(self) -> dict[str, Any]:
        """Return the record of the last push if it went to the same destination, else nothing."""
        destination = (self._publish.repo, self._publish.revision)
        try:
            record = read_json(self._folder / PUBLISHED)
            return record if (record["repo"], record["revision"]) == destination else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # nothing was pushed, or the record is damaged


def _destination(publish: PublishSection) -> Destination:
    return Destination(publish.repo, publish.revision, publish.private)
