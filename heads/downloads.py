"""A drafter's folder on this machine, fetched from the Hub first where its name is a repository's."""

from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils.peft_utils import find_adapter_config_file

from draftsmith.errors import ConfigError, reason_of

DATA = ("*.json", "*.safetensors", "*.txt", "*.model")
"""What is fetched: data. No code, no pickled weights."""


def local_folder(path_or_repo: str, revision: str | None = None) -> Path:
    """The folder of a drafter.

    Args:
        path_or_repo: a local folder, `user/name` or `user/name@revision`.
        revision: a branch, tag or commit of the repository.

    Raises:
        ConfigError: for a folder or repository that is not there, a name in it that would leave the cache, or a
            revision given twice or with a local folder.
    """
    if Path(path_or_repo).is_dir():
        if revision is not None:
            raise ConfigError(f"revision={revision!r} of the local folder {path_or_repo}; expected none")
        return Path(path_or_repo)
    repo, at, named = path_or_repo.partition("@")
    if at and revision is not None:
        raise ConfigError(f"drafter={path_or_repo} with revision={revision!r}; expected one of the two")
    try:
        return Path(snapshot_download(repo, revision=named if at else revision, allow_patterns=list(DATA)))
    except Exception as error:  # the client has no common base: its own, httpx's, OSError, ValueError
        raise ConfigError(
            f"drafter={path_or_repo}; expected a local folder or a Hub id ({reason_of(error)})"
        ) from error


def require_whole_model(key: str, name: str, revision: str | None = None) -> None:
    """ConfigError for a folder or repository that holds a peft adapter, alone or beside a model.

    transformers would put it on unasked: pickled where it is no safetensors, and of any size that its config claims.
    """
    if find_adapter_config_file(name, revision=revision) is not None:
        expected = "a whole model, or of a target the local folder of an adapter"
        raise ConfigError(f"{key}={name} holds an adapter_config.json; expected {expected}")
