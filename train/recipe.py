"""The recipe: every knob of a training run, checked before any work starts."""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import LARGEST_YAML, parse_yaml, read_text
from draftsmith.train.drafter_sections import DRAFTERS, AnyDrafterSection
from draftsmith.train.section import Section
from draftsmith.train.sections import (
    CotrainSection,
    DataSection,
    EvaluationSection,
    ObjectiveSection,
    PublishSection,
    TargetSection,
    TeacherSection,
    TrainSection,
)

DEFAULT_DRAFT_LENGTH = 4
LAUNCH_CONFIGS = "accelerate"
"""The folder beside the recipes with configs for `accelerate launch`."""
OPTIONAL = {"cotrain": CotrainSection, "publish": PublishSection}
"""Sections that a recipe may do without."""
BOUNDS = (
    ("greater_than", ">", "gt"),
    ("greater_than_equal", ">=", "ge"),
    ("less_than", "<", "lt"),
    ("less_than_equal", "<=", "le"),
)


class Recipe(Section):
    name: str
    """Of the run, in trackers and reports."""
    output: str
    """Folder of the run; it is resumed when it holds the same recipe, and refused when it holds another."""
    drafter: AnyDrafterSection
    start_from: str | None = None
    """A trained drafter to go on from, of the same type and shapes."""
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    teacher: TeacherSection = TeacherSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = Field(default_factory=TrainSection)
    evaluation: EvaluationSection = EvaluationSection()
    cotrain: CotrainSection | None = None
    """Also train adapters on the target; with Medusa heads this is Medusa-2. What is decoded then is another target."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """wandb runs offline unless WANDB_API_KEY is set."""
    publish: PublishSection | None = None
    """Push the best drafter to the Hub; it may be added, changed or left out when a run goes on."""

    def drafter_options(self) -> dict[str, Any]:
        """What `from_target` of the drafter takes, but for its draft vocabulary."""
        return self.drafter.model_dump(exclude={"type", "draft_vocab_size"})

    def objective_options(self, draft_length: int) -> dict[str, Any]:
        """What `Objective` takes."""
        options = self.objective.model_dump()
        temperature = options.pop("temperature")
        options["temperatures"] = tuple(temperature) if isinstance(temperature, list) else (temperature,)
        return {**options, "position_weights": tuple(options["position_weights"]), "draft_length": draft_length}

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens of the draft vocabulary; None for all."""
        return getattr(self.drafter, "draft_vocab_size", None)

    def draft_length(self, most: int | None) -> int:
        """gamma, for a drafter that can propose at most `most` tokens."""
        wanted = self.train.draft_length or most or DEFAULT_DRAFT_LENGTH
        if most is not None and wanted > most:
            raise ConfigError.of(
                "train.draft_length", wanted, f"at most {most}, the {self.drafter.type} drafter's heads"
            )
        return wanted


def shipped_recipes() -> dict[str, str]:
    """Text of every recipe in the package by name, e.g. `quickstart/medusa`."""
    root = files("draftsmith.recipes")
    found = {}
    for folder in sorted(root.iterdir(), key=lambda entry: entry.name):
        if folder.is_dir() and folder.name != LAUNCH_CONFIGS:
            for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
                if file.name.endswith(".yaml"):
                    found[f"{folder.name}/{file.name.removesuffix('.yaml')}"] = file.read_text(encoding="utf-8")
    return found


def load_recipe(source: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe from a YAML file or the name of a shipped one; `overrides` are `section.key=value` and win.

    Raises:
        ConfigError: for a missing file, an unknown key (with the nearest valid one) or a value out of range.
    """
    path, shipped = Path(source), shipped_recipes()
    if path.is_file():
        text = _read(path)
    elif source.removesuffix(".yaml").removeprefix("recipes/") in shipped:
        text = shipped[source.removesuffix(".yaml").removeprefix("recipes/")]
    else:
        near = get_close_matches(source, shipped, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"recipe={source}; expected a YAML file or one of {', '.join(shipped)}{hint}")
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not YAML ({reason_of(error)}); expected a recipe") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds {type(values).__name__}; expected sections with keys")
    for entry in overrides or []:
        override(values, entry)
    return parse_recipe(values, source)


def _read(path: Path) -> str:
    try:
        return read_text(path, LARGEST_YAML)
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe={path} cannot be read ({error}); expected YAML in UTF-8") from error


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """Check plain values; `source` is named in errors."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{_explain(error, values)} ({source})") from error


def override(values: dict[str, Any], entry: str) -> None:
    """Put `section.key=value` into plain values."""
    key, equals, text = entry.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {entry!r}; expected section.key=value")
    *sections, last = key.split(".")
    place = values
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"override {entry!r}; {section} is a value, expected a section")
    try:
        place[last] = parse_yaml(text)
    except ValueError:
        place[last] = text  # such as a file name with a bracket or a colon


def _explain(error: ValidationError, values: dict[str, Any]) -> str:
    """The first problem in one line: key, value and what would be valid."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    drafter = values.get("drafter")
    kind = drafter.get("type") if isinstance(drafter, dict) else drafter
    if location[:2] == ["drafter", kind]:
        location = ["drafter", *location[2:]]  # pydantic puts the union's tag in between
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _keys(location[:-1], kind)
        near = get_close_matches(location[-1], known, 1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown key {key}={problem['input']!r}; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing; expected a value"
    if problem["type"].startswith("union_tag"):
        return f"drafter.type={kind!r}; expected one of {', '.join(DRAFTERS)}"
    return f"{key}={problem['input']!r}; expected {_expected(problem)}"


def _expected(problem: Any) -> str:
    """What pydantic would have taken, in this project's words."""
    bounds, kind = problem.get("ctx", {}), problem["type"]
    if kind.startswith(("model_type", "model_attributes_type")):
        return "a section with keys"
    for name, sign, bound in BOUNDS:
        if kind == name:
            return f"{sign} {bounds[bound]:.12g}"
    return problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _keys(sections: list[str], kind: str | None) -> list[str]:
    """The keys that a section knows."""
    if not sections:
        return list(Recipe.model_fields)
    if sections[0] == "drafter":
        return list(DRAFTERS[kind].model_fields)
    if sections[0] in OPTIONAL:
        return list(OPTIONAL[sections[0]].model_fields)
    return list(Recipe.model_fields[sections[0]].annotation.model_fields)
