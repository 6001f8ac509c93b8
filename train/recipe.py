"""The recipe: every knob of a training run, checked before any work starts.

The sections of a recipe, but for the drafter's: every key with what it means.

Online adaptation: a trained drafter goes on learning from the prompts that its target served.
"""

import os
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from draftsmith.config import Count, Number, Section, no_as_written, no_truth_value
from draftsmith.decode.sampling import LARGEST_SEED
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.configs import DRAFTERS, AnyDrafterSection
from draftsmith.reading import LARGEST_YAML, parse_assignment, parse_yaml, read_json, read_text

MONTH = 30 * 24 * 60
"""In minutes."""
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""The variable by which accelerate says that it was launched with DeepSpeed."""


def default_optimizer() -> Literal["adamw", "muon"]:
    return "adamw" if os.environ.get(DEEPSPEED, "false").lower() == "true" else "muon"


class TargetSection(Section):
    model: str = "embedded"
    """'embedded', a local folder, or a Hub id."""
    revision: str | None = None
    """A branch, tag or commit of the Hub repository."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the frozen target; the drafter is always trained in float32."""
    trust_remote_code: bool = False
    """Run code that the target's repository carries."""
    offload: bool = False
    """Keep its layers in the host's memory, and move each to the accelerator while it computes."""
    sharded: bool = False
    """Keep a share of its layers on each process, where there are several; by default each has all of it."""


class DataSection(Section):
    prompts: str = "embedded"
    """'embedded'; a file (JSONL, JSON, Parquet, text) or a folder of them; or a Hub data set. Rows have `messages`,
    `conversations` (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Of a Hub data set."""
    count: Count = 1000
    """At most this many prompts, or samples of a file with answers."""
    prompt_tokens: Count = 48
    """Embedded prompts have this length; longer prompts of a file are left out and counted."""
    response: Literal["target", "text"] = "target"
    """'target' samples an answer to each prompt; 'text' takes those that stand in the file, which is another
    distribution than the drafter will meet."""
    response_tokens: Count = 128
    """The longest response, or with several turns all that stands behind the first prompt; longer ones of a file are
    left out and counted."""
    turns: Literal["first", "all"] = "first"
    """Which turns of a conversation the target answers; with 'all', it goes on behind its own answers."""
    responses: Count = 1
    """That the target gives to each prompt, each sampled with a seed of its own: a few hundred prompts are enough with
    several."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """At which the target answers."""
    batch_size: Count = 64
    """Prompts that are answered together."""
    drafter_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of the prompts that the drafter answers by itself, as it is then; for draft models."""
    refresh_every: Count | None = None
    """Steps after which all prompts are answered anew, with the drafter as it is then."""
    speculate: bool = True
    """Let the drafter make that faster; where verifying a whole batch costs as much as decoding it, false is faster."""
    chat_template: str | None = None
    """A file with a chat template, instead of the tokenizer's."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is given beside the messages, such as enable_thinking."""
    deduplicate: bool = True
    """Leave out samples that stood in the file before."""
    pack: bool = False
    """Put several samples into one row of data.pack_tokens, each seeing itself alone, so that little is padding."""
    pack_tokens: Count | None = None
    """Length of packed rows; by default data.prompt_tokens + data.response_tokens."""


class TeacherSection(Section):
    kind: Literal["online", "cached", "logprobs"] = "online"
    """'cached' runs the target over the data once and keeps its states on disk; worth it for more than one epoch.
    'logprobs' reads answers and the likeliest tokens at each place from `file`, for draft models alone."""
    file: str | None = None
    """Of 'logprobs': JSON lines as OpenAI's API and vLLM write them, see distill/logprob_teacher.py. They take the
    place of data.prompts."""
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    """Of the cached states."""
    shard_rows: Count = 256
    """Rows of a file of the cache."""


Term = Literal["kl", "reverse_kl", "js", "tv", "lk_alpha", "ce", "label", "lk_lambda", "accepted_length"]
Weight = Annotated[Number, Field(ge=0)]
Temperature = Annotated[Number, Field(gt=0)]


class ObjectiveSection(Section):
    kind: Term = "kl"
    """KL(p || q), KL(q || p), Jensen-Shannon, total variation, -log alpha, cross-entropy with the target's argmax or
    with the text's own next token (label), LK-lambda, or the expected accepted length; see distill/objective.py."""
    mix: dict[Term, Weight] = Field(default_factory=dict)
    """Weights of several of them, instead of `kind`."""
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = 1.0
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
    activation_checkpointing: bool = False
    """Compute what lies inside the drafter's blocks again in the backward pass instead of keeping it."""
    compile: bool = False
    """Let torch.compile make kernels of the drafter's layers; worth it for long runs on a GPU."""
    learning_rate: Annotated[Number, Field(gt=0)] | None = None
    """Peak, after the warm-up; a cosine leads to a tenth of it. By default what the family of drafters learns with, by
    optimizer and width of the target; see train/learning_rates.py."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Share of the steps in which the rate rises."""
    optimizer: Literal["adamw", "muon"] = Field(default_factory=default_optimizer)
    """'muon' for the matrices inside the drafter's layers, AdamW for the rest: learns much faster in few steps. The
    default, but for DeepSpeed, which has 'adamw' alone."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """The optimizers'."""
    clip_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16"], BeforeValidator(no_as_written)] = "auto"
    """Of forward passes and Muon's products; 'auto' takes bf16 where the machine computes it in hardware."""
    draft_length: Count | None = None
    """gamma: draft tokens a round, in the periodic evaluation and as the checkpoint's default; by default as many as
    the drafter has heads, or 4."""
    evaluate_every: Count = 50
    """Steps between two evaluations, which decode held-out prompts."""
    checkpoint_every: Count = 50
    """Steps between two checkpoints to resume from."""
    keep_checkpoints: Count = 2
    """Older ones are deleted."""
    timeout_minutes: Annotated[Number, Field(gt=0, le=MONTH)] = 24 * 60
    """How long a process waits for the others, which may sample, download or evaluate, before the run is given up; of
    several processes only."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(no_truth_value)] = 0
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


class PublishSection(Section):
    repo: str
    """On the Hub: user/name; made when the run starts, where there is none."""
    when: Literal["end", "best"] = "end"
    """'best' also pushes each new best drafter while the run goes on."""
    revision: str | None = None
    """The branch that is pushed to; by default main."""
    private: bool = False
    """Of a repository that is made."""
    licence: str | None = None
    """The Hub's identifier of one, such as apache-2.0."""
    base_model: str | None = None
    """The target on the Hub, where target.model names it otherwise."""


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
    key, value = parse_assignment(f"override {entry!r}", entry, "section.key=value")
    *sections, last = key.split(".")
    place = values
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"override {entry!r}; {section} is a value, expected a section")
    place[last] = value


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
        return list(DRAFTERS[kind].section.model_fields)
    if sections[0] in OPTIONAL:
        return list(OPTIONAL[sections[0]].model_fields)
    return list(Recipe.model_fields[sections[0]].annotation.model_fields)


RATE = 0.25
"""Of the learning rate that the drafter was trained with."""

SERVED = {"subset": None, "split": "train", "responses": 1, "refresh_every": None, "drafter_share": 0.0}
"""What the first training's data had, and served prompts have not."""


def adapted_recipe(
    drafter: str, prompts: str, output: str, *, target: str | None, answered: bool, overrides: list[str]
) -> Recipe:
    """The recipe that `drafter` was trained by, turned to served prompts.

    The drafter as it is counts as the first candidate: one that is no better on held-out prompts is not kept.

    Args:
        target: by default the one that the checkpoint names.
        answered: the file holds what the target answered; else it answers again.
        overrides: `section.key=value`, which win.

    Raises:
        ConfigError: for a drafter that keeps no recipe.
    """
    values = _stored(drafter)
    train = values["train"]
    values |= {
        "name": f"{values['name']}-adapted",
        "output": output,
        "start_from": drafter,
        "target": {**values["target"], **({} if target is None else {"model": target})},
        "data": {**values["data"], **SERVED, "prompts": prompts, "response": "text" if answered else "target"},
        "teacher": {},
        "train": {**train, "learning_rate": train["learning_rate"] * RATE},
        "evaluation": {**values["evaluation"], "prompts": None},
        "cotrain": None,
    }
    for entry in overrides:
        override(values, entry)
    return parse_recipe(values, f"the recipe of {drafter}")


def _stored(drafter: str) -> dict[str, Any]:
    file = Path(drafter).expanduser() / "config.json"
    try:
        stored = read_json(file)["draftsmith"]["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"drafter={drafter} keeps no recipe; expected a folder that `draftsmith train` wrote"
        ) from error
    if stored is None:
        raise ConfigError(f"drafter={drafter} keeps no recipe; expected a folder that `draftsmith train` wrote")
    return parse_recipe(stored, f"the recipe of {drafter}").model_dump(mode="json")
