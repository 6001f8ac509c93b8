"""The base class of all recipe sections, the number types of their fields, and messages about wrong values."""

import os.path
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
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


class Section(BaseModel):
    """Base class of all sections: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


AnySection = TypeVar("AnySection", bound=Section)


def section_of(kind: type[AnySection], key: Callable[[str], str], **values: Any) -> AnySection:
    """Return the section of these values, without those that are None.

    Raises:
        ConfigError: for the first value that is wrong; `key` returns what its field is called for the user.
    """
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        name = key(".".join(map(str, problem["loc"][:1])))
        raise ConfigError(f"{name}={problem['input']!r}; expected {expected(problem)}") from error


def expected(problem: ErrorDetails) -> str:
    """Return the values that pydantic would have accepted, in this project's words."""
    bounds, kind = problem.get("ctx", {}), problem["type"]
    if kind.startswith(("model_type", "model_attributes_type")):
        return "a section with keys"
    if kind == "string_too_long":
        return f"at most {bounds['max_length']} characters"
    for name, sign, bound in BOUNDS:
        if kind == name:
            return f"{sign} {bounds[bound]:.12g}"
    return problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
