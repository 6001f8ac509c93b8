"""The metadata of a model card, as the Hub's schema has it.

Keys and values: huggingface/hub-docs, modelcard.md. `base_model_relation` is one of adapter, finetune, merge and
quantized; of these a head, which works on the target's states alone, is nearest to an adapter, and a draft model to a
finetune. A `model-index` names for each result a task, a data set and metrics.
"""

import re
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftsmith.errors import ConfigError, reason_of

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
    where = {"task_type": TASK, "dataset_type": re.sub(r"[^\w./-]+", "-", prompts), "dataset_name": prompts}
    named = (("speedup", "speedup", 3), ("tau", "acceptance length tau", 3), ("alpha", "acceptance rate alpha", 4))
    return [
        EvalResult(
            **where, metric_type=key, metric_value=round(row[key], digits), metric_name=f"{words} ({conditions})"
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
