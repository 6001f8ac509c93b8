"""The recipe: every knob of a training run, checked before any work starts."""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from draftsmith.errors import ConfigError
from draftsmith.train.drafter_sections import DRAFTERS, AnyDrafterSection
from draftsmith.train.section import Count, Number, Section, no_truth_value

DEFAULT_DRAFT_LENGTH = 4
BOUNDS = (
    ("greater_than", ">", "gt"),
    ("greater_than_equal", ">=", "ge"),
    ("less_than", "<", "lt"),
    ("less_than_equal", "<=", "le"),
)


class TargetSection(Section):
    model: str = "embedded"
    """'embedded', a local folder, or a Hub id."""
    revision: str | None = None
    """A branch, tag or commit of the Hub repository."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the frozen target; the drafter is always trained in float32."""
    trust_remote_code: bool = False
    """Run code that the target's repository carries."""


class DataSection(Section):
    prompts: str = "embedded"
    """'embedded', or a JSONL file with `prompt`, `text`, `turns` or `messages`."""
    count: Count = 1000
    """At most this many prompts."""
    prompt_tokens: Count = 48
    """Embedded prompts have this length; longer prompts of a file are left out and counted."""
    response: Literal["target", "text"] = "target"
    """'target' samples an answer to each prompt; 'text' takes the one that stands in the file, which is another
    distribution than the drafter will meet."""
    response_tokens: Count = 128
    """The longest response; longer ones of a file are left out and counted."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """At which the target answers."""
    batch_size: Count = 64
    """Prompts that are answered together."""


class TeacherSection(Section):
    kind: Literal["online", "cached"] = "online"
    """'cached' runs the target over the data once and keeps its states on disk; worth it for more than one epoch."""
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    """Of the cached states."""
    shard_rows: Count = 256
    """Rows of a file of the cache."""


Term = Literal["kl", "reverse_kl", "js", "tv", "lk_alpha", "ce", "lk_lambda", "accepted_length"]
Weight = Annotated[Number, Field(ge=0)]
Temperature = Annotated[Number, Field(gt=0)]


class ObjectiveSection(Section):
    kind: Term = "kl"
    """KL(p || q), KL(q || p), Jensen-Shannon, total variation, -log alpha, cross-entropy with the target's argmax,
    LK-lambda, or the expected accepted length; see distill/objectives.py."""
    mix: dict[Term, Weight] = Field(default_factory=dict)
    """Weights of several of them, instead of `kind`."""
    temperature: Temperature | list[Temperature] = 1.0
    """Of both p and q inside the objective; several are averaged. For temperature 0 take 'ce'."""
    position_decay: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Draft position k weighs position_decay ** k."""
    position_weights: list[Weight] = Field(default_factory=list)
    """Weight of each draft position, instead of position_decay; the last one holds for all further ones."""
    beta: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """The target's share in the mixture of 'js'."""
    eta: Weight = 3.0
    """Of 'lk_lambda': how fast total variation takes over from KL as alpha rises; its authors use 10 for Medusa."""
    dpace: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Weigh each position by how much of the draft hangs on it (D-PACE), smoothed by this; its authors use 0.5."""
    chunk_tokens: Count = 1024
    """Tokens whose logits are alive at a time."""
    feature_weight: Weight = 0.0
    """Of the SmoothL1 distance between the drafter's state and the target's, for eagle and hass."""
    top_k: Count = 10
    """Of the target's likeliest tokens, in the term that `top_k_weight` adds."""
    top_k_weight: Weight = 0.0
    """Of the cross-entropy over the target's `top_k` likeliest tokens (HASS)."""
    confidence_weight: Weight = 1.0
    """Of the cross-entropy of a confidence head, where the drafter has one."""


class TrainSection(Section):
    steps: Count = 200
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences a step, over all processes and accumulation steps together."""
    gradient_accumulation: Count = 1
    """Parts that each process's share of a batch is cut into."""
    learning_rate: Annotated[Number, Field(gt=0)] = 1e-3
    """Peak, behind the warm-up; a cosine leads to a tenth of it."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Share of the steps in which the rate rises."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """'muon' for the matrices inside the drafter's layers, AdamW for the rest: learns much faster in few steps."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """The optimizers'."""
    clip_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """'auto' takes bf16 where the machine computes it in hardware."""
    draft_length: Count | None = None
    """gamma: draft tokens a round, in the periodic evaluation and as the checkpoint's default; by default as many as
    the drafter has heads, or 4."""
    evaluate_every: Count = 50
    """Steps between two evaluations, which decode held-out prompts."""
    checkpoint_every: Count = 50
    """Steps between two checkpoints to resume from."""
    keep_checkpoints: Count = 2
    """Older ones are deleted."""
    seed: Annotated[int, BeforeValidator(no_truth_value)] = 0
    """Of initial weights, order of the data and sampling."""


class CotrainSection(Section):
    lora_rank: Count = 32
    """Of the adapters on the target."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    """Scale of the adapters: alpha / rank."""
    modules: list[str] | None = None
    """Last parts of the names of the layers that get adapters; by default every linear layer in the blocks."""
    learning_rate_ratio: Annotated[Number, Field(gt=0)] = 0.25
    """The adapters' rate, relative to train.learning_rate."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.3
    """Share of the steps in which the drafter is trained alone."""
    ramp_fraction: Annotated[Number, Field(ge=0, le=1)] = 0.2
    """Share of the steps, behind the warm-up, over which the drafter's loss comes to bear on the adapters."""
    drafter_weight: Annotated[Number, Field(gt=0)] = 0.2
    """Of the drafter's loss for the adapters."""
    quality_weight: Annotated[Number, Field(gt=0)] = 1.0
    """Of the KL from the original target."""
    max_quality_kl: Annotated[Number, Field(gt=0)] = 0.05
    """Bound on that KL, in nats a token: on held-out text beyond it no drafter is kept."""


class EvaluationSection(Section):
    prompts: str | None = None
    """'embedded' or a JSONL file; by default the embedded held-out text, or the last prompts of the training file."""
    count: Count = 8
    """Prompts that are decoded; those taken from a training file are kept out of training."""
    prompt_tokens: Count = 48
    """Length of embedded prompts."""
    max_new_tokens: Count = 48
    """Tokens decoded for each."""
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """At which they are decoded; 0 is greedy."""


class Recipe(Section):
    name: str
    """Of the run, in trackers and reports."""
    output: str
    """Folder of the run; it is resumed when it holds the same recipe, and refused when it holds another."""
    drafter: AnyDrafterSection
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    teacher: TeacherSection = TeacherSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    cotrain: CotrainSection | None = None
    """Also train adapters on the target; with Medusa heads this is Medusa-2. What is decoded then is another target."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """wandb runs offline unless WANDB_API_KEY is set."""

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
        if folder.is_dir():
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
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML ({str(error).splitlines()[0]}); expected a recipe") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds {type(values).__name__}; expected sections with keys")
    for override in overrides or []:
        _override(values, override)
    return parse_recipe(values, source)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe={path} cannot be read ({error}); expected YAML in UTF-8") from error


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """Check plain values; `source` is named in errors."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{_explain(error, values)} ({source})") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}; expected section.key=value")
    *sections, last = key.split(".")
    place = values
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}; {section} is a value, expected a section")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError:
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
            return f"{sign} {bounds[bound]:g}"
    return problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _keys(sections: list[str], kind: str | None) -> list[str]:
    """The keys that a section knows."""
    if not sections:
        return list(Recipe.model_fields)
    if sections[0] == "drafter":
        return list(DRAFTERS[kind].model_fields)
    if sections[0] == "cotrain":
        return list(CotrainSection.model_fields)
    return list(Recipe.model_fields[sections[0]].annotation.model_fields)
