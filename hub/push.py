"""Push a drafter to the Hub with huggingface_hub's upload.

The upload is resumable: large files are stored by their content one by one, and the commit comes last. After an
interruption, call again: stored files are not sent again, and unchanged files are not committed again.

Errors of the connection and of the Hub become one line that says what to do, without the token.
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

LOGIN = "`hf auth login`, or HF_TOKEN, with a token with write access (https://huggingface.co/settings/tokens)"


class PushError(DraftsmithError):
    """The Hub or the connection to it failed; no local file is lost, and the same call continues."""


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn errors of the client into ConfigError (the user has to change something) or PushError (try again)."""
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:  # there is no common base: the client's, httpx's, RuntimeError for LFS, xet's
        raise _explain(repo, error) from None  # the chain would show headers and addresses


def _explain(repo: str, error: Exception) -> DraftsmithError:
    causes = _chain(error)
    answered = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    cause = error if isinstance(error, ValueError) else answered or causes[-1]
    reason = _without_token(" ".join(str(cause).split()))[:300]
    status = None if answered is None else answered.response.status_code
    if status == 401:
        return ConfigError(f"push={repo}: the Hub refused the token (401); expected {LOGIN}")
    if status == 403:
        return ConfigError(f"push={repo}: the token has no write access to it (403); expected {LOGIN}")
    if status == 404:
        return ConfigError(f"push={repo}: the Hub has no such repository or revision (404: {reason}); expected another")
    if status == 400 or isinstance(error, ValueError):
        return ConfigError(f"push={repo}: the Hub refused it ({reason}); expected a valid name, branch and card")
    if status is not None:
        return PushError(f"push={repo}: the Hub answered {status} ({reason}); the same command continues from there")
    if isinstance(causes[-1], OfflineModeIsEnabled):
        return ConfigError(f"push={repo} with HF_HUB_OFFLINE; expected it unset")
    return PushError(
        f"push={repo}: the connection to {constants.ENDPOINT} failed ({type(causes[-1]).__name__}: {reason}); the same "
        "command continues: files that have arrived are not sent again"
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its explicit causes."""
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
    """By default main; a missing branch is created from main."""
    private: bool = False
    """For a new repository; an existing one is not changed."""

    @property
    def page(self) -> str:
        branch = self.revision or MAIN
        return f"{HfApi().endpoint}/{self.repo}" + ("" if branch == MAIN else f"/tree/{branch}")


def prepare(destination: Destination) -> None:
    """Create the repository and its branch if they are missing, and check that the token has write access.

    Raises:
        ConfigError: for a missing or refused token, and for a name or branch that the Hub does not accept.
        PushError: if the Hub cannot be reached.
    """
    check_repo("repo", destination.repo)
    if get_token() is None:
        raise ConfigError(f"push={destination.repo}: no access token of the Hub; expected {LOGIN}")
    api, branch = HfApi(), destination.revision
    with explained(destination.repo), _quiet():
        api.create_repo(destination.repo, private=destination.private or None, exist_ok=True)
        if branch not in (None, MAIN):
            api.create_branch(destination.repo, branch=branch, exist_ok=True)
        # Asking how a file would be uploaded needs write access; nothing is uploaded.
        probe = CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"-")
        api.preupload_lfs_files(destination.repo, additions=[probe], revision=branch)


def upload(
    folder: Path, destination: Destination, message: str, *, stale: tuple[str, ...] = (), progress: bool = True
) -> str:
    """Upload an assembled folder as one commit, after `prepare`; return the commit's id.

    Args:
        stale: patterns of files to delete from the repository if the folder has no such file.

    Raises:
        ConfigError: for a refused token, or a card that the Hub does not accept.
        PushError: if the upload was interrupted; the same call continues.
    """
    with explained(destination.repo), _quiet(bars=progress):
        # Other files may be the user's and are not deleted.
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
    """Disable the client's progress bars in the block unless `bars`."""
    before = are_progress_bars_disabled()
    try:
        if not bars:
            disable_progress_bars()
        yield
    finally:
        if not before:
            enable_progress_bars()
