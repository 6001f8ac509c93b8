"""The model card of a drafter checkpoint: what it drafts for, what it was measured to be worth, how it was made.

The metadata of a model card, as the Hub's schema has it.

Keys and values: huggingface/hub-docs, modelcard.md. `base_model_relation` is one of adapter, finetune, merge and
quantized; of these a head, which works on the target's states alone, is nearest to an adapter, and a draft model to a
finetune. A `model-index` names for each result a task, a data set and metrics.

What a run knows of its machine and nobody else need: local paths are cut to their last part, secrets refused.
"""

import math
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from markupsafe import Markup

from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.plots import Plot, evaluation_plots, plot_training
from draftsmith.eval.prompts import OVERALL
from draftsmith.eval.report import interval
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.formats.common import SGLANG, UNSERVED, VLLM, sglang_command, vllm_command, vllm_type
from draftsmith.heads.formats.transformers import CODE
from draftsmith.heads.validation import read_config, shapes_in
from draftsmith.safe_text import SECRET, markdown_environment
from draftsmith.storage import write_json, write_text

TASK = "text-generation"
LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]*")


def check_repo(key: str, name: str) -> None:
    """ConfigError unless `name` is a repository's: `user/name`."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{key}={name!r}; expected user/name ({reason_of(error)})") from error
    if "/" not in name:
        raise ConfigError(f"{key}={name!r}; expected user/name")


def check_licence(licence: str | None) -> None:
    """ConfigError for what is no identifier of a licence; whether it is a known one, the Hub says."""
    if licence is not None and not LICENCE.fullmatch(licence):
        raise ConfigError(f"licence={licence!r}; expected the Hub's identifier of one, such as apache-2.0 or mit")


def card_data(
    section: dict[str, Any],
    *,
    name: str,
    licence: str | None,
    base_model: str | None,
    datasets: list[str],
    rows: list[dict[str, Any]],
    prompts: str,
) -> ModelCardData:
    """The metadata of a drafter's card.

    Args:
        section: `draftsmith` in the checkpoint's config.json.
        licence: the Hub's identifier of one, such as apache-2.0.
        base_model: the target on the Hub.
        datasets: data sets of the Hub that it was trained on.
        rows: of its evaluation, over all prompts; `prompts` says which.

    Raises:
        ConfigError: for a licence or a base model that the Hub would not take.
    """
    check_licence(licence)
    if base_model is not None:
        check_repo("base_model", base_model)
    kind = section["type"]
    results = [result for row in rows for result in _results(row, prompts)]
    relation = "finetune" if kind == "draft_model" else "adapter"
    return ModelCardData(
        license=licence,
        library_name="transformers" if kind == "draft_model" else "draftsmith",
        pipeline_tag=TASK,
        base_model=base_model,
        base_model_relation=relation if base_model is not None else None,
        tags=["speculative-decoding", "draftsmith", kind],
        datasets=datasets or None,
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _results(row: dict[str, Any], prompts: str) -> list[EvalResult]:
    conditions = f"T={row['temperature']:g}, {row['policy']}, batch {row['batch_size']}"
    named = (("speedup", "speedup", 3), ("tau", "acceptance length tau", 3), ("alpha", "acceptance rate alpha", 4))
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=re.sub(r"[^\w./-]+", "-", prompts),
            dataset_name=prompts,
            metric_type=key,
            metric_value=round(row[key], digits),
            metric_name=f"{words} ({conditions})",
        )
        for key, words, digits in named
    ]


def require_readable(card: str, data: ModelCardData) -> None:
    """ConfigError unless the card's metadata reads back as what it was written from, as plain values."""
    try:
        found = ModelCard(card).data.to_dict()
    except ValueError as error:
        raise ConfigError(f"README.md: {' '.join(str(error).split())}; expected valid metadata") from error
    if found != data.to_dict():
        raise ConfigError(f"README.md: its metadata reads back as {found}; expected {data.to_dict()}")


PATH = re.compile(r"""(?<![^\s='"(,])(?:~|[A-Za-z]:)?[/\\]+[\w.~-][^\s'",;)]*""")
"""An absolute path inside a text: not what stands behind a word or a colon, as in `tokens/s` and `https://…`."""
FILES = (".json", ".jsonl", ".ndjson", ".gz", ".txt", ".parquet", ".arrow", ".csv")


def is_local(name: str) -> bool:
    """Whether a target or a file of prompts has its name from this machine, rather than from the Hub: `user/name`."""
    anywhere = name.startswith((".", "/", "~", "\\")) or bool(PureWindowsPath(name).drive)
    return anywhere or name.count("/") != 1 or name.endswith(FILES) or Path(name).exists()


def last_part(path: str) -> str:
    """`/home/someone/data/prompts.jsonl` as `prompts.jsonl`."""
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name or path


def without_local_paths(value: Any) -> Any:
    """Plain values with every absolute path, inside any text, cut to its last part. Keys stay."""
    if isinstance(value, dict):
        return {key: without_local_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~/", "\\\\")) or PureWindowsPath(value).is_absolute():
        return last_part(value)
    return PATH.sub(lambda found: last_part(found.group()), value)


def require_no_secret(name: str, text: str) -> None:
    """ConfigError where a text that is to be published holds a token or a password; it is not repeated."""
    token = get_token()
    if SECRET.search(text) or (token and token in text):
        raise ConfigError(f"{name} holds what looks like a token or a password; expected none: nothing was published")


PLOTS = "plots"
EXPORTED, MERGED, ADAPTER, SERVED = "exported", "MERGED", "ADAPTER", "TARGET"
"""Folders, as the card calls them; the last is a target that is not on the Hub by its name."""


@dataclass(frozen=True)
class CardRequest:
    """What a card says beside what the checkpoint and its measurement know."""

    repo: str | None = None
    """Where it will be loaded from; None for the folder itself."""
    licence: str | None = None
    base_model: str | None = None
    """The target on the Hub, where the checkpoint names it otherwise."""


def write_card(
    folder: Path,
    evaluation: dict[str, Any] | None,
    drafter: str | None,
    request: CardRequest = CardRequest(),
    metrics: list[dict[str, Any]] | None = None,
) -> None:
    """Write `README.md`, its plots and, of a measurement, `eval.json` into a checkpoint.

    Args:
        folder: a draftsmith checkpoint.
        evaluation: the content of an `eval.json`, of which the rows of `drafter` are kept; None where nothing was
            measured yet.
        metrics: of the training run, for its curves.

    Raises:
        ConfigError: for a folder that is not a checkpoint, a drafter without rows, or metadata that the Hub refuses.
    """
    section = checkpoint_section(folder)
    rows = [] if evaluation is None else [row for row in evaluation["rows"] if row["drafter"] == drafter]
    if evaluation is not None:
        if drafter is None or not rows:
            raise ConfigError(f"drafter={drafter} has no rows in this evaluation; expected one that was measured")
        evaluation = _about(drafter, evaluation)
    overall = [row for row in rows if row["category"] == OVERALL]
    name, base_model = request.repo or str(folder), request.base_model or hub_target(section)
    recipe = section["recipe"] or {}
    data = card_data(
        section,
        name=name,
        licence=request.licence,
        base_model=base_model,
        datasets=_hub_datasets(recipe),
        rows=overall,
        prompts="" if evaluation is None else last_part(evaluation["settings"]["prompts"]),
    )
    plots = _plots(rows, drafter or last_part(name), metrics or [])
    card = _render(
        metadata=Markup(data.to_yaml()),
        name=name,
        title=last_part(request.repo) if request.repo else drafter or folder.name,
        kind=DRAFTERS[section["type"]].card_name,
        section=section,
        target=request.base_model or _target_name(section),
        base_model=base_model,
        numbers=sum(math.prod(shape) for shape in shapes_in(folder).values()),
        rows=overall,
        evaluation=evaluation,
        plots=plots,
        recipe=recipe if {"data", "objective", "teacher", "train"} <= recipe.keys() else None,
        recipe_text=yaml.safe_dump(recipe, sort_keys=False),
        generates=(folder / CODE / "generate.py").is_file(),
        engines=_engines(section, base_model),
    )
    require_readable(card, data)
    _write_plots(folder / PLOTS, plots)
    write_text(folder / "README.md", card)
    if evaluation is not None:
        # What single prompts and samples gave stays in the report: a card is read, not compared.
        write_json(folder / "eval.json", {**evaluation, "rows": rows, "measurements": [], "samples": []})


def _about(drafter: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Without the notes and guards that begin with the name of another drafter that was measured beside it."""
    others = {row["drafter"] for row in evaluation["rows"]} - {drafter}
    starts = tuple(f"{other}{behind}" for other in others for behind in (" (", ": ", " is in "))
    notes = [note for note in evaluation["notes"] if not note.startswith(starts)]
    guards = [guard for guard in evaluation["guards"] if not guard["message"].startswith(starts)]
    return {**evaluation, "notes": notes, "guards": guards}


class _Engines(NamedTuple):
    """Commands that serve an export in the folder `exported`; None for an engine that cannot serve it."""

    vllm: str | None
    sglang: str | None
    known: str
    """The target that is exported for, as the card names it."""


def _engines(section: dict[str, Any], base_model: str | None) -> _Engines:
    """Return the commands for vLLM and SGLang; `base_model` is the target on the Hub."""
    kind, length = vllm_type(section["type"], section["drafter"]), section["draft_length"]
    served = MERGED if section["target"].get("quality") else base_model or SERVED
    vllm = vllm_command(served, VLLM[kind], EXPORTED, length) if kind in VLLM and kind not in UNSERVED else None
    algorithm = SGLANG.get(section["type"])
    sglang = None if algorithm is None else sglang_command(served, algorithm, EXPORTED, length)
    own = base_model or last_part(_target_name(section))
    return _Engines(vllm, sglang, ADAPTER if section["target"].get("quality") else own)


def checkpoint_section(folder: Path) -> dict[str, Any]:
    """What `draftsmith train` wrote into a checkpoint's config.json; ConfigError for another folder."""
    try:
        config, stored = read_config(folder, folder)
    except ConfigError as error:
        raise ConfigError(f"{folder} was not trained by draftsmith ({error})") from error
    if stored is None:
        raise ConfigError(f"{folder} was not trained by draftsmith; expected a drafter checkpoint")
    if stored.type not in DRAFTERS:
        raise ConfigError(f"{folder} is of type {stored.type!r}; expected one of {', '.join(DRAFTERS)}")
    section = {"recipe": None, **config["draftsmith"]}
    section["target"] = {"quality": None, "revision": None, **section["target"]}
    return section


def hub_target(section: dict[str, Any]) -> str | None:
    """The repository of the target that a drafter was trained for; None where that was no repository."""
    name = _target_name(section)
    return None if is_local(name) else name


def _target_name(section: dict[str, Any]) -> str:
    """As the recipe names it: of a target that was trained too, the original."""
    return ((section["recipe"] or {}).get("target") or {}).get("model") or section["target"]["name"]


def _hub_datasets(recipe: dict[str, Any]) -> list[str]:
    """The data set of the Hub that a recipe trains on, if it is one."""
    source = (recipe.get("teacher") or {}).get("file") or (recipe.get("data") or {}).get("prompts")
    return [source] if source is not None and not is_local(source) else []


def _write_plots(folder: Path, plots: list[Plot]) -> None:
    for plot in plots:
        folder.mkdir(exist_ok=True)
        (folder / plot.file).write_bytes(plot.png)


def _plots(rows: list[dict[str, Any]], drafter: str, metrics: list[dict[str, Any]]) -> list[Plot]:
    plots = evaluation_plots(rows) if rows else []
    return [*plots, plot_training({drafter: metrics})] if any("loss" in row for row in metrics) else plots


def _render(**values: Any) -> str:
    environment = markdown_environment(interval=interval)
    environment.trim_blocks = True
    environment.filters["last_part"] = last_part
    text = files("draftsmith.hub").joinpath("card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(text).render(plots_folder=PLOTS, **values)
