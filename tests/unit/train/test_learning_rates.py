"""The optimizer and rate of recipes that name none."""

from pathlib import Path

import pytest
import yaml
from run_results import losses_of

from draftsmith.heads.configs import DRAFTERS, TRAINED
from draftsmith.train.models import described, with_rate
from draftsmith.train.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from draftsmith.train.trainer import train

TINY = 32
"""Width of the tiny target, which is not the table's."""


def recipe_of(kind: str = "medusa", train: dict | None = None, **values: object) -> Recipe:
    return parse_recipe({"name": "x", "output": "y", "drafter": {"type": kind}, "train": train or {}, **values}, "here")


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.endswith("any_prompts")])
def test_recipes_for_any_target_leave_the_rate_to_the_table(name: str) -> None:
    recipe = load_recipe(name)
    rate = recipe.default_rate(192)
    assert (recipe.train.optimizer, recipe.train.learning_rate) == ("muon", None)
    assert with_rate(recipe).train.learning_rate == rate, "of the embedded target's width"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if load_recipe(name).target.model != "embedded"])
def test_recipes_for_one_target_name_both_or_say_that_the_table_has_them(name: str) -> None:
    train = load_recipe(name).train
    assert (train.learning_rate is None) == ("\n# Rate:     not set: " in shipped_recipes()[name])
    assert train.learning_rate is None or "optimizer" in train.model_fields_set


def test_given_keys_win_one_by_one() -> None:
    rates, here = DRAFTERS["medusa"].rates, 256 / 192  # the rates are of width 256; AdamW's goes with 1/width
    for given, expected in (
        ({}, ("muon", rates.muon)),
        ({"optimizer": "adamw"}, ("adamw", rates.adamw * here)),
        ({"learning_rate": 0.5}, ("muon", 0.5)),
        ({"optimizer": "adamw", "learning_rate": 0.5}, ("adamw", 0.5)),
    ):
        train = with_rate(recipe_of(train=given)).train
        assert (train.optimizer, train.learning_rate) == expected


def test_rates_go_with_the_width() -> None:
    medusa, draft = recipe_of(), recipe_of("draft_model")
    assert [medusa.default_rate(width) for width in (64, 256, 512, 4096)] == [2e-2, 2e-2, 1e-2, 1.3e-3]
    assert [draft.default_rate(width) for width in (64, 128, 256, 4096)] == [1.2e-2, 6e-3, 3e-3, 1.9e-4]
    for kind in ("eagle", "hass", "mtp", "dflash"):
        assert [recipe_of(kind).default_rate(width) for width in (64, 256, 576)] == [4e-2, 1e-2, 4.4e-3]
    adamw = recipe_of(train={"optimizer": "adamw"})
    assert [adamw.default_rate(width) for width in (64, 256, 4096)] == [1.2e-2, 3e-3, 1.9e-4]


def test_deepspeed_has_adamw_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    silent = [recipe_of(), parse_recipe({"name": "x", "output": "y", "drafter": {"type": "medusa"}}, "here")]
    rates = [with_rate(recipe).train.learning_rate for recipe in silent]
    assert rates == [DRAFTERS["medusa"].rates.adamw * 256 / 192] * 2
    assert [recipe.train.optimizer for recipe in silent] == ["adamw"] * 2
    assert recipe_of(train={"optimizer": "muon"}).train.optimizer == "muon", "which DeepSpeed then refuses"


@pytest.mark.parametrize(
    "recipe",
    [
        recipe_of("draft_model", drafter={"type": "draft_model", "model": "x/y"}),
        recipe_of("mtp", drafter={"type": "mtp", "init": "native"}),
        recipe_of(start_from="runs/before/drafter"),
    ],
)
def test_trained_weights_get_a_rate_of_their_own(recipe: Recipe) -> None:
    assert recipe.default_rate(256) == TRAINED.muon
    assert "with trained weights" in described(with_rate(recipe), 256)


def silent(recipe_file: Path) -> str:
    """The recipe without optimizer and rate."""
    values = yaml.safe_load(recipe_file.read_text())
    del values["train"]["optimizer"], values["train"]["learning_rate"]
    recipe_file.write_text(yaml.safe_dump(values))
    return str(recipe_file)


def test_the_default_is_told_stored_and_resumed(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = load_recipe(silent(recipe_file), ["train.steps=4"])
    expected = recipe.default_rate(TINY)
    train(recipe)
    said = f"optimizer: muon, rate {expected:g} (the default for draft_model at width {TINY})"
    assert said in capsys.readouterr().err
    stored = load_recipe(str(tmp_path / "run" / "recipe.yaml"), ["output=x"])
    assert (stored.train.optimizer, stored.train.learning_rate) == ("muon", expected)
    losses = losses_of(tmp_path / "run")
    (tmp_path / "run" / "finished.json").unlink()
    train(recipe)
    assert losses_of(tmp_path / "run") == losses, "the same run"
