"""The folder that is published: a drafter's files by an allow-list, its card, plots and measurement; nothing else."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from draftsmith.errors import ConfigError
from draftsmith.eval.evaluation import EVALUATION, read_evaluation
from draftsmith.heads.checkpoint import WEIGHTS
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.transformers import CODE, write_generate
from draftsmith.hub.model_card import (
    PLOTS,
    CardRequest,
    check_licence,
    check_repo,
    checkpoint_section,
    hub_target,
    require_no_secret,
    without_local_paths,
    write_card,
)
from draftsmith.provenance import weights_fingerprint
from draftsmith.storage import atomic_folder, require_apart, require_writable, write_json

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER += ("chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
PUBLISHED = ("config.json", "generation_config.json", "model.safetensors.index.json", "*.safetensors", *TOKENIZER)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "quality.json", *TOKENIZER)
TARGET = "target"
"""Folder of the adapter of a target that was trained too: beside the drafter's in a run, inside it when published."""
WRITTEN = ("config.json", "README.md", EVALUATION, f"{TARGET}/adapter_config.json", f"{TARGET}/quality.json")
"""Files with texts of ours, in which a secret could stand."""
STALE = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", EVALUATION)
STALE += (*(f"{TARGET}/{name}" for name in ADAPTER), f"{CODE}/generate.py", f"{CODE}/requirements.txt")
"""What an earlier push may have left that would be read for the new one: other weights, or what those were worth."""


@dataclass(frozen=True)
class Publication:
    """What is published where, and what its card says."""

    folder: Path
    """A draftsmith checkpoint."""
    repo: str
    """`user/name`"""
    evaluation: Path | None = None
    """An `eval.json` or the folder of one; by default the checkpoint's own, if there is one."""
    measured_as: str | None = None
    """The drafter's name in it, where it has several and none with this folder."""
    licence: str | None = None
    base_model: str | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Of the training run."""

    @property
    def title(self) -> str:
        """In a commit's message."""
        section = checkpoint_section(self.folder)
        name = DRAFTERS[section["type"]].card_name
        return f"{name[0].upper()}{name[1:]} for {self.base_model or hub_target(section) or 'its target'}"


def check_publication(publication: Publication) -> list[str]:
    """ConfigError for what cannot be published; else notes on what the card will lack. Nothing is written."""
    check_repo("repo", publication.repo)
    section = checkpoint_section(publication.folder)
    check_licence(publication.licence)
    if publication.base_model is not None:
        check_repo("base_model", publication.base_model)
    if not any(publication.folder.glob("*.safetensors")):
        raise ConfigError(f"{publication.folder} holds no *.safetensors; expected a drafter checkpoint")
    _adapter(publication.folder, section)
    evaluation, _ = _measured(publication)
    notes = []
    if publication.base_model is None and hub_target(section) is None:
        notes.append(
            "base_model is left out: the target is not on the Hub by that name; --base-model user/name says it"
        )
    if publication.licence is None:
        notes.append(
            "the licence is left out; --licence says it (a draft model cut from a target is under the target's)"
        )
    if evaluation is None:
        notes.append("not measured: the card has no alpha, tau and speedup; --eval takes what `draftsmith eval` wrote")
    return notes


def assemble(publication: Publication, out: Path) -> list[Path]:
    """Write the folder that is published to `out`, which is new, empty or an earlier one; its files, relative to it.

    Raises:
        ConfigError: for a folder that holds something else, or a text that holds what looks like a token.
    """
    check_out(out, publication.folder)
    source, section = publication.folder, checkpoint_section(publication.folder)
    evaluation, drafter = _measured(publication)
    with atomic_folder(out) as temporary:
        _copy(source, temporary, PUBLISHED)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write_json(temporary / "config.json", _public_config(config, publication.base_model))
        adapter = _adapter(source, section)
        if adapter is not None:
            _copy(adapter, temporary / TARGET, ADAPTER)
            _publish_base(temporary / TARGET / "adapter_config.json", publication.base_model)
        if section["type"] != DraftModel.type:
            write_generate(temporary)
        if evaluation is not None:
            evaluation = without_local_paths(
                {**evaluation, "notes": [*evaluation["notes"], *_of_target(evaluation, section)]}
            )
            evaluation["settings"]["drafters"][drafter] = publication.repo
        request = CardRequest(publication.repo, publication.licence, publication.base_model)
        write_card(temporary, evaluation, drafter, request, publication.metrics)
        for name in WRITTEN:
            if (temporary / name).is_file():
                require_no_secret(name, (temporary / name).read_text(encoding="utf-8"))
    return sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())


def check_out(out: Path, source: Path) -> None:
    """ConfigError unless `out` may be replaced: it is apart from `source`, and new, empty or an earlier publication."""
    require_writable("out", out)
    require_apart("out", out, source)
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
    """config.json without what names a place on this machine; the target under its name on the Hub, where given."""
    section = without_local_paths(config["draftsmith"])
    if base_model is not None:
        section["target"]["name"] = base_model
        if "target" in (section["recipe"] or {}):
            section["recipe"]["target"]["model"] = base_model
    return {**config, **without_local_paths({"_name_or_path": config.get("_name_or_path", "")}), "draftsmith": section}


def _publish_base(file: Path, base_model: str | None) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    base = base_model or without_local_paths(config["base_model_name_or_path"])
    write_json(file, {**config, "base_model_name_or_path": base})


def run_of(folder: Path) -> Path:
    """The folder of the run that a drafter's folder lies in, also where that is `.`"""
    return Path(os.path.abspath(folder)).parent


def _adapter(folder: Path, section: dict[str, Any]) -> Path | None:
    """The adapter of a target that was trained together with the drafter; ConfigError where it is gone."""
    if not section["target"].get("quality"):
        return None
    for place in (folder / TARGET, run_of(folder) / TARGET):
        if (place / "adapter_config.json").is_file():
            return place
    raise ConfigError(
        f"{folder} was trained together with its target, and the adapter is not beside it; expected the folder "
        f"{run_of(folder) / TARGET}"
    )


def _measured(publication: Publication) -> tuple[dict[str, Any] | None, str | None]:
    """The measurement and the drafter's name in it: as told, the one with this folder, or the only one, moved since."""
    place = publication.evaluation
    if place is None and (publication.folder / EVALUATION).is_file():
        place = publication.folder / EVALUATION
    if place is None:
        return None, None
    evaluation = read_evaluation(place)
    named = evaluation["settings"]["drafters"]
    measured = {row["drafter"]: row["drafter_type"] for row in evaluation["rows"]}
    own = [name for name, folder in named.items() if Path(folder).resolve() == publication.folder.resolve()]
    # What lies in another folder still is another drafter; one that is gone may be this one, moved.
    only = [name for name in measured if len(measured) == 1 and not Path(named[name]).is_dir()]
    candidates = [publication.measured_as] if publication.measured_as else own or only
    if len(candidates) != 1 or candidates[0] not in measured:
        asked = f"measured_as={publication.measured_as!r}" if publication.measured_as else str(place)
        raise ConfigError(
            f"{asked}; expected --as with one of the drafters measured there: {', '.join(sorted(measured))}"
        )
    name, kind = candidates[0], checkpoint_section(publication.folder)["type"]
    if measured[name] != kind:
        raise ConfigError(f"{place}: {name} is a drafter of type {measured[name]}; expected {kind}, as this one is")
    _require_these_weights(evaluation, name, publication.folder, str(place))
    return evaluation, name


def _require_these_weights(evaluation: dict[str, Any], name: str, folder: Path, place: str) -> None:
    """ConfigError where a head has been trained on since; of a draft model and of float16 the files do not tell."""
    then = evaluation["identity"].get("drafters", {}).get(name)
    if then is None or evaluation["settings"]["dtype"] == "float16" or not (folder / WEIGHTS).is_file():
        return
    if checkpoint_section(folder)["type"] != DraftModel.type and then != weights_fingerprint(
        load_file(folder / WEIGHTS)
    ):
        raise ConfigError(f"{place}: {name} had other weights than {folder} has; expected it measured again")


def _of_target(evaluation: dict[str, Any], section: dict[str, Any]) -> list[str]:
    """A note where a draft model was measured with another target than it was trained for."""
    then, trained = evaluation["identity"].get("target"), section["target"]["model_fingerprint"]
    if then is None or then == trained or evaluation["settings"]["dtype"] == "float16":
        return []
    return [
        f"Measured with the target {evaluation['settings']['target']}, whose weights ({then}) it was not trained for."
    ]
