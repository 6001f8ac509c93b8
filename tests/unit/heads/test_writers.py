"""Which engines serve an export."""

import pytest

from draftsmith.heads.formats.writers import unserved
from draftsmith.train.recipe import load_recipe

ALONE = {"medusa2", "mtp"}
"""Recipes' folders whose drafters transformers runs alone."""


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle3", "hass", "mtp", "dflash"])
def test_a_drafter_that_no_engine_serves_is_named_before_it_is_trained(kind: str) -> None:
    note = unserved(load_recipe(f"{kind}/any_prompts").drafter)
    assert (note is not None) == (kind in ALONE)
    assert note is None or "is served by transformers alone (draftsmith export --format transformers)" in note


def test_the_targets_own_module_is_served() -> None:
    assert unserved(load_recipe("mtp/any_prompts", ["drafter.init=native"]).drafter) is None
    assert "drafter.init=native, where it has one" in str(unserved(load_recipe("mtp/any_prompts").drafter))
