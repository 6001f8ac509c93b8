"""The start of a run's drafter: the loss of the first step, exact resumption, and no change of trained weights."""

import math
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from run_results import as_if_killed, losses_of
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.heads.initial_weights import InputScales
from draftsmith.heads.medusa import Medusa
from draftsmith.train.first_batch import start_drafter
from draftsmith.train.launch import RunContext, make_accelerator
from draftsmith.train.models import load_parts
from draftsmith.train.optimizers import MEASURED_TOTAL, OPTIMIZERS, Trained
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.step import collate
from draftsmith.train.trainer import train

UNIFORM = math.log(64)


def recipe_of(recipe_file: Path, kind: str, output: Path, *more: str) -> Recipe:
    overrides = [f"drafter.type={kind}", f"output={output}", "objective.position_decay=1", *more]
    return load_recipe(str(recipe_file), overrides)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("medusa", ["drafter.num_heads=3"]),
        pytest.param("eagle3", ["drafter.layers=[1,2]", "drafter.train_steps=3"], marks=pytest.mark.slow),
    ],
)
def test_a_run_starts_below_equal_probabilities(
    kind: str, options: list[str], recipe_file: Path, tmp_path: Path, tiny_target_folder: Path
) -> None:
    """On a target with large states, whose copied lm_head alone would give a loss of tens of nats; and it resumes."""
    target = make_llama()
    with torch.no_grad():
        target.model.norm.weight.fill_(20)
        target.lm_head.weight.mul_(0.3)
    target.save_pretrained(tiny_target_folder)
    recipe, run = recipe_of(recipe_file, kind, tmp_path / "run", *options), tmp_path / "run"
    train(recipe)
    losses = losses_of(run)
    assert losses[0] / 3 < UNIFORM, "per draft position; KL is at most the uniform distribution's cross-entropy"
    if kind == "medusa":
        as_if_killed(run, 8)
        train(recipe)
        assert losses_of(run) == losses


def test_trained_weights_are_left_as_they_are(recipe_file: Path, tmp_path: Path) -> None:
    steps = ["train.steps=1", "train.evaluate_every=1", "drafter.draft_vocab_size=20"]
    train(recipe_of(recipe_file, "medusa", tmp_path / "first", *steps))
    more = [f"start_from={tmp_path / 'first' / 'drafter'}", "train.learning_rate=1e-12"]
    train(recipe_of(recipe_file, "medusa", tmp_path / "second", *steps, *more))
    first, second = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("first", "second"))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("trained", [False, True])
def test_the_start_does_not_depend_on_the_random_numbers_before(
    trained: bool, recipe_file: Path, tmp_path: Path
) -> None:
    """A run that reads its responses from the cache has drawn fewer; DFlash draws the anchors that it trains."""
    options = ["drafter.block_size=4", "drafter.anchors=2", "drafter.layers=[1,2]", "drafter.draft_vocab_size=20"]
    recipe = recipe_of(recipe_file, "dflash", tmp_path / "run", *options)
    if trained:  # states of an untrained drafter are equal at all anchors
        train(recipe)
        start = [f"start_from={tmp_path / 'run' / 'drafter'}", "drafter.anchors=2"]
        recipe = recipe_of(recipe_file, "dflash", tmp_path / "more", *start)
    context = RunContext.of(recipe, make_accelerator(recipe, Path(recipe.output)))
    (_, built, data, teacher), started = load_parts(context), list[tuple[dict[str, Tensor], list[InputScales]]]()
    for seed in range(2):
        torch.manual_seed(seed)
        drafter = deepcopy(built)
        sizes = start_drafter(recipe, drafter, teacher, data, partial(collate, data.rows, device=torch.device("cpu")))
        started.append((drafter.state_dict(), list(sizes.values())))
    (weights, sizes), (again, same) = started
    changed = any(not torch.equal(weight, built.state_dict()[name]) for name, weight in weights.items())
    assert changed is not trained
    for name, weight in weights.items():
        assert torch.equal(weight, again[name]), name
    assert len(sizes) == 2
    for one, other in zip(sizes, same, strict=True):
        assert one.total == other.total
        assert torch.equal(one.columns_F, other.columns_F)


def test_rates_hold_for_inputs_of_ordinary_sizes() -> None:
    drafter = Medusa.from_target(make_llama(), num_heads=1)
    head = drafter.lm_heads[0].weight
    large = {head: InputScales(torch.full((32,), 8.0), 4 * MEASURED_TOTAL)}
    _, beside_muon = OPTIMIZERS["muon"](Trained.of(drafter, sizes=large))
    (alone,) = OPTIMIZERS["adamw"](Trained.of(drafter, sizes=large))
    small = {head: InputScales(torch.full((32,), 0.1), 1.0)}
    (unchanged,) = OPTIMIZERS["adamw"](Trained.of(drafter, sizes=small))
    ratios = [
        next(group["ratio"] for group in made.param_groups if group["params"][0] is head)
        for made in (beside_muon, alone, unchanged)
    ]
    assert ratios == [1 / 4, 32 / (4 * MEASURED_TOTAL), 1.0]
