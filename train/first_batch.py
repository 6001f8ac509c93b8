"""The start of a run's drafter: untrained weights are fitted to a first batch, and the sizes of its inputs measured."""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor

from draftsmith.distill.teacher import Batch
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.initial_weights import fit_start, frequencies, input_scales
from draftsmith.train.models import token_counts
from draftsmith.train.non_finite import finite_rows
from draftsmith.train.optimizers import Sizes
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Teacher, batch_indices
from draftsmith.train.training_data import TrainingData

TOKENS = 2048
"""Tokens of a batch, the least number that ends it."""
SERVED_TOKENS = 20_000
"""Most tokens of which a running engine computes the states for the start."""


@torch.no_grad()
def start_drafter(
    recipe: Recipe,
    drafter: TrainableDrafter,
    teacher: Teacher,
    data: TrainingData,
    batch: Callable[[list[int]], Batch],
) -> Sizes:
    """Fit the weights of an untrained drafter, see heads/initial_weights.py, and return the sizes of inputs by weight.

    Every process does the same with the same rows. A resumed run measures the sizes again and loads its weights.
    """
    if drafter.language_model is not None:  # starts as a model of its own
        return {}
    signals = _signals(recipe, teacher, data, batch)
    if signals is None:
        return {}
    drafter.eval()  # without noise
    torch.manual_seed(recipe.train.seed)  # block drafters draw the positions that they are trained at
    if not recipe.starts_trained:
        counts_V = token_counts(data.rows.select(range(data.trained)), teacher.lm_head.weight.shape[0])
        later = islice(_rows(recipe, data, set(recipe.data.exclude_rows)), 1, None)
        if recipe.teacher.kind == "server":
            later = _of_few_tokens(later, data)
        more = (teacher.signals(batch(rows)) for rows in later)
        fit_start(drafter, signals, frequencies(counts_V).to(signals.hidden_BTH.device), more)
    sizes = input_scales(drafter, signals)
    drafter.train()
    return sizes


@torch.no_grad()
def start_once(accelerator: Accelerator, drafter: TrainableDrafter, start: Callable[[], Sizes]) -> Sizes:
    """Return what `start` returns in the first process, and copy its drafter: an engine computes the states once."""
    if accelerator.num_processes == 1:
        return start()
    sizes = start() if accelerator.is_main_process else {}
    named = dict(drafter.named_parameters())
    names: dict[Tensor, str] = {weight: name for name, weight in named.items()}
    (by_name,) = broadcast_object_list([{names[weight]: scales for weight, scales in sizes.items()}])
    for tensor in drafter.state_dict().values():
        tensor.copy_(broadcast(tensor))
    return {named[name]: scales for name, scales in by_name.items()}


def _signals(
    recipe: Recipe, teacher: Teacher, data: TrainingData, batch: Callable[[list[int]], Batch]
) -> TeacherSignals | None:
    """Return the target's signals for the first rows of the first step; None where no row's are finite.

    Rows whose signals are not finite are replaced as if the recipe excluded them, which the first step's error advises.
    """
    excluded = set(recipe.data.exclude_rows)
    while not excluded.issuperset(range(data.trained)):
        indices = next(_rows(recipe, data, excluded))
        signals = teacher.signals(batch(indices))
        finite = finite_rows(teacher, signals, recipe.objective.chunk_tokens)
        if all(finite):
            return signals
        excluded.update(index for index, is_finite in zip(indices, finite, strict=True) if not is_finite)
    return None


def _of_few_tokens(batches: Iterator[list[int]], data: TrainingData) -> Iterator[list[int]]:
    """Yield batches of rows that have at most `SERVED_TOKENS` together."""
    left = SERVED_TOKENS
    for rows in batches:
        left -= sum(len(data.rows[row]["input_ids"]) for row in rows)
        if left < 0:
            return
        yield rows


def _rows(recipe: Recipe, data: TrainingData, excluded: set[int]) -> Iterator[list[int]]:
    """Yield the rows of the run's steps, at least one, until there are `TOKENS` tokens together or the step ends.

    Up to the last step of the run, or of the first epoch.
    """
    size = recipe.train.batch_size
    for step in range(max(1, min(recipe.train.steps, data.trained // size))):
        indices, tokens = [], 0
        for index in batch_indices(recipe.train.seed, step, size, data.trained, excluded):
            indices.append(index)
            tokens += len(data.rows[index]["input_ids"])
            if tokens >= TOKENS:
                yield indices
                indices, tokens = [], 0
        if indices:
            yield indices
