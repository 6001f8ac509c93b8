"""Publishing a drafter on the Hub, with huggingface_hub's own upload.

Resumable: large files arrive one by one and are kept by their content, and the commit comes last. A call that was cut
off is made again: what has arrived is not sent again, and what has not changed is not committed again.

What goes wrong between here and the Hub, as one line that says what to do; never with a token in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.hub.model_card import check_repo

LOGIN = "`hf auth login`, or HF_TOKEN, with a token that may write (https://huggingface.co/settings/tokens)"


class PushError(DraftsmithError):
    """The Hub, or the way to it, failed; nothing local was lost, and the same call goes on."""


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn whatever the client raises inside into ConfigError (yours to mend) or PushError (try again)."""
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:  # the client has no common base: its own, httpx's, RuntimeError for LFS, xet's
        raise _explain(repo, error) from None  # a chain would show headers and addresses


def _explain(repo: str, error: Exception) -> DraftsmithError:
    causes = _chain(error)
    answered = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    told = error if isinstance(error, ValueError) else answered or causes[-1]
    reason = _without_token(" ".join(str(told).split()))[:300]
    status = None if answered is None else answered.response.status_code
    if status == 401:
        return ConfigError(f"push={repo}: the Hub refused the token (401); expected {LOGIN}")
    if status == 403:
        return ConfigError(f"push={repo}: the token may not write there (403); expected one that may, by {LOGIN}")
    if status == 404:
        return ConfigError(f"push={repo}: the Hub knows no such repository or revision (404: {reason}); expected one")
    if status == 400 or isinstance(error, ValueError):
        return ConfigError(f"push={repo}: the Hub refused it ({reason}); expected a valid name, branch and card")
    if status is not None:
        return PushError(f"push={repo}: the Hub answered {status} ({reason}); the same command goes on from there")
    if isinstance(causes[-1], OfflineModeIsEnabled):
        return ConfigError(f"push={repo} with HF_HUB_OFFLINE; expected it unset")
    return PushError(
        f"push={repo}: the connection to {constants.ENDPOINT} failed ({type(causes[-1]).__name__}: {reason}); the same "
        "command goes on: what has arrived is not sent again"
    )


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, as far as they were given on purpose."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _without_token(text: str) -> str:
    token = get_token()
    return text.replace(token, "(token)") if token else text


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
