"""What goes wrong between here and the Hub, as one line that says what to do; never with a token in it."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from draftsmith.errors import ConfigError, DraftsmithError

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
