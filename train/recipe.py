"""The recipe: every setting of a training run, read from YAML and checked before any work starts."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from difflib import get_close_matches
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from draftsmith.config import Location, Section, expected
from draftsmith.distill.data_section import SELF, DataSection, ServerSection, SourceSection, for_each_source
from draftsmith.distill.target_section import TargetSection
from draftsmith.errors import REMOVED, ConfigError, reason_of, removed
from draftsmith.heads.configs import DRAFTERS, TRAINED, AnyDrafterSection, StoredSection, is_named
from draftsmith.names import (
    check_attention,
    check_drafter_name,
    check_prompts_name,
    check_target_name,
    check_template_name,
)
from draftsmith.reading import parse_assignment, parse_yaml, read_text
from draftsmith.train.recipe_sections import (
    CotrainSection,
    EvaluationSection,
    ObjectiveSection,
    TeacherSection,
    TrainSection,
)

DEFAULT_DRAFT_LENGTH = 4
LAUNCH_CONFIGS = "accelerate"
"""Folder next to the recipes with configs for `accelerate launch`."""
SECTIONS: dict[str, type[Section]] = {
    "target": TargetSection,
    "data": DataSection,
    "teacher": TeacherSection,
    "objective": ObjectiveSection,
    "train": TrainSection,
    "evaluation": EvaluationSection,
    "cotrain": CotrainSection,
}
"""Every section but `drafter`, whose keys depend on its type."""


class Recipe(Section):
    name: Annotated[str, Field(max_length=100)]
    """Name of the run, in trackers and reports."""
    output: Location
    """Folder of the run; it is resumed when it holds the same recipe, and refused when it holds another."""
    drafter: AnyDrafterSection = StoredSection()
    """By default the one that `start_from` names; without a type, its training options."""
    start_from: str | None = None
    """A trained drafter to start from: a folder or a Hub id, also in another project's layout. The keys of `drafter`
    that change what it computes are read from it."""
    continue_from: str | None = None
    """A checkpoint of another run, such as runs/NAME/checkpoints/step-001000, whose weights, moments and step this run
    continues with; the two recipes may differ in steps, schedule and intervals."""
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    teacher: TeacherSection = TeacherSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = Field(default_factory=TrainSection)
    evaluation: EvaluationSection = EvaluationSection()
    cotrain: CotrainSection | None = None
    """Also train adapters on the target; with Medusa heads this is Medusa-2. Decoding then uses the adapted target."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """wandb runs offline unless WANDB_API_KEY is set."""

    @model_validator(mode="before")
    @classmethod
    def _engine_answers(cls, values: Any) -> Any:
        """Let the first engine of the teacher write the answers where the recipe names no other server."""
        teacher, data = (dict(values.get(name) or {}) for name in ("teacher", "data"))
        server = teacher.get("server")
        given = data.get("server") is not None or data.get("response") == "text"
        if teacher.get("kind") != "server" or not isinstance(server, dict) or given or not server.get("urls"):
            return values
        urls = server["urls"]
        first = {"url": urls if isinstance(urls, str) else urls[0], "model": server.get("model", "target")}
        return {**values, "data": {**data, "server": first}}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Raise ConfigError for keys that exclude each other, whatever the machine."""
        data = self.data
        if self.drafter.type is None and (self.start_from is None or is_named(self.start_from)):
            expected = f"one of {', '.join(DRAFTERS)}, or start_from with a trained drafter"
            raise ConfigError(f"drafter.type is missing; expected {expected}")
        for given, key, others, instead in self._exclusions():
            other = next((name for name, holds in others.items() if holds), None)
            if given and other is not None:
                raise ConfigError(f"{key} with {other}; expected {instead}")
        if data.images is not None and not Path(data.images).expanduser().is_dir():
            raise ConfigError.of("data.images", data.images, "a folder")
        self._check_teacher()
        self._check_schedule()
        if self.target.attn_implementation is not None:
            check_attention("target.attn_implementation", self.target.attn_implementation, self.target.dtype)
        return self

    def _exclusions(self) -> Iterator[tuple[bool, str, dict[str, bool], str]]:
        """Yield keys, with whether they are set, what excludes them, and what is expected then."""
        data, target, kind, size = self.data, self.target, self.teacher.kind, self.train.sequence_parallel
        one, quantization = "one of the two", target.quantization
        answered = {"response='text', whose responses are in the file": data.answered}
        images, cotrained = {"data.images": data.images is not None}, {"cotrain": self.cotrain is not None}
        again = {"temperature=0, which gives the same text again": data.temperature == 0}
        stored = {"target.sharded=True": target.sharded, **cotrained}
        yield data.responses > 1, f"data.responses={data.responses}", {**answered, **again}, "1"
        for source in data.sources:
            own = {next(iter(answered)): source.answered, **images}
            yield source.prompts == SELF, f"data.prompts={SELF!r}", own, "a file of prompts"
        yield data.server is not None, "data.server", answered, one
        others = {
            "data.pack=true": data.pack,
            "data.server": data.server is not None,
            "data.turns='all'": data.every_turn,
            f"teacher.kind={kind!r}": kind != "online",
        }
        yield data.images is not None, f"data.images={data.images}", {**others, **cotrained}, one
        yield target.sharded, "target.sharded=True", cotrained, "false: adapters are trained inside the target"
        yield target.offload, "target.offload=True", stored, one
        reasons = {"target.offload=True": target.offload, "teacher.kind='files'": kind == "files"}
        yield quantization is not None, f"target.quantization={quantization}", {**stored, **images, **reasons}, one
        yield size > 1, f"train.sequence_parallel={size}", {**cotrained, **images}, one

    def _check_teacher(self) -> None:
        kind, file, server = self.teacher.kind, self.teacher.file, self.teacher.server
        if self.cotrain is not None and kind != "online":
            raise ConfigError(f"teacher.kind={kind!r} with cotrain; expected 'online': the target changes")
        if kind != "files" and file is not None:
            raise ConfigError(f"teacher.file={file} with teacher.kind={kind!r}; expected 'files'")
        if kind == "files" and file is None:
            raise ConfigError("teacher.kind='files' without teacher.file; expected a folder of hidden states")
        if kind == "server":
            if server is None:
                raise ConfigError("teacher.kind='server' without teacher.server; expected its urls and folder or store")
            self._check_teacher_server()
        elif server is not None:
            raise ConfigError(f"teacher.server with teacher.kind={kind!r}; expected 'server'")
        if kind == "files" and not self.data.answered:
            raise ConfigError(
                "data.response='target' with teacher.kind='files', which has states of given answers; expected 'text', "
                "and the same conversations in data.prompts"
            )

    def _check_teacher_server(self) -> None:
        """Raise ConfigError for keys that need the target's layers, which such a run does not load."""
        data, target = self.data, self.target
        without_layers = {
            f"data.prompts={SELF!r}": (any(it.prompts == SELF for it in data.sources), "a file of prompts"),
            "data.images": (data.images is not None, "text"),
            "target.offload": (target.offload, "false: there are no layers"),
            "target.sharded": (target.sharded, "false: there are no layers"),
            "target.quantization": (target.quantization is not None, "none: the engine has its own"),
            "target.trust_remote_code": (target.trust_remote_code, "a class of transformers"),
            "train.sequence_parallel": (self.train.sequence_parallel > 1, "1"),
            "data.validation=null": (data.validation is None, "a number of prompts, whose answers show tau"),
        }
        for key, (given, instead) in without_layers.items():
            if given:
                raise ConfigError(f"{key} with teacher.kind='server'; expected {instead}")

    def _check_schedule(self) -> None:
        train = self.train
        if train.schedule == "wsd" and train.warmup_fraction + train.decay_fraction > 1:
            raise ConfigError(
                f"train.decay_fraction={train.decay_fraction:g} with train.warmup_fraction={train.warmup_fraction:g}; "
                "expected a sum of at most 1"
            )
        for key in ("target_tau", "patience"):
            if getattr(train, key) is not None and self.evaluation.count < 2:
                raise ConfigError(
                    f"train.{key}={getattr(train, key)} with evaluation.count={self.evaluation.count}; expected at "
                    "least 2 prompts, for an interval"
                )

    def require_paths(self, prompts: bool = True) -> None:
        """Raise ConfigError for a target, prompts, a teacher's file or a chat template that does not exist.

        Args:
            prompts: whether the run reads them; estimates do not.
        """
        check_target_name(self.target.model, "target.model")
        read = {"data.prompts": self.data.prompts, "evaluation.prompts": self.evaluation.prompts} if prompts else {}
        for key, named in read.items():
            for_each_source(check_prompts_name)(named, key)
        if self.teacher.kind == "files" and not Path(self.teacher.file or "").expanduser().is_dir():
            raise ConfigError.of("teacher.file", self.teacher.file, "a folder of hidden states")
        if self.data.chat_template is not None:
            check_template_name(self.data.chat_template, "data.chat_template")
        # A run that has a checkpoint of its own no longer needs the one that it continues, see check_continuation.
        own = Path(self.output).expanduser() / "checkpoints"
        for key in ("start_from",) if own.is_dir() else ("start_from", "continue_from"):
            if (name := getattr(self, key)) is not None:
                check_drafter_name(name, key)
        if (name := self.draft_model) is not None:
            check_drafter_name(name, "drafter.model")

    def require_divisible(self, processes: int) -> None:
        """Raise ConfigError for a batch or a number of processes that cannot be divided evenly."""
        parallel, accumulation = self.train.sequence_parallel, self.train.gradient_accumulation
        if processes % parallel:
            divisor = "expected a divisor of the number of processes"
            raise ConfigError(f"train.sequence_parallel={parallel} with processes={processes}; {divisor}")
        parts = processes // parallel * accumulation
        if self.train.batch_size % parts:
            of = "" if parallel == 1 else f" / sequence_parallel={parallel}"
            raise ConfigError(
                f"train.batch_size={self.train.batch_size}; expected a multiple of {parts} = {processes} processes{of} "
                f"x gradient_accumulation={accumulation}"
            )

    @property
    def unread_answers(self) -> int:
        """Answers to prompts of one turn that are sampled and that no step reads; 0 where rows hold several answers."""
        if self.data.answered or self.data.pack:
            return 0
        return max(0, self.data.count * self.data.responses - self.train.steps * self.train.batch_size)

    def drafter_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the drafter's `from_target`, without its draft vocabulary."""
        return self.drafter.model_dump(exclude={"type", "draft_vocab_size"})

    def objective_options(self, draft_length: int) -> dict[str, Any]:
        """Return the keyword arguments of `Objective`."""
        return {**self.objective.model_dump(), "draft_length": draft_length}

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens of the draft vocabulary; None for all."""
        return getattr(self.drafter, "draft_vocab_size", None)

    @property
    def draft_model(self) -> str | None:
        """The language model that the drafter starts from; None for one that starts otherwise."""
        return getattr(self.drafter, "model", None)

    @property
    def starts_trained(self) -> bool:
        """Whether the drafter starts from trained weights: a checkpoint, or a module of the target's checkpoint."""
        return self.start_from is not None or self.drafter.start == "trained"

    def default_rate(self, width: int) -> float | None:
        """Return the rate of the drafter's type and `train.optimizer` for a target of hidden size `width`."""
        rates = TRAINED if self.starts_trained else DRAFTERS[self.drafter.type].rates
        return rates.at(width, self.train.optimizer)

    def draft_length(self, most: int | None) -> int:
        """Return gamma for a drafter that can propose at most `most` tokens.

        Raises:
            ConfigError: when the recipe asks for more.
        """
        length = self.train.draft_length or most or DEFAULT_DRAFT_LENGTH
        if most is not None and length > most:
            raise ConfigError.of(
                "train.draft_length", length, f"at most {most}, the {self.drafter.type} drafter's heads"
            )
        return length


def shipped_recipes() -> dict[str, str]:
    """Return the text of every recipe in the package by name, e.g. `quickstart/mtp`."""
    root = files("draftsmith.recipes")
    texts = {}
    for folder in sorted(root.iterdir(), key=lambda entry: entry.name):
        if folder.is_dir() and folder.name != LAUNCH_CONFIGS:
            for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
                if file.name.endswith(".yaml"):
                    texts[f"{folder.name}/{file.name.removesuffix('.yaml')}"] = file.read_text(encoding="utf-8")
    return texts


def launch_configs() -> dict[str, Path]:
    """Return the files for `accelerate launch --config_file` in the package, e.g. of `ddp_8gpu`."""
    folder = Path(str(files("draftsmith.recipes"))) / LAUNCH_CONFIGS
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def unknown_recipe(name: str, known: Iterable[str], others: str = "") -> ConfigError:
    """Return the error for a name that is not among the `known` ones; it begins with the nearest of them."""
    near = get_close_matches(name.removesuffix(".yaml").removeprefix("recipes/"), known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}? Expected" if near else "expected"
    return ConfigError(f"recipe={name}; {hint} {others}one of {', '.join(known)}")


def load_recipe(source: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from a YAML file, or the shipped one of that name; `overrides` are `section.key=value` and win.

    Raises:
        ConfigError: for a missing file, an unknown key (with the nearest valid one) or a value out of range.
    """
    path, shipped = Path(source), shipped_recipes()
    if path.is_file():
        text = _read(path)
    elif source.removesuffix(".yaml").removeprefix("recipes/") in shipped:
        text = shipped[source.removesuffix(".yaml").removeprefix("recipes/")]
    else:
        raise unknown_recipe(source, shipped, "a YAML file or ")
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
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe={path} cannot be read ({error}); expected YAML in UTF-8") from error


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """Return the recipe that plain values describe, with every check that needs no machine.

    Raises:
        ConfigError: with the first problem in one line, and `source`.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{_explain(error, values)} ({source})") from error


def parse_stored(values: dict[str, Any], source: str) -> Recipe:
    """Return the recipe that a run has stored: a key that this version does not have is left out where it was off.

    Raises:
        ConfigError: as `parse_recipe`, also for such a key with another value.
    """
    values = deepcopy(values)
    values.get("data", {}).pop("speculate", None)  # of a run of 0.3: without data.refresh_every, it changed nothing
    values.get("target", {}).pop("tensor_parallel", None)  # of a run of 0.4: where weights are changes no number
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "extra_forbidden" and not problem["input"]:
                *sections, key = _location(problem, values)
                del reduce(dict.__getitem__, sections, values)[key]
    return parse_recipe(values, source)


def override(values: dict[str, Any], entry: str) -> None:
    """Set `section.key=value` in plain values."""
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
    """Return the first problem in one line: key, value and accepted values."""
    problems = [(_location(problem, values), problem) for problem in error.errors()]
    cause = problems[0][1].get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # of `_check_combinations`
        return str(cause)
    first = problems[0][0]
    # A value that may be a list has problems as one thing and as the other: the one of an element says more.
    location, problem = max((one for one in problems if one[0][: len(first)] == first), key=lambda one: len(one[0]))
    drafter = values.get("drafter")
    kind = drafter.get("type") if isinstance(drafter, dict) else drafter
    key = ".".join(location)
    if key in REMOVED:
        return str(removed(key))
    if problem["type"] == "extra_forbidden":
        known = _keys(location[:-1], kind)
        near = get_close_matches(location[-1], known, 1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown key {key}={problem['input']!r}; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing; expected a value"
    if problem["type"].startswith("union_tag"):
        if f"drafter.type={kind}" in REMOVED:
            return str(removed(f"drafter.type={kind}"))
        return f"drafter.type={kind!r}; expected one of {', '.join(DRAFTERS)}"
    return f"{key}={problem['input']!r}; expected {expected(problem)}"


def _location(problem: ErrorDetails, values: Any) -> list[str]:
    """Return the keys and indices in `values` that lead to a problem; pydantic puts names of types between them."""
    location = []
    for part in problem["loc"]:
        inside: Any = dict(enumerate(values)) if isinstance(values, list) else values
        if isinstance(inside, dict) and part in inside:
            values = inside[part]
            location.append(str(part))
    return [*location, str(problem["loc"][-1])] if problem["type"] == "missing" else location


def _keys(sections: list[str], kind: str | None) -> list[str]:
    """Return the keys of a section; without one, those of the recipe itself."""
    if not sections:
        return list(Recipe.model_fields)
    if sections == ["data", "server"]:
        return list(ServerSection.model_fields)
    if sections[1:2] == ["prompts"]:
        return list(SourceSection.model_fields)
    section = DRAFTERS[str(kind)].section if sections[0] == "drafter" else SECTIONS[sections[0]]
    return list(section.model_fields)
