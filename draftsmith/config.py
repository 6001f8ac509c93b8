"""The base class of recipe sections and of commands' settings, types of their fields, and messages about wrong values.

A field is a recipe key, an option of a command (option_fields.py), or both: its docstring is the help, its type the
check.
"""

import os.path
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftsmith.errors import ConfigError

BOUNDS = (
    ("greater_than", ">", "gt"),
    ("greater_than_equal", ">=", "ge"),
    ("less_than", "<", "lt"),
    ("less_than_equal", "<=", "le"),
)


def no_truth_value(value: Any) -> Any:
    # YAML reads `yes` as true, which pydantic would convert to 1.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def no_as_written(value: Any) -> Any:
    # YAML reads an unquoted `no` as false.
    return "no" if value is False else value


Whole = Annotated[int, BeforeValidator(no_truth_value)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(no_truth_value)]
Depth = Annotated[int, Field(ge=1, le=1024), BeforeValidator(no_truth_value)]
"""A number of layers, heads or steps that are built one by one."""
Number = Annotated[float, BeforeValidator(no_truth_value)]
Location = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, whose leading `~` is replaced by the home folder, or a Hub id."""
LARGEST_SEED = 2**32 - 1
"""Largest seed of the command line: seeds of single texts are computed from it and must fit into 64 bits."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(no_truth_value)]
HOTTEST, COLDEST = 1e30, 1e-30
"""The largest temperature, and the smallest one: logits divided by less may leave float32."""
TEMPERATURES = f">= 0 (0 is greedy, others from {COLDEST:g} on) and at most {HOTTEST:g}"

TEMPLATE_ARGUMENTS = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
"""Arguments of transformers' `apply_chat_template`, which variables of a template would replace."""


def _temperature(value: float) -> float:
    if value != 0 and not COLDEST <= value <= HOTTEST:
        raise ValueError(TEMPERATURES)
    return value


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("each only once")
    return values


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(value.keys() & TEMPLATE_ARGUMENTS):
        raise ValueError(f"variables of the template, without arguments of apply_chat_template ({', '.join(taken)})")
    return value


Temperature = Annotated[Number, AfterValidator(_temperature)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
Probability = Annotated[Number, Field(gt=0, le=1)]
Distinct = AfterValidator(_distinct)
"""For tuples: refuses a value that is given twice."""


class Section(BaseModel):
    """Base class of all sections: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    options: ClassVar[tuple[str, ...]] = ()
    """The fields that are options of its command; by default all."""


AnySection = TypeVar("AnySection", bound=Section)
FieldPath = tuple[str | int, ...]
"""The names of a field and of the fields that hold its section."""


def section_of(kind: type[AnySection], key: Callable[[FieldPath], str], values: dict[str, Any]) -> AnySection:
    """Return the section of these values.

    Raises:
        ConfigError: for the first value that is wrong; `key` returns what the field at a path is called for the user.
    """
    try:
        return kind.model_validate(values, context=lambda name: key((name,)))
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        name, value = key(problem["loc"]), problem["input"]
        if problem["type"] == "missing":
            raise ConfigError(f"{name} is missing; expected {meaning(_field(kind, problem['loc']))}") from error
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            raise ConfigError(
                f"unknown key {name}={value!r}; expected one of {', '.join(kind.model_fields)}"
            ) from error
        shown = value if name.startswith("--") and value and isinstance(value, str) else repr(value)
        raise ConfigError(f"{name}={shown}; expected {expected(problem)}") from error


def user_name(info: ValidationInfo, name: str) -> str:
    """Return what a field is called for the user in messages of a validator; see `section_of`."""
    return info.context(name) if info.context else name


def section_in(field: FieldInfo) -> type[Section]:
    """Return the section that a field holds, which may be optional."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))


def _field(kind: type[Section], path: FieldPath) -> FieldInfo:
    field = kind.model_fields[str(path[0])]
    return field if len(path) == 1 else _field(section_in(field), path[1:])


def meaning(field: FieldInfo) -> str:
    """Return the first sentence about a field, as the end of a sentence."""
    text = " ".join((field.description or "a value").split()).split(". ")[0].rstrip(".")
    return text[0].lower() + text[1:]


def expected(problem: ErrorDetails) -> str:
    """Return the values that pydantic would have accepted, in this project's words."""
    bounds, kind = problem.get("ctx", {}), problem["type"]
    if kind.startswith(("model_type", "model_attributes_type")):
        return "a section with keys"
    if kind == "string_too_short":
        return "a string of at least one character"
    if kind == "string_too_long":
        return f"at most {bounds['max_length']} characters"
    for name, sign, bound in BOUNDS:
        if kind == name:
            return f"{sign} {bounds[bound]:.12g}"
    return problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
