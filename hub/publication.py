"""Assemble the folder that is published: files of the drafter from an allow-list, its card, plots and measurement."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import load_file

from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import WEIGHTS
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.transformers import CODE, write_generate
from draftsmith.hub.model_card import (
    EVALUATION,
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

if TYPE_CHECKING:
    from draftsmith.eval.results import StoredEvaluation

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER += ("chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
PUBLISHED = ("config.json", "generation_config.json", "model.safetensors.index.json", "*.safetensors", *TOKENIZER)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "quality.json", *TOKENIZER)
TARGET = "target"
"""Folder of the adapter of a jointly trained target: next to the drafter in a run, inside it in a publication."""
WRITTEN = ("config.json", "README.md", EVALUATION, f"{TARGET}/adapter_config.json", f"{TARGET}/quality.json")
"""Files with generated text, which are checked for secrets."""
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
        notes.append("not measured: the card has no alpha, tau and speedup; give --eval (see `draftsmith eval`)")
    return notes


def assemble(publication: Publication, out: Path) -> list[Path]:
    """Write the publication to `out`, which is new, empty or an earlier publication; return its files, relative to it.

    Raises:
        ConfigError: if `out` holds other files, or a text holds what looks like a token.
    """
    check_out(out, publication.folder)
    source, section = publication.folder, checkpoint_section(publication.folder)
    measured = _measured(publication)
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
        request = CardRequest(publication.repo, publication.licence, publication.base_model)
        if measured is None:
            write_card(temporary, None, None, request, publication.metrics)
        else:
            evaluation = _public_evaluation(measured, section, publication.repo)
            write_card(temporary, evaluation, measured.drafter, request, publication.metrics)
        for name in WRITTEN:
            if (temporary / name).is_file():
                require_no_secret(name, (temporary / name).read_text(encoding="utf-8"))
    return sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())


def check_out(out: Path, source: Path) -> None:
    """Check that `out` may be replaced: it is new, empty or an earlier publication, and not in or around `source`."""
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
    """Return config.json without local paths, with the target's name on the Hub if it is given."""
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
    """Return the folder of the run that a drafter's folder is in, also if `folder` is `.`."""
    return Path(os.path.abspath(folder)).parent


def _adapter(folder: Path, section: dict[str, Any]) -> Path | None:
    """Return the adapter of a target that was trained jointly with the drafter; ConfigError if it is missing."""
    if not section["target"].get("quality"):
        return None
    for place in (folder / TARGET, run_of(folder) / TARGET):
        if (place / "adapter_config.json").is_file():
            return place
    raise ConfigError(
        f"{folder} was trained together with its target, and the adapter is missing; expected the folder "
        f"{run_of(folder) / TARGET}"
    )


class _Measured(NamedTuple):
    evaluation: "StoredEvaluation"
    drafter: str
    """Its name in the evaluation."""


def _public_evaluation(measured: _Measured, section: dict[str, Any], repo: str) -> "StoredEvaluation":
    """Return the measurement without local paths, and with the repository in place of the drafter's folder."""
    evaluation = measured.evaluation
    notes = [*evaluation["notes"], *_of_target(evaluation, section)]
    public = without_local_paths({**evaluation, "notes": notes})
    public["settings"]["drafters"][measured.drafter] = repo
    return public


def _measured(publication: Publication) -> _Measured | None:
    """Return the measurement and the drafter's name in it: the given one, the one with this folder, or the only one."""
    place = publication.evaluation
    if place is None and (publication.folder / EVALUATION).is_file():
        place = publication.folder / EVALUATION
    if place is None:
        return None
    from draftsmith.eval.results import frozen_rows, read_evaluation  # loads the decoder: only where there is one

    evaluation = read_evaluation(place)
    if evaluation.get("server"):  # its rows name no type and no weights
        raise ConfigError(
            f"{place} was measured on a server, which does not tell which drafter it has; expected the eval.json of "
            "draftsmith eval"
        )
    named = evaluation["settings"]["drafters"]
    measured = {row["drafter"]: row["drafter_type"] for row in frozen_rows(evaluation)}
    own = [name for name, folder in named.items() if Path(folder).resolve() == publication.folder.resolve()]
    own = [name for name in own if name in measured]
    # A drafter whose folder exists is another one; if its folder is missing, it may be this one, moved.
    only = [name for name in measured if len(measured) == 1 and not Path(named[name]).is_dir()]
    candidates = [publication.measured_as] if publication.measured_as else own or only
    if len(candidates) != 1 or candidates[0] not in measured:
        given = f"measured_as={publication.measured_as!r}" if publication.measured_as else str(place)
        raise ConfigError(
            f"{given}; expected --as with one of the drafters measured there: {', '.join(sorted(measured))}"
        )
    name, kind = candidates[0], checkpoint_section(publication.folder)["type"]
    if measured[name] != kind:
        raise ConfigError(f"{place}: {name} is a drafter of type {measured[name]}; expected {kind}, as this one is")
    _require_these_weights(evaluation, name, publication.folder, str(place))
    return _Measured(evaluation, name)


def _require_these_weights(evaluation: "StoredEvaluation", name: str, folder: Path, place: str) -> None:
    """Raise ConfigError if a head was measured with other weights; unknown for draft models and float16."""
    then = evaluation["identity"].get("drafters", {}).get(name)
    if then is None or evaluation["settings"]["dtype"] == "float16" or not (folder / WEIGHTS).is_file():
        return
    if checkpoint_section(folder)["type"] != DraftModel.type and then != weights_fingerprint(
        load_file(folder / WEIGHTS)
    ):
        raise ConfigError(f"{place}: {name} had other weights than {folder} has; expected it measured again")


def _of_target(evaluation: "StoredEvaluation", section: dict[str, Any]) -> list[str]:
    """Return a note if the drafter was measured with another target than the one that it was trained for."""
    then, trained = evaluation["identity"].get("target"), section["target"]["model_fingerprint"]
    if then is None or then == trained or evaluation["settings"]["dtype"] == "float16":
        return []
    return [
        f"Measured with the target {evaluation['settings']['target']}, whose weights ({then}) it was not trained for."
    ]
