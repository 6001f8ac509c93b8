"""Publish a drafter: assemble the folder, and upload it to the Hub with huggingface_hub.

The folder holds files of the drafter from an allow-list, its card, plots and measurement.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, get_token
from safetensors.torch import load_file

from draftsmith.distill.data_section import PLACES
from draftsmith.errors import ConfigError, DraftsmithError, one_line
from draftsmith.heads.checkpoint import WEIGHTS
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.transformers import CODE, write_generate
from draftsmith.hub.model_card import (
    EVALUATION,
    PLOTS,
    checkpoint_section,
    hub_target,
    teacher_of,
    without_local_names,
    write_card,
)
from draftsmith.names import check_licence, check_repo
from draftsmith.provenance import weights_fingerprint
from draftsmith.storage import atomic_folder, require_writable, write_json

if TYPE_CHECKING:
    from draftsmith.eval.results import StoredEvaluation

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER += ("chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
PUBLISHED = ("config.json", "generation_config.json", "model.safetensors.index.json", "*.safetensors", *TOKENIZER)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "quality.json", *TOKENIZER)
TARGET = "target"
"""Folder of the adapter of a jointly trained target: next to the drafter in a run, inside it in a publication."""
STALE = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", EVALUATION)
STALE += (*(f"{TARGET}/{name}" for name in ADAPTER), f"{CODE}/generate.py", f"{CODE}/requirements.txt")
"""Files of an earlier push that would be read with the new one: other weights, or their measurement."""


@dataclass(frozen=True)
class Publication:
    """A drafter, its repository, and the details of its card."""

    folder: Path
    """A draftsmith checkpoint."""
    repo: str
    """`user/name`"""
    evaluation: Path | None = None
    """An `eval.json` or its folder; by default the one in the checkpoint, if there is one."""
    measured_as: str | None = None
    """The drafter's name in the evaluation; needed if it has several drafters and none with this folder."""
    licence: str | None = None
    base_model: str | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the training run's `metrics.jsonl`."""

    @property
    def target(self) -> str | None:
        """Hub id of the target; None for a local one."""
        return self.base_model or hub_target(checkpoint_section(self.folder))

    @property
    def title(self) -> str:
        """Title in the commit message."""
        name = DRAFTERS[checkpoint_section(self.folder)["type"]].card_name
        return f"{name[0].upper()}{name[1:]} for {self.target or 'its target'}"


def check_publication(publication: Publication) -> list[str]:
    """Check a publication and return notes on what its card will lack; raise ConfigError if it cannot be published."""
    check_repo("repo", publication.repo)
    section = checkpoint_section(publication.folder)
    if publication.licence is not None:
        check_licence(publication.licence)
    if publication.base_model is not None:
        check_repo("base_model", publication.base_model)
    if not any(publication.folder.glob("*.safetensors")):
        raise ConfigError(f"{publication.folder} holds no *.safetensors; expected a drafter checkpoint")
    _adapter(publication.folder, section)
    measured = _measured(publication)
    notes = []
    if publication.base_model is None and hub_target(section) is None:
        notes.append(
            "base_model is left out, since the target's name is not that of a repository; give --base-model user/name"
        )
    if publication.licence is None:
        notes.append(
            "the licence is left out; give --licence (a draft model cut from a target has the target's licence)"
        )
    if measured is None:
        command = "eval server" if teacher_of(section) == "server" else "eval"
        notes.append(f"not measured: the card has no alpha, tau and speedup; give --eval (see `draftsmith {command}`)")
    return notes


def assemble(publication: Publication, out: Path) -> list[Path]:
    """Write the publication to `out`, which is new, empty or an earlier publication; return its files, relative to it.

    Raises:
        ConfigError: if `out` holds other files.
    """
    check_out(out, publication.folder)
    source, section = publication.folder, checkpoint_section(publication.folder)
    measured = _measured(publication)
    with atomic_folder(out) as temporary:
        _copy(source, temporary, PUBLISHED)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write_json(temporary / "config.json", _public_config(config, publication.base_model))
        if (adapter := _adapter(source, section)) is not None:
            _copy(adapter, temporary / TARGET, ADAPTER)
            file = temporary / TARGET / "adapter_config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            base = publication.base_model or without_local_names(config["base_model_name_or_path"])
            write_json(file, {**config, "base_model_name_or_path": base})
        if section["type"] != DraftModel.type:
            write_generate(temporary)
        evaluation, drafter = None, None
        if measured is not None:
            evaluation, drafter = without_local_names(measured)
            evaluation["settings"]["drafters"][drafter] = publication.repo
        write_card(
            temporary,
            evaluation,
            drafter,
            repo=publication.repo,
            licence=publication.licence,
            base_model=publication.base_model,
            metrics=publication.metrics,
        )
    return sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())


def check_out(out: Path, source: Path) -> None:
    """Check that `out` may be replaced: it is new, empty or an earlier publication, and not `source`."""
    require_writable("out", out)
    if out.resolve() == source.resolve():
        raise ConfigError(f"out={out} is the drafter; expected another folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; expected a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    known = {PLOTS, TARGET, CODE, "README.md", EVALUATION}
    for entry in out.iterdir():
        if entry.name not in known and not any(entry.match(pattern) for pattern in PUBLISHED):
            raise ConfigError(f"out={out} holds {entry.name}; expected a new folder, or one that push wrote")
    checkpoint_section(out)


def _copy(source: Path, out: Path, patterns: tuple[str, ...]) -> None:
    out.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and any(file.match(pattern) for pattern in patterns):
            shutil.copyfile(file, out / file.name)


def _public_config(config: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """Return config.json without local paths and addresses, with the target's name on the Hub if it is given."""
    section = without_local_names(config["draftsmith"])
    server = ((section.get("recipe") or {}).get("teacher") or {}).get("server") or {}
    server |= {key: place for key, place in PLACES.items() if server.get(key) is not None}
    if base_model is not None:
        section["target"]["name"] = base_model
        if "target" in (section["recipe"] or {}):
            section["recipe"]["target"]["model"] = base_model
    return {**config, **without_local_names({"_name_or_path": config.get("_name_or_path", "")}), "draftsmith": section}


def run_of(folder: Path) -> Path:
    """Return the folder of the run that a drafter's folder is in, also if `folder` is `.`."""
    return Path(os.path.abspath(folder)).parent


def _adapter(folder: Path, section: dict[str, Any]) -> Path | None:
    """Return the adapter of a target that was trained jointly with the drafter; ConfigError if it is missing."""
    if not section["target"].get("quality"):
        return None
    for path in (folder / TARGET, run_of(folder) / TARGET):
        if (path / "adapter_config.json").is_file():
            return path
    raise ConfigError(
        f"{folder} was trained together with its target, and the adapter is missing; expected the folder "
        f"{run_of(folder) / TARGET}"
    )


def _measured(publication: Publication) -> "tuple[StoredEvaluation, str] | None":
    """Return the measurement and the drafter's name in it: the given one, the one with this folder, or the only one."""
    path = publication.evaluation
    if path is None and (publication.folder / EVALUATION).is_file():
        path = publication.folder / EVALUATION
    if path is None:
        return None
    from draftsmith.eval.results import read_evaluation  # loads the decoder: only where there is one

    evaluation = read_evaluation(path)
    section = checkpoint_section(publication.folder)
    kind, served = section["type"], bool(evaluation.get("server"))
    if served and teacher_of(section) != "server":  # its rows name no type and no weights
        raise ConfigError(
            f"{path} was measured on a server, which does not tell which drafter it has; expected the eval.json of "
            "draftsmith eval"
        )
    named = evaluation["settings"]["drafters"]
    measured = {row["drafter"]: row["drafter_type"] for row in evaluation["rows"]}
    if served and not measured:
        measured = dict.fromkeys(named, kind)
    own = [name for name, folder in named.items() if Path(folder).resolve() == publication.folder.resolve()]
    own = [name for name in own if name in measured]
    # A drafter whose folder exists is another one; if its folder is missing, it may be this one, moved.
    only = [name for name in measured if len(measured) == 1 and not Path(named[name]).is_dir()]
    candidates = [publication.measured_as] if publication.measured_as else own or only
    if len(candidates) != 1 or candidates[0] not in measured:
        given = f"measured_as={publication.measured_as!r}" if publication.measured_as else str(path)
        raise ConfigError(
            f"{given}; expected --as with one of the drafters measured there: {', '.join(sorted(measured))}"
        )
    name = candidates[0]
    if measured[name] != kind:
        raise ConfigError(f"{path}: {name} is a drafter of type {measured[name]}; expected {kind}, as this one is")
    then, weights = evaluation["identity"].get("drafters", {}).get(name), publication.folder / WEIGHTS
    # Unknown for draft models, and in float16.
    known = then is not None and kind != DraftModel.type and evaluation["settings"]["dtype"] != "float16"
    if known and weights.is_file() and then != weights_fingerprint(load_file(weights)):
        raise ConfigError(f"{path}: {name} had other weights than {publication.folder} has; expected it measured again")
    return evaluation, name


MAIN = "main"


def upload(folder: Path, repo: str, message: str, *, revision: str | None = None, private: bool = False) -> str:
    """Upload an assembled folder as one commit, and return the page and the commit.

    Args:
        repo: a model repository, which is created if it is missing.
        revision: a branch, which is created from main if it is missing; by default main.
        private: of a new repository.

    Raises:
        DraftsmithError: for an upload that failed; nothing is committed then, and the same call repeats it.
    """
    api, branch = HfApi(), revision or MAIN
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if branch != MAIN:
            api.create_branch(repo, branch=branch, exist_ok=True)
        # Other files than those that belong to the last push may be the user's.
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=list(STALE)
        )
    except Exception as error:  # there is no common base: the client's, httpx's, RuntimeError for LFS, xet's
        reason = one_line(str(error).replace(get_token() or "\0", "(token)") or type(error).__name__, 300)
        login = "`hf auth login` or HF_TOKEN with write access, and a connection to the Hub"
        # The chain of errors would show headers and addresses.
        raise DraftsmithError(f"push={repo} failed; nothing was published ({reason}); expected {login}") from None
    return f"{api.endpoint}/{repo}{'' if branch == MAIN else f'/tree/{branch}'} at {done.oid[:12]}"
