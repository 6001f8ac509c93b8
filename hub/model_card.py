"""The model card of a drafter checkpoint: its target, its measurements, its usage and its recipe.

The metadata follow the Hub's schema (huggingface/hub-docs, modelcard.md). `base_model_relation` is one of adapter,
finetune, merge and quantized; a head, which only works with the target's states, is closest to an adapter, and a draft
model to a finetune. A `model-index` has a task, a data set and metrics for each result.

Local paths are cut to their last part, and addresses are those of an `ENGINE`.
"""

import math
import re
from importlib.resources import files
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from draftsmith.distill.data_section import ENGINE
from draftsmith.errors import ConfigError
from draftsmith.heads.configs import DRAFTERS
from draftsmith.heads.formats.common import (
    RARE_IN_SGLANG,
    SGLANG,
    VLLM,
    sglang_command,
    vllm_command,
    vllm_type,
)
from draftsmith.heads.formats.transformers import CODE
from draftsmith.heads.untrusted import read_config, shapes_in
from draftsmith.reading import dump_yaml
from draftsmith.storage import write_json, write_text
from draftsmith.terminal import interval, markdown_environment

if TYPE_CHECKING:
    from draftsmith.eval.results import ResultRow, ServerRow, StoredEvaluation

TASK = "text-generation"


def _card_data(
    section: dict[str, Any],
    *,
    name: str,
    licence: str | None,
    base_model: str | None,
    datasets: list[str],
    rows: "list[ResultRow | ServerRow]",
    prompts: str,
) -> ModelCardData:
    """Return the metadata of a card: `rows` are those over all prompts, whose name is `prompts`."""
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


def _results(row: "ResultRow | ServerRow", prompts: str) -> list[EvalResult]:
    served = "concurrency" in row
    how = f"{row['concurrency']} requests" if served else f"{row['policy']}, batch {row['batch_size']}"
    named = (("speedup", "speedup", 3), ("tau", "acceptance length tau", 3), ("alpha", "acceptance rate alpha", 4))
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=re.sub(r"[^\w./-]+", "-", prompts),
            dataset_name=prompts,
            metric_type=key,
            metric_value=round(value, digits),
            metric_name=f"{words} (T={row['temperature']:g}, {how})",
        )
        for key, words, digits in named
        if (value := row[key]) is not None  # an engine may not count it
    ]


START = r"""(?<![^\s='"(,])(?:~|[A-Za-z]:)?[/\\]+[\w.~-]"""
"""The start of an absolute path, but not after a word or a colon, as in `tokens/s` and `https://…`."""
PATH = re.compile(START + r"""[^\s'",;)]*""")
QUOTED = re.compile(r"""(?<![^\s=(,:[{])(?:'(?:[^']|'"'"')*'|"[^"]*")""")
"""A word in quotes as a shell or Python writes it; not after a letter, where an apostrophe stands."""
QUOTED_PATH = re.compile(START + r".*(?=.$)", re.DOTALL)
"""A path in quotes, which may have spaces, up to the closing quote."""
FILES = (".json", ".jsonl", ".ndjson", ".gz", ".txt", ".parquet", ".arrow", ".csv")


ON_HUB = r"(?:[\w-]+\.)*(?:huggingface|hf)\.co(?![\w@:-]|\.\w)"
ADDRESS = re.compile(rf"""https?://(?!{ON_HUB})(?:\[[\w:.]*\]|[^\s/'"?,;()\[\]])+""", re.IGNORECASE)
"""Scheme, host and port of an address that is not the Hub's."""


def is_local(name: str) -> bool:
    """Return whether a target or a prompt file is named by a local path, not by a Hub id `user/name`."""
    anywhere = name.startswith((".", "/", "~", "\\")) or bool(PureWindowsPath(name).drive)
    return anywhere or name.count("/") != 1 or name.endswith(FILES) or Path(name).exists()


def last_part(path: str) -> str:
    """Return the last part of a path: `prompts.jsonl` of `/home/someone/data/prompts.jsonl`."""
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name or path


def without_local_names(value: Any) -> Any:
    """Return plain values in which absolute paths in texts are cut to their last part, and addresses are `ENGINE`.

    A path may have spaces if it is the whole text, or in quotes.
    """
    if isinstance(value, dict):
        return {without_local_names(key): without_local_names(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_names(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~/", "\\\\")) or PureWindowsPath(value).is_absolute():
        return last_part(value)
    value = QUOTED.sub(lambda word: QUOTED_PATH.sub(_last_part, word[0]), value)
    return ADDRESS.sub(ENGINE, PATH.sub(_last_part, value))


def _last_part(path: re.Match[str]) -> str:
    return last_part(path[0])


PLOTS, EVALUATION = "plots", "eval.json"
EXPORTED, MERGED, ADAPTER, SERVED = "exported", "MERGED", "ADAPTER", "TARGET"
"""Folder names on the card; the last one is for a target that is not on the Hub."""


def write_card(
    folder: Path,
    evaluation: "StoredEvaluation | None",
    drafter: str | None,
    *,
    repo: str | None = None,
    licence: str | None = None,
    base_model: str | None = None,
    metrics: list[dict[str, Any]] | None = None,
) -> None:
    """Write `README.md`, its plots and, of a measurement, `eval.json` into a checkpoint.

    Args:
        folder: a draftsmith checkpoint.
        evaluation: the content of an `eval.json`, of which the rows of `drafter` are kept; None if nothing was
            measured.
        repo: repository that the drafter will be loaded from; None for the folder itself.
        base_model: the target on the Hub, if the checkpoint has another name for it.
        metrics: rows of the training run's `metrics.jsonl`, for its curves.

    Raises:
        ConfigError: for a folder that is not a checkpoint, and a drafter without rows.
    """
    from draftsmith.eval.plots import evaluation_plots, training_plots  # matplotlib: only where a card is written
    from draftsmith.eval.prompts import OVERALL

    section = checkpoint_section(folder)
    evaluation = evaluation and _about(drafter, evaluation)
    rows, served = ([], []) if evaluation is None else (evaluation["rows"], evaluation.get("server", []))
    overall, metrics = [row for row in rows if row["category"] == OVERALL], metrics or []
    target, base_model = base_model or _target_name(section), base_model or hub_target(section)
    name = repo or str(folder)
    recipe = section["recipe"] or {}
    data = _card_data(
        section,
        name=name,
        licence=licence,
        base_model=base_model,
        datasets=_hub_datasets(recipe),
        rows=[*overall, *served],
        prompts="" if evaluation is None else last_part(evaluation["settings"]["prompts"]),
    )
    plots = evaluation_plots(rows) if rows else []
    plots += training_plots({drafter or last_part(name): metrics})
    card = _render(
        metadata=Markup(data.to_yaml()),
        name=name,
        title=last_part(repo) if repo else drafter or folder.name,
        kind=DRAFTERS[section["type"]].card_name,
        section=section,
        target=target,
        base_model=base_model,
        on_hub=hub_target(section) is not None,
        chats=(folder / "chat_template.jinja").is_file(),  # saved with the target's tokenizer
        numbers=sum(math.prod(shape) for shape in shapes_in(folder).values()),
        rows=overall,
        served=served,
        estimate=_estimate(metrics),
        temperature=(recipe.get("evaluation") or {}).get("temperature", 0),
        teacher=teacher_of(section),
        evaluation=evaluation,
        plots=plots,
        recipe=recipe if {"data", "objective", "teacher", "train"} <= recipe.keys() else None,
        recipe_text=dump_yaml(recipe),
        sources=_sources(recipe.get("data") or {}),
        steps=max((row["step"] for row in metrics if "loss" in row), default=(recipe.get("train") or {}).get("steps")),
        generates=(folder / CODE / "generate.py").is_file(),
        engines=_engines(section, base_model),
    )
    for plot in plots:
        (folder / PLOTS).mkdir(exist_ok=True)
        (folder / PLOTS / plot.file).write_bytes(plot.png)
    write_text(folder / "README.md", card)
    if evaluation is not None:
        # Measurements of single prompts and sampled texts stay in the report.
        write_json(folder / EVALUATION, {**evaluation, "measurements": [], "samples": []})


def _render(**values: Any) -> str:
    environment = markdown_environment(interval=interval, number=_number)
    environment.trim_blocks = True
    environment.filters["last_part"] = last_part
    text = files("draftsmith.hub").joinpath("card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(text).render(plots_folder=PLOTS, **values)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _estimate(metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the evaluation of the saved drafter, the last one with the highest tau; None where tau was measured."""
    rows = [{"step": row["step"], **row["evaluation"]} for row in metrics if "evaluation" in row]
    return max((row for row in reversed(rows) if row.get("estimated")), key=lambda row: row["tau"], default=None)


def _about(drafter: str | None, evaluation: "StoredEvaluation") -> "StoredEvaluation":
    """Return the rows of the drafter, without notes and guards that begin with the name of another one."""
    rows = [row for row in evaluation["rows"] if row["drafter"] == drafter]
    if not rows and not evaluation.get("server"):
        raise ConfigError(f"drafter={drafter} has no rows in this evaluation; expected one that was measured")
    others = {row["drafter"] for row in evaluation["rows"]} - {drafter}
    starts = tuple(f"{other}{suffix}" for other in others for suffix in (" (", ": ", " is in "))
    notes = [note for note in evaluation["notes"] if not note.startswith(starts)]
    guards = [guard for guard in evaluation["guards"] if not guard["message"].startswith(starts)]
    return {**evaluation, "rows": rows, "notes": notes, "guards": guards}


def _engines(section: dict[str, Any], base_model: str | None) -> dict[str, str | None]:
    """Return the commands of vLLM and SGLang, None where one does not serve the type, and the target in `export`."""
    kind, length = vllm_type(section["type"], section["drafter"]), section["draft_length"]
    served = MERGED if section["target"].get("quality") else base_model or SERVED
    vllm = vllm_command(served, VLLM[kind], EXPORTED, length) if kind in VLLM else None
    algorithm = None if section["type"] in RARE_IN_SGLANG else SGLANG.get(section["type"])
    sglang = None if algorithm is None else sglang_command(served, algorithm, EXPORTED, length)
    own = base_model or last_part(_target_name(section))
    return {"vllm": vllm, "sglang": sglang, "known": ADAPTER if section["target"].get("quality") else own}


def checkpoint_section(folder: Path) -> dict[str, Any]:
    """Return the `draftsmith` section of a checkpoint's config.json; ConfigError for another folder."""
    try:
        config, stored = read_config(folder, folder)
    except ConfigError as error:
        raise ConfigError(f"{folder} was not trained by draftsmith ({error})") from error
    if stored is None:
        raise ConfigError(f"{folder} was not trained by draftsmith; expected a drafter checkpoint")
    if stored.type not in DRAFTERS:
        raise ConfigError(f"{folder} is of type {stored.type!r}; expected one of {', '.join(DRAFTERS)}")
    section = {"recipe": None, **config["draftsmith"]}
    section["target"] = {"quality": None, "revision": None, "engine": None, **section["target"]}
    return section


def teacher_of(section: dict[str, Any]) -> str | None:
    """Return `teacher.kind` of the stored recipe; None without one."""
    return ((section["recipe"] or {}).get("teacher") or {}).get("kind")


def hub_target(section: dict[str, Any]) -> str | None:
    """Return the repository of the target that a drafter was trained for; None for a local target."""
    name = _target_name(section)
    return None if is_local(name) else name


def _target_name(section: dict[str, Any]) -> str:
    """Return the target's name in the recipe, which is that of the original if the target was trained jointly."""
    return ((section["recipe"] or {}).get("target") or {}).get("model") or section["target"]["name"]


def _hub_datasets(recipe: dict[str, Any]) -> list[str]:
    """Return the data sets of the Hub that a recipe trains on."""
    names = [source["prompts"] for source in _sources(recipe.get("data") or {})]
    return [name for name in dict.fromkeys(names) if not is_local(name)]


def _sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sources of a recipe's section `data`, each with `prompts`, `response` and `share` of all samples."""
    prompts, response = data.get("prompts"), data.get("response")
    given = prompts if isinstance(prompts, list) else [] if prompts is None else [data]
    total = sum(source.get("share", 1) for source in given)
    return [{**one, "response": one.get("response") or response, "share": one.get("share", 1) / total} for one in given]
