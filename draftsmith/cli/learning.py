"""Learning in `draftsmith generate`: checks before anything is loaded, and the drafter that is saved."""

from collections.abc import Callable
from pathlib import Path

from draftsmith.cli.options import require_trained
from draftsmith.errors import ConfigError
from draftsmith.eval.session import Session
from draftsmith.heads.checkpoint import describe_target, is_named
from draftsmith.heads.validation import local_folder, read_config
from draftsmith.storage import require_writable, writing
from draftsmith.train.online.learner import OnlineLearning, Update


def require_learnable(drafter: str | None, *, learn: bool, save: Path | None) -> None:
    """Raise ConfigError for a folder without learning, learning without a drafter, or a folder of something else."""
    if save is not None and not learn:
        raise ConfigError(f"save-drafter={save} without --learn; expected both")
    if learn and drafter is None:
        raise ConfigError("learn without a drafter; expected --drafter FOLDER, a trained drafter")
    if learn:
        require_trained([drafter] if drafter else [])
    if save is not None:
        require_writable("save-drafter", save)
        if save.exists() and (not save.is_dir() or (any(save.iterdir()) and not _holds_drafter(save))):
            raise ConfigError(f"save-drafter={save} holds something else; expected a new folder or a drafter's")


def _holds_drafter(folder: Path) -> bool:
    try:
        return read_config(folder, folder)[1] is not None
    except ConfigError:
        return False


class Learned:
    """A learner whose drafter is saved after every update that was adopted, and at the end.

    Args:
        drafter: folder or name of the drafter that the session has loaded.
        save: folder to write; None: nothing is written.
        every, seed: see `OnlineLearning`.
    """

    def __init__(
        self, session: Session, target: str, drafter: str, save: Path | None, seed: int, every: int | None = None
    ) -> None:
        self.learning = OnlineLearning(seed=seed, every=every, on_update=self._updated)
        self._session, self._save = session, save
        stored = None if is_named(drafter) else read_config(local_folder(drafter), drafter)[1]
        described = describe_target(session.target, session.tokenizer, target) if stored is None else None
        self._target = described if stored is None else stored.target.model_dump()
        self._recipe = None if stored is None else stored.recipe

    def _updated(self, update: Update) -> None:
        if update.kind == "adopted":
            self.save()

    def save(self) -> None:
        """Write the drafter in use, if a folder was named."""
        if self._save is not None:
            assert self._target is not None
            with writing(self._save, "free some space; the drafter is as it was last saved"):
                self.learning.save(self._save, self._target, self._session.tokenizer, self._recipe)

    def finish(self, say: Callable[[str], None]) -> None:
        """Save the drafter, and print the updates and what was learned."""
        self.save()
        for update in self.learning.updates:
            say(str(update))
        say(self.learning.summary() + (f"; saved in {self._save}" if self._save is not None else ""))
