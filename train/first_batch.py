"""The start of a run's drafter: untrained weights are fitted to a first batch, and the sizes of its inputs measured."""

from collections.abc import Callable, Iterator

import torch

from draftsmith.distill.teacher import Batch
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.initial_weights import fit_start, frequencies, input_sizes
from draftsmith.train.learning_rates import starts_trained
from draftsmith.train.non_finite import finite_rows
from draftsmith.train.optimizers import Sizes
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Teacher, batch_indices
from draftsmith.train.training_data import TrainingData, token_counts

TOKENS = 2048
"""Tokens of the first batch: rows of the run's first step, at least one, until there are so many."""


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
    if not starts_trained(recipe):
        counts_V = token_counts(data.rows.select(range(data.trained)), teacher.lm_head.weight.shape[0])
        more = (teacher.signals(batch(rows)) for rows in _later_rows(recipe, data))
        fit_start(drafter, signals, frequencies(counts_V).to(signals.hidden_BTH.device), more)
    sizes = input_sizes(drafter, signals)
    drafter.train()
    return sizes


def _signals(
    recipe: Recipe, teacher: Teacher, data: TrainingData, batch: Callable[[list[int]], Batch]
) -> TeacherSignals | None:
    """Return the target's signals for the first rows of the first step; None where no row's are finite.

    Rows whose signals are not finite are replaced as if the recipe excluded them, which the first step's error advises.
    """
    excluded = set(recipe.data.exclude_rows)
    while not excluded.issuperset(range(data.trained)):
        indices = _first_rows(recipe, data, excluded)
        signals = teacher.signals(batch(indices))
        finite = finite_rows(teacher, signals, recipe.objective.chunk_tokens)
        if all(finite):
            return signals
        excluded.update(index for index, is_finite in zip(indices, finite, strict=True) if not is_finite)
    return None


def _later_rows(recipe: Recipe, data: TrainingData) -> Iterator[list[int]]:
    """Yield the rows of the second step and of those after it, up to the run's or the first epoch's last one."""
    size, excluded = recipe.train.batch_size, set(recipe.data.exclude_rows)
    for step in range(1, min(recipe.train.steps, data.trained // size)):
        yield batch_indices(recipe.train.seed, step, size, data.trained, excluded)


def _first_rows(recipe: Recipe, data: TrainingData, excluded: set[int]) -> list[int]:
    """Return the first rows of the first step that have `TOKENS` tokens together, or all its rows."""
    indices, tokens = [], 0
    for index in batch_indices(recipe.train.seed, 0, recipe.train.batch_size, data.trained, excluded):
        indices.append(index)
        tokens += len(data.rows[index]["input_ids"])
        if tokens >= TOKENS:
            break
    return indices
