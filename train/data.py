"""What a run trains on and is measured by: target samples, and prompts that are kept out of them."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.jsonl import conversation, prompt_ids, read_rows
from draftsmith.distill.samples import SampleSettings, target_samples, training_prompts
from draftsmith.distill.targets import EMBEDDED, LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.train.console import Console
from draftsmith.train.recipe import Recipe


@dataclass(frozen=True)
class TrainingData:
    """`rows`: `input_ids` and `prompt_length`; `heldout`: prompts for the periodic evaluation."""

    rows: Dataset
    heldout: list[list[int]]


def prepare_data(recipe: Recipe, target: LoadedTarget, console: Console) -> TrainingData:
    """Read the prompts and sample the target's responses, or take them from the cache."""
    data, evaluation = recipe.data, recipe.evaluation
    prompts = training_prompts(data.prompts, target, data.count, data.prompt_tokens, recipe.train.seed, console.say)
    if evaluation.prompts is None and data.prompts != EMBEDDED:
        if len(prompts) <= evaluation.count:
            raise ConfigError(
                f"{data.prompts} holds {len(prompts)} usable prompts; expected more than evaluation.count="
                f"{evaluation.count}, which are kept out of training (or name a file in evaluation.prompts)"
            )
        prompts, heldout = prompts[: -evaluation.count], prompts[-evaluation.count :]
    else:
        heldout = _heldout(evaluation.prompts or EMBEDDED, target, recipe)
    settings = SampleSettings(data.response_tokens, data.temperature, data.batch_size, recipe.train.seed)
    rows = target_samples(target, prompts, settings, progress=console.visible)
    return TrainingData(rows, heldout)


def _heldout(source: str, target: LoadedTarget, recipe: Recipe) -> list[list[int]]:
    settings = recipe.evaluation
    if source == EMBEDDED:
        rows = embedded_prompts(target.tokenizer, "heldout", settings.count, settings.prompt_tokens)
        return [row["input_ids"] for row in rows]
    path = Path(source)
    rows = read_rows(path)[: settings.count]
    return [prompt_ids(target.tokenizer, conversation(path, number, row)) for number, row in rows]
