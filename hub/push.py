"""Publishing a drafter on the Hub, with huggingface_hub's own upload.

Resumable: large files arrive one by one and are kept by their content, and the commit comes last. A call that was cut
off is made again: what has arrived is not sent again, and what has not changed is not committed again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from draftsmith.errors import ConfigError
from draftsmith.hub.card_data import check_repo
from draftsmith.hub.hub_errors import LOGIN, explained

MAIN = "main"


@dataclass(frozen=True)
class Destination:
    """A model repository, and the branch that is pushed to."""

    repo: str
    revision: str | None = None
    """By default main; made from it where there is none of that name."""
    private: bool = False
    """Of a repository that is made; one that is there stays as it is."""

    @property
    def page(self) -> str:
        branch = self.revision or MAIN
        return f"{HfApi().endpoint}/{self.repo}" + ("" if branch == MAIN else f"/tree/{branch}")


def prepare(destination: Destination) -> None:
    """Make the repository and its branch where they are missing, and find out whether the token may write there.

    Raises:
        ConfigError: without a token, for one that is refused, and for a name or branch that the Hub does not take.
        PushError: where the Hub cannot be reached.
    """
    check_repo("repo", destination.repo)
    if get_token() is None:
        raise ConfigError(f"push={destination.repo}: no token of the Hub; expected {LOGIN}")
    api, branch = HfApi(), destination.revision
    with explained(destination.repo), _quiet():
        api.create_repo(destination.repo, private=destination.private or None, exist_ok=True)
        if branch not in (None, MAIN):
            api.create_branch(destination.repo, branch=branch, exist_ok=True)
        # Asking how a file would be uploaded takes the right to write; nothing is uploaded.
        asked = CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"-")
        api.preupload_lfs_files(destination.repo, additions=[asked], revision=branch)


def upload(
    folder: Path, destination: Destination, message: str, *, stale: tuple[str, ...] = (), progress: bool = True
) -> str:
    """Upload an assembled folder as one commit behind `prepare`; the commit's id.

    Args:
        stale: patterns of files to delete from the repository where the folder has none of that name.

    Raises:
        ConfigError: for a token that is refused, or a card that the Hub does not take.
        PushError: where it was cut off; the same call goes on.
    """
    with explained(destination.repo), _quiet(bars=progress):
        # Nothing else is deleted: it may be the user's.
        done = HfApi().upload_folder(
            repo_id=destination.repo,
            folder_path=folder,
            revision=destination.revision,
            commit_message=message,
            delete_patterns=list(stale) or None,
        )
    return done.oid


@contextmanager
def _quiet(*, bars: bool = False) -> Iterator[None]:
    """Without the client's progress bars, unless they are asked for."""
    before = are_progress_bars_disabled()
    try:
        if not bars:
            disable_progress_bars()
        yield
    finally:
        if not before:
            enable_progress_bars()
