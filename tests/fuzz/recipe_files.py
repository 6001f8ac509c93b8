"""Recipes of any content, and overrides of any key with any value."""

import json
from typing import Any

import yaml
from hypothesis import strategies as st

from draftsmith.heads.configs import DRAFTERS
from draftsmith.train.recipe import SECTIONS, Recipe, shipped_recipes
from fuzz.damage import BOMB, JUNK, NESTED, NUMBERS, TEXTS, YAML_TRAPS, argument, broken, changed, encoded
from fuzz.material import Material
from fuzz.running import Case

READERS = ("train", "memory", "data prepare")
"""Commands that read a recipe."""


def keys() -> list[str]:
    """Return every key of a recipe."""
    found = list(Recipe.model_fields)
    for name in Recipe.model_fields:
        inner = SECTIONS.get(name)
        found += [f"{name}.{key}" for key in getattr(inner, "model_fields", ())]
    return sorted({*found, *(f"drafter.{key}" for entry in DRAFTERS.values() for key in entry.section.model_fields)})


@st.composite
def _recipe_text(draw: st.DrawFn, recipe: dict[str, Any]) -> bytes:
    kind = draw(st.sampled_from(["changed", "changed", "changed", "drafter", "trap", "broken", "other", "shipped"]))
    whole = yaml.safe_dump(recipe)
    if kind == "changed":
        value = draw(changed(recipe))
        return encoded(json.dumps(value) if draw(st.booleans()) else yaml.safe_dump(value, allow_unicode=True))
    if kind == "drafter":
        type_ = draw(st.sampled_from(sorted(DRAFTERS)))
        section = {key: None for key in DRAFTERS[type_].section.model_fields}
        section = {key: draw(JUNK) for key in draw(st.lists(st.sampled_from(sorted(section)), max_size=2))}
        return encoded(json.dumps({**recipe, "drafter": {**section, "type": type_}}))
    if kind == "trap":
        key = draw(st.sampled_from(["name", "output", "train", "data", "target", "x"]))
        return encoded(f"{whole}{key}: {draw(YAML_TRAPS)}\n")
    if kind == "broken":
        return draw(broken(whole.encode()))
    if kind == "other":
        return encoded(draw(st.one_of(TEXTS, NESTED, st.just(BOMB), JUNK.map(json.dumps))))
    return encoded(draw(st.sampled_from(sorted(shipped_recipes().values()))))


@st.composite
def recipe_cases(draw: st.DrawFn, material: Material) -> Case:
    command = draw(st.sampled_from(READERS)).split()
    text = draw(_recipe_text(material.recipe))
    options = draw(st.sampled_from([[], [], ["--on", "h100"], ["--processes", "2"]])) if command == ["memory"] else []
    return Case("recipe", [*command, "r.yaml", *options], {"r.yaml": text})


@st.composite
def override_cases(draw: st.DrawFn, material: Material) -> Case:
    names = keys()
    command = draw(st.sampled_from(READERS)).split()
    entries = []
    for _ in range(draw(st.integers(1, 2))):
        key = draw(st.one_of(st.sampled_from(names), st.sampled_from(names), TEXTS))
        value = draw(st.one_of(JUNK.map(json.dumps), NUMBERS.map(str), TEXTS, YAML_TRAPS, NESTED))
        entries.append(f"{key}={value}")
    type_ = draw(st.sampled_from(sorted(DRAFTERS)))
    text = encoded(json.dumps({**material.recipe, "drafter": {"type": type_}}))
    return Case("override", [*command, "r.yaml", *map(argument, entries)], {"r.yaml": text})
