"""What a run trains on and is measured by: target samples, and prompts that are kept out of them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset

from draftsmith.decode.cache import context_limit
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.jsonl import conversation, prompt_ids, read_rows
from draftsmith.distill.samples import (
    ExampleSettings,
    SampleSettings,
    target_samples,
    text_samples,
    training_examples,
)
from draftsmith.distill.targets import EMBEDDED, LoadedTarget, check_target_name
from draftsmith.errors import ConfigError
from draftsmith.heads.vocabulary import most_frequent
from draftsmith.train.console import Console
from draftsmith.train.recipe import Recipe


@dataclass(frozen=True)
class TrainingData:
    """`rows`: `input_ids` and `prompt_length`; `heldout`: prompts for the periodic evaluation."""

    rows: Dataset
    heldout: list[list[int]]


def check_sources(recipe: Recipe) -> None:
    """ConfigError for a missing or malformed file, before a target is built or loaded for minutes."""
    check_target_name(recipe.target.model)
    for source in (recipe.data.prompts, recipe.evaluation.prompts):
        if source not in (None, EMBEDDED):
            path = Path(source)
            for number, row in read_rows(path):
                conversation(path, number, row)


def prepare_data(recipe: Recipe, target: LoadedTarget, console: Console) -> TrainingData:
    """Read the prompts and sample the target's responses, or take them from the cache or the file."""
    data, evaluation, seed = recipe.data, recipe.evaluation, recipe.train.seed
    answered = data.response == "text"
    wanted = ExampleSettings(data.prompts, data.count, data.prompt_tokens, data.response_tokens, answered, seed)
    examples = training_examples(target, wanted, console.say)
    if evaluation.prompts is None and data.prompts != EMBEDDED:
        if len(examples) <= evaluation.count:
            raise ConfigError(
                f"{data.prompts} holds {len(examples)} usable prompts; expected more than evaluation.count="
                f"{evaluation.count}, which are kept out of training (or name a file in evaluation.prompts)"
            )
        heldout = [example.prompt for example in examples[-evaluation.count :]]
        examples = examples[: -evaluation.count]
    else:
        heldout = _heldout(evaluation.prompts or EMBEDDED, target, recipe)
    if answered:
        return TrainingData(text_samples(examples), heldout)
    settings = SampleSettings(data.response_tokens, data.temperature, data.batch_size, seed)
    prompts = [example.prompt for example in examples]
    return TrainingData(target_samples(target, prompts, settings, progress=console.visible), heldout)


def frequent_tokens(rows: Dataset, size: int, target: LoadedTarget) -> list[int]:
    """The `size` tokens that responses hold most often, EOS among them."""
    vocab_size = target.model.get_output_embeddings().weight.shape[0]
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts_V += torch.bincount(torch.tensor(row["input_ids"][row["prompt_length"] :]), minlength=vocab_size)
    eos = target.tokenizer.eos_token_id
    return most_frequent(counts_V, size, always=() if eos is None else (eos,))


def _heldout(source: str, target: LoadedTarget, recipe: Recipe) -> list[list[int]]:
    settings = recipe.evaluation
    if source == EMBEDDED:
        rows = embedded_prompts(target.tokenizer, "heldout", settings.count, settings.prompt_tokens)
        return [row["input_ids"] for row in rows]
    path, limit = Path(source), context_limit(target.model)
    prompts = []
    for number, row in read_rows(path)[: settings.count]:
        ids = prompt_ids(target.tokenizer, conversation(path, number, row))
        if limit is not None and len(ids) + settings.max_new_tokens > limit:
            raise ConfigError(
                f"{path}:{number}: {len(ids)} tokens; expected at most {limit - settings.max_new_tokens}, so that "
                f"evaluation.max_new_tokens={settings.max_new_tokens} fit the target's context of {limit}"
            )
        prompts.append(ids)
    return prompts
